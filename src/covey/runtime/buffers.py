"""Arrays, tensors and buffers as the contiguous memory that lanes move, without copies where possible."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from covey.arrays.adapter import adapter_of
from covey.base.arithmetic import dtype_code

if TYPE_CHECKING:
    import array
    from collections.abc import Callable, Sequence

    from covey.arrays.adapter import ArrayAdapter, StagedArray

    class Tensor(Protocol):
        """A torch tensor, or whatever else has DLPack."""

        def __dlpack__(self) -> Any: ...

    Array = np.ndarray[Any, np.dtype[Any]]
    Memory = Array | bytearray | memoryview[Any] | array.array[Any] | Tensor
    """What an operation can change in place."""
    MemoryT = TypeVar("MemoryT", bound=Memory)
    Values = Memory | bytes | np.generic | complex | Sequence[complex] | Sequence[Sequence[complex]]
    """What an operation can read; numbers and lists become arrays."""

BYTES: Final = dtype_code(np.dtype(np.uint8))
"""The dtype code of pickled objects on the wire."""


class Part(NamedTuple):
    """A named range of an array that is compressed as a whole: elements start:stop, which are an array of `shape`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Operand(NamedTuple):
    """An argument of an operation as contiguous memory."""

    flat: Array
    """One-dimensional and contiguous; the argument's own memory wherever possible."""
    shape: tuple[int, ...]
    code: int
    """The dtype code on the wire."""
    strided: Array | None = None
    """The argument, if it is not contiguous or not aligned: then `flat` is a copy that `load` fills and `store` copies
    back."""

    @property
    def is_own(self) -> bool:
        """Whether `flat` is the argument's own memory."""
        return self.strided is None

    def load(self) -> Array:
        """Return `flat` with the values that the argument has now: an operation may run long after it was issued."""
        if self.strided is not None:
            self.flat.reshape(self.shape)[...] = self.strided
        return self.flat

    def store(self) -> None:
        """Copy `flat` back to the argument, if it is a copy."""
        if self.strided is not None:
            self.strided[...] = self.flat.reshape(self.shape)

    def deliver(self, result: Any) -> Any:
        """Store, and return the result of the operation: `result`, unless what holds it is a new array."""
        self.store()
        return result

    @property
    def alike(self) -> Callable[[Any], Any] | None:
        """What puts arrays that the operation makes where the argument lives; None if that is host memory."""
        return None


class ForeignOperand(Operand):
    """An argument of a type that has an adapter: what operations make of it has the same type."""

    _adapter: ArrayAdapter
    _source: Any

    @classmethod
    def over(cls, x: Any, memory: Array, adapter: ArrayAdapter) -> ForeignOperand:
        """Return an operand over memory of `x` that covey may use in place."""
        made = cls(*_operand(memory))
        made._adapter, made._source = adapter, x
        return made

    @property
    def alike(self) -> Callable[[Any], Any]:
        return self.make_alike

    def make_alike(self, made: Any) -> Any:
        """Return arrays that an operation made where the argument lives; None stays None, for a lost rank."""
        if isinstance(made, list):
            return [self.make_alike(each) for each in made]
        return None if made is None else self._adapter.new(made, self._source)


