"""What covey needs of a type of arrays whose memory it cannot use in place, and which type has which adapter.

Arrays on a device pass through host memory: `stage_in` fills it before an operation, `stage_out` copies it back after.
Arrays that cannot be changed, such as those of JAX, take the same way, and an operation returns the new one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    HostArray = np.ndarray[Any, np.dtype[Any]]


class StagedArray(Protocol):
    """One array on its way through host memory, for one operation: `host`, `stage_in`, `stage_out`, `synchronise`."""

    host: HostArray
    """Contiguous host memory with the shape and dtype of the array; pinned, if the device copies that faster."""

    def stage_in(self) -> Callable[[], None]:
        """Begin to copy the array into `host`, after the work that the caller has queued on the device.

        Return a function that waits until the copy is there. It is called once, and maybe on another thread. An
        operation that begins again after a loss calls `stage_in` again.
        """

    def stage_out(self) -> Any:
        """Begin to copy `host` back, and return the array: the same one, or a new one where none may be changed.

        The copy comes after what the caller had queued on the device when this object was made: that may still read the
        array. `host` is not touched again before another `stage_in`.
        """

    def order(self) -> None:
        """Let work that this thread queues on the device from now on come after the copy of `stage_out`."""

    def synchronise(self) -> None:
        """Return once the copy of `stage_out` is complete."""


class ArrayAdapter(Protocol):
    """Moves arrays of one type between where they live and host memory; see `covey.register_adapter`.

    Methods may be called on any thread, by several threads at the same time.
    """

    def view(self, x: Any) -> HostArray | None:
        """Return an array over the memory of `x` if that is host memory; None if it is not.

        If it is read-only, operations that only read use it, and those that change `x` stage it.
        """

    def stage(self, x: Any) -> StagedArray:
        """Return what carries `x` through host memory. It keeps `x` alive."""

    def new(self, values: HostArray, like: Any) -> Any:
        """Return a new array with these values where `like` lives: what operations return that make arrays."""


_ADAPTER_MODULES: Final = {
    "torch": "covey.arrays.torch_devices",
    "jax": "covey.arrays.libraries",
    "jaxlib": "covey.arrays.libraries",
    "cupy": "covey.arrays.libraries",
    "mlx": "covey.arrays.libraries",
}
"""By the library that defines a type: the module that has its adapter, imported with the first array of the library."""
_EXCHANGED: Final = ("__cuda_array_interface__", "__dlpack__")
"""What types of further libraries have: `covey.arrays.libraries` takes those as well."""

_registered: dict[type, ArrayAdapter] = {}
_found: dict[type, ArrayAdapter | None] = {}
"""By the exact type of an array: the adapter, or None for what covey uses in place."""


def register_adapter(array_type: type, adapter: ArrayAdapter) -> None:
    """Let operations of groups take arrays of `array_type` and its subclasses, with an `ArrayAdapter`.

    An adapter that was registered before, and those of covey, are replaced for this type. Register on every rank that
    has such arrays, before the first operation with one. numpy arrays need none and cannot have one.

    Raises:
        ConfigError: `array_type` is no type, or one that covey uses in place, or the adapter lacks a method.
    """
    if not isinstance(array_type, type) or array_type is object:
        raise ConfigError(f"array_type={array_type!r} must be the class of the arrays, such as cupy.ndarray")
    if issubclass(array_type, np.ndarray):
        raise ConfigError(f"{array_type.__name__} is a numpy array, which covey uses in place; it takes no adapter")
    missing = [name for name in ("view", "stage", "new") if not callable(getattr(adapter, name, None))]
    if missing:
        raise ConfigError(f"the adapter of {array_type.__name__} has no {', '.join(missing)}; see covey.ArrayAdapter")
    _registered[array_type] = adapter
    _found.clear()


def adapter_of(x: Any) -> ArrayAdapter | None:
    """Return the adapter of an array; None for what has none: numpy arrays, buffers, numbers, lists."""
    kind = type(x)
    try:
        return _found[kind]
    except KeyError:
        return _found.setdefault(kind, _find(kind))


def _find(kind: type) -> ArrayAdapter | None:
    for each in kind.__mro__[:-1]:
        if each in _registered:
            return _registered[each]
    if issubclass(kind, np.ndarray | np.generic):
        return None
    libraries = (each.__module__.partition(".")[0] for each in kind.__mro__[:-1])
    module = next((_ADAPTER_MODULES[library] for library in libraries if library in _ADAPTER_MODULES), None)
    if module is None and any(hasattr(kind, name) for name in _EXCHANGED):
        module = "covey.arrays.libraries"
    adapter: ArrayAdapter | None = None if module is None else import_module(module).adapter_for(kind)
    return adapter
