"""Adapters of JAX, CuPy and MLX, and of further types that CUDA's array interface or DLPack describes."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.arrays.adapter import ArrayAdapter, StagedArray

    Array = np.ndarray[Any, np.dtype[Any]]

_HOST_DEVICES: Final = (1, 3)
"""The kinds of devices of DLPack whose memory the processor uses: its own, and memory pinned for CUDA."""


def adapter_for(kind: type) -> ArrayAdapter | None:
    """Return the adapter of a type of arrays; None if it is no array of its library."""
    library = kind.__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        return JAX_ARRAYS
    if library == "cupy":
        return CUPY_ARRAYS if hasattr(kind, "__cuda_array_interface__") else None
    if library == "mlx":
        return MLX_ARRAYS if hasattr(kind, "__dlpack__") else None
    return EXCHANGED_ARRAYS


class Renewed:
    """An array that is never changed: its values are copied to host memory, and the result is a new array."""

    def __init__(self, adapter: ImmutableAdapter, x: Any) -> None:
        self._adapter, self._x = adapter, x
        self.host: Array = np.empty(tuple(x.shape), adapter.dtype(x))

    def stage_in(self) -> Callable[[], None]:
        self._adapter.begin(self._x)
        return self._fill

    def _fill(self) -> None:
        self.host[...] = self._adapter.values(self._x)

    def stage_out(self) -> Any:
        return self._adapter.new(self.host, self._x)

    def order(self) -> None:
        """Do nothing: the library lets whatever uses the new array wait for it."""

    def synchronise(self) -> None:
        """Do nothing, as in `order`."""


class ImmutableAdapter:
    """Arrays of a library whose operations return new arrays. What is on the host is read in place."""

    def view(self, x: Any) -> Array | None:
        if not self.is_on_host(x):
            return None
        values = self.values(x)
        values.flags.writeable = False
        return values

    def stage(self, x: Any) -> StagedArray:
        self.is_on_host(x)  # raises for what is no array of numbers
        return Renewed(self, x)

    def new(self, values: Array, like: Any) -> Any:
        """Return a new array where `like` lives; it may use the memory of `values`, which covey leaves alone then."""
        raise NotImplementedError

    def is_on_host(self, x: Any) -> bool:
        """Tell whether the processor can read the memory of `x`."""
        raise NotImplementedError

    def dtype(self, x: Any) -> np.dtype[Any]:
        """Return the dtype of `x` in host memory."""
        raise NotImplementedError

    def begin(self, x: Any) -> None:
        """Begin to compute `x`, and to copy it to the host, if the library can begin without waiting."""

    def values(self, x: Any) -> Array:
        """Return the values of `x` in host memory, once they are computed; without a copy if they are there."""
        raise NotImplementedError


class JaxAdapter(ImmutableAdapter):
    """JAX arrays, whole ones and sharded ones whose parts are all in this process; results are sharded alike."""

    def new(self, values: Array, like: Any) -> Any:
        import jax

        sharding = like.sharding
        if values.shape != like.shape and len(like.devices()) > 1:  # such as a part of it, which may not be divisible
            sharding = min(like.devices(), key=lambda device: device.id)
        return jax.device_put(values, sharding)

    def is_on_host(self, x: Any) -> bool:
        import jax

        if isinstance(x, jax.core.Tracer):
            raise TypeError("a group cannot take an array inside jit, grad or vmap; call covey.jax.all_reduce(x) there")
        if not x.is_fully_addressable:
            raise TypeError("the JAX array has parts in other processes; pass the parts here: x.addressable_shards")
        return len(x.devices()) == 1 and all(device.platform == "cpu" for device in x.devices())

    def dtype(self, x: Any) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(x.dtype)
        return dtype

    def begin(self, x: Any) -> None:
        x.copy_to_host_async()

    def values(self, x: Any) -> Array:
        return np.asarray(x)


class MlxAdapter(ImmutableAdapter):
    """MLX arrays, which the processor and the GPU of a machine share."""

    def new(self, values: Array, like: Any) -> Any:
        import mlx.core as mx

        if values.dtype == BFLOAT16:
            made = mx.array(values.view(np.uint16)).view(mx.bfloat16)
        else:
            made = mx.array(values, dtype=like.dtype)
        mx.eval(made)  # on this thread: MLX computes nothing that another thread has begun
        return made

    def is_on_host(self, x: Any) -> bool:
        return True

    def dtype(self, x: Any) -> np.dtype[Any]:
        name = str(x.dtype).rpartition(".")[2]
        return BFLOAT16 if name == "bfloat16" else np.dtype(name)

    def begin(self, x: Any) -> None:
        import mlx.core as mx

        mx.eval(x)  # on the thread that issues the operation: no other one can

    def values(self, x: Any) -> Array:
        import mlx.core as mx

        if x.dtype == mx.bfloat16:  # has no format in Python's buffers
            return np.array(x.view(mx.uint16), copy=None).view(BFLOAT16)
        return np.array(x, copy=None)


class _CupyStreams:
    """The two streams of one device, and what copies to it still read and write."""

    def __init__(self) -> None:
        import cupy

        self.leaving, self.coming = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self._in_use: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()

    def keep(self, *arrays: Any) -> None:
        """Keep arrays until the copies to the device that were begun so far are complete: pools would reuse them."""
        with self._lock:
            self._in_use = [(event, kept) for event, kept in self._in_use if not event.done]
            self._in_use.append((self.coming.record(), arrays))


class StagedCupy:
    """An array of CuPy, on its way through pinned memory, on two streams beside the caller's."""

    def __init__(self, x: Any, shown: Any, streams: _CupyStreams) -> None:
        """`x` is what the operation was given, and `shown` an array of CuPy over its memory."""
        import cupy
        import cupyx

        self._x, self._shown, self._streams = x, shown, streams
        self.host: Array = cupyx.empty_pinned(shown.shape, shown.dtype)
        with shown.device:
            self._mark = cupy.cuda.get_current_stream().record()

    def stage_in(self) -> Callable[[], None]:
        import cupy

        leaving, source = self._streams.leaving, self._shown
        with source.device, leaving:
            leaving.wait_event(self._mark)
            source = cupy.ascontiguousarray(source)
            source.get(stream=leaving, out=self.host, blocking=False)
            copied = leaving.record()

        def wait(_: Any = source) -> None:  # which must live until then
            copied.synchronize()

        return wait

    def stage_out(self) -> Any:
        import cupy

        coming = self._streams.coming
        with self._shown.device, coming:
            coming.wait_event(self._mark)
            if self._shown.flags.c_contiguous:
                self._shown.set(self.host, stream=coming)
                self._streams.keep(self._shown, self.host)
            else:
                arrived = cupy.empty_like(self._shown, order="C")
                arrived.set(self.host, stream=coming)
                self._shown[...] = arrived
                self._streams.keep(self._shown, self.host, arrived)
        return self._x

    def order(self) -> None:
        import cupy

        with self._shown.device:
            cupy.cuda.get_current_stream().wait_event(self._streams.coming.record())

    def synchronise(self) -> None:
        self._streams.coming.synchronize()