class StagedOperand(ForeignOperand):
    """An argument whose memory covey cannot use: `flat` is host memory that holds a copy of it."""

    _staged: StagedArray
    _is_read: bool
    _arrival: Callable[[], None] | None
    _issuer: int | None
    """The thread that issued the operation; None if what issued it orders later work itself."""
    _result: Any

    @classmethod
    def of(cls, x: Any, adapter: ArrayAdapter, *, is_read: bool = True, is_ordered: bool = True) -> StagedOperand:
        """Return an operand for `x`; if it `is_read`, begin to copy it to host memory.

        With `is_ordered`, work on the device that follows a blocking operation comes after the result, and an
        asynchronous one is done when the result is there.
        """
        staged = adapter.stage(x)
        host = staged.host
        made = cls(host.reshape(-1), host.shape, dtype_code(host.dtype))
        made._adapter, made._source, made._staged, made._is_read = adapter, x, staged, is_read
        made._arrival = staged.stage_in() if is_read else None
        made._issuer = threading.get_ident() if is_ordered else None
        made._result = None
        return made

    @property
    def is_own(self) -> bool:
        return False

    @property
    def is_ordered(self) -> bool:
        """Whether `deliver` lets later work on the device come after the result."""
        return self._issuer is not None

    def load(self) -> Array:
        """Wait for the copy of the argument, and return `flat`; a later call copies the argument again."""
        if self._is_read:
            arrival, self._arrival = self._arrival, None
            if arrival is None:
                arrival = self._staged.stage_in()
            arrival()
        return self.flat

    def store(self) -> None:
        """Begin to copy `flat` back."""
        self._result = self._staged.stage_out()

    def deliver(self, result: Any) -> Any:
        """Store, and return the array with the result."""
        self.store()
        if self._issuer == threading.get_ident():
            self._staged.order()
        elif self._issuer is not None:
            self._staged.synchronise()
        return self._result


def writable(x: Any, *, is_read: bool = True) -> Operand:
    """Return `x` as an operand that an operation changes; an operand is returned as it is.

    Without `is_read` the operation overwrites all of it: what is on a device need not be copied to the host.

    Raises:
        TypeError: `x` is no array, is read-only, or has a dtype that covey does not move.
    """
    if isinstance(x, Operand):
        return x
    if type(x) is not np.ndarray and (adapter := adapter_of(x)) is not None:
        memory = adapter.view(x)
        if memory is None or not memory.flags.writeable:
            return StagedOperand.of(x, adapter, is_read=is_read)
        return ForeignOperand.over(x, memory, adapter)
    array = as_array(x)
    if not array.flags.writeable:
        raise TypeError("the array is read-only; pass a copy: x = x.copy()")
    return _operand(array)


def readable(x: Any) -> Operand:
    """Return `x` as an operand that an operation only reads; numbers and lists become arrays."""
    if isinstance(x, Operand):
        return x
    if type(x) is not np.ndarray and (adapter := adapter_of(x)) is not None:
        memory = adapter.view(x)
        return StagedOperand.of(x, adapter) if memory is None else ForeignOperand.over(x, memory, adapter)
    is_plain = isinstance(x, list | tuple | int | float | complex | np.generic)
    return _operand(np.asarray(x) if is_plain else as_array(x))


def byte_operand(data: bytes) -> Operand:
    """Return bytes as an operand that an operation only reads."""
    flat = np.frombuffer(data, np.uint8)
    return Operand(flat, flat.shape, BYTES)


def _operand(array: Array) -> Operand:
    code = dtype_code(array.dtype)
    flags = array.flags
    if flags.c_contiguous and flags.aligned:  # loops over elements may crash on memory that is not aligned
        return Operand(array if array.ndim == 1 else array.reshape(-1), array.shape, code)
    return Operand(np.empty(array.size, array.dtype), array.shape, code, array)


def as_array(x: Any) -> Array:
    """Return a numpy array over the memory of `x`: an array or tensor in host memory, or a buffer."""
    if isinstance(x, np.ndarray):
        if type(x) is np.ndarray:
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("covey cannot move masked arrays; pass x.filled(...) or x.data and x.mask")
        return x.view(np.ndarray)
    if isinstance(x, np.generic | list | tuple | int | float | complex | str):
        raise TypeError(f"cannot work on a {type(x).__name__} in place; pass a numpy array, a torch tensor or a buffer")
    if (adapter := adapter_of(x)) is not None:
        memory = adapter.view(x)
        if memory is None:
            raise TypeError(f"the {type(x).__name__} is not in host memory; copy it there first")
        return memory
    try:
        view = memoryview(x)
    except TypeError:
        raise TypeError(
            f"{type(x).__name__} is no array: pass a numpy array, a torch tensor, a buffer, or what has DLPack; "
            "covey.register_adapter adds a type"
        ) from None
    return np.asarray(view)