class CupyAdapter:
    """Arrays of CuPy, which pass through pinned memory on two streams of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, _CupyStreams] = {}

    def view(self, x: Any) -> Array | None:
        return None

    def stage(self, x: Any) -> StagedArray:
        return self.staged(x, x)

    def staged(self, x: Any, shown: Any) -> StagedArray:
        """Return what carries `x`, over whose memory `shown` is, through host memory."""
        with self._lock, shown.device:
            if shown.device.id not in self._streams:
                self._streams[shown.device.id] = _CupyStreams()
            return StagedCupy(x, shown, self._streams[shown.device.id])

    def new(self, values: Array, like: Any) -> Any:
        import cupy

        with like.device:
            return cupy.array(values)


class ExchangedAdapter:
    """Arrays of any library with CUDA's array interface or DLPack; on a device, CuPy or torch copies them.

    What operations make of an array on a device is an array of CuPy, or a tensor where CuPy is not installed. Both have
    the same two interfaces.
    """

    def view(self, x: Any) -> Array | None:
        if hasattr(x, "__cuda_array_interface__") or x.__dlpack_device__()[0] not in _HOST_DEVICES:
            return None
        try:
            return np.asarray(memoryview(x))
        except TypeError:
            return np.from_dlpack(x)

    def stage(self, x: Any) -> StagedArray:
        if self.view(x) is not None:
            raise TypeError(f"the {type(x).__name__} is read-only; pass a copy")
        shown = _shown(x)
        if _is_tensor(shown):
            from covey.arrays.torch_devices import TENSORS

            return TENSORS.stage(shown, given=x)
        return CUPY_ARRAYS.staged(x, shown)

    def new(self, values: Array, like: Any) -> Any:
        if self.view(like) is not None:
            return values
        shown = _shown(like)
        if _is_tensor(shown):
            from covey.arrays.torch_devices import TENSORS

            return TENSORS.new(values, shown)
        return CUPY_ARRAYS.new(values, shown)


def _shown(x: Any) -> Any:
    """Return an array of CuPy, or a tensor, over the memory of `x`, which is on a device."""
    if _is_there("cupy") and hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    if _is_there("torch"):
        import torch

        return torch.from_dlpack(x) if hasattr(x, "__dlpack__") else torch.as_tensor(x, device="cuda")
    raise TypeError(f"the {type(x).__name__} is on a device; install CuPy or torch, with which covey copies it")


def _is_there(library: str) -> bool:
    return library in sys.modules or find_spec(library) is not None


def _is_tensor(shown: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(shown, torch.Tensor)


JAX_ARRAYS: Final = JaxAdapter()
MLX_ARRAYS: Final = MlxAdapter()
CUPY_ARRAYS: Final = CupyAdapter()
EXCHANGED_ARRAYS: Final = ExchangedAdapter()
