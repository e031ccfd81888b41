"""Arrays, tensors and buffers as the contiguous memory that lanes move, without copies where possible."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from covey.base.arithmetic import BFLOAT16, DTYPES, dtype_code

if TYPE_CHECKING:
    import array
    from collections.abc import Sequence

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
        """Store, and return the result of the operation."""
        self.store()
        return result


def writable(x: Any) -> Operand:
    """Return `x` as an operand that an operation changes in place; an operand is returned as it is.

    Raises:
        TypeError: `x` is no array, is read-only, or has a dtype that covey does not move.
    """
    if isinstance(x, Operand):
        return x
    array = as_array(x)
    if not array.flags.writeable:
        raise TypeError("the array is read-only; pass a copy: x = x.copy()")
    return _operand(array)


def readable(x: Any) -> Operand:
    """Return `x` as an operand that an operation only reads; numbers and lists become arrays."""
    if isinstance(x, Operand):
        return x
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
    """Return a numpy array over the memory of `x`: an array, a torch CPU tensor, or a buffer."""
    if isinstance(x, np.ndarray):
        if type(x) is np.ndarray:
            return x
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("covey cannot move masked arrays; pass x.filled(...) or x.data and x.mask")
        return x.view(np.ndarray)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return tensor_memory(x)
    if isinstance(x, np.generic | list | tuple | int | float | complex | str):
        raise TypeError(f"cannot work on a {type(x).__name__} in place; pass a numpy array, a torch tensor or a buffer")
    try:
        view = memoryview(x)
    except TypeError:
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        raise TypeError(
            f"{type(x).__name__} is no array: pass a numpy array, a torch CPU tensor, or what has a buffer or DLPack"
        ) from None
    return np.asarray(view)


class _TensorMemory:
    """A tensor's memory for numpy. After `Tensor.numpy()`, torch could never resize the storage again."""

    __slots__ = ("__array_interface__", "owner")
    __array_interface__: dict[str, Any]
    owner: Any


_formats: dict[Any, tuple[np.dtype[Any], str]] = {}
"""By torch dtype, filled on first use: the numpy dtype, and its text in an array interface."""


def tensor_memory(tensor: Any) -> Array:
    """Return an array over the memory of a CPU tensor, which it keeps alive; for bfloat16 and requires_grad, too."""
    if not tensor.is_cpu or tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"the tensor is {tensor.layout} on {tensor.device}; make it a plain one: x.to_dense().cpu()")
    dtype, text = _formats.get(tensor.dtype) or _format(tensor.dtype)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("the tensor is a lazy conjugate or negative view; call x.resolve_conj().resolve_neg() first")
    memory = _TensorMemory()
    memory.owner = tensor
    memory.__array_interface__ = interface = {
        "version": 3,
        "shape": tensor.shape,
        "typestr": text,
        "data": (tensor.data_ptr(), False),
    }
    if not tensor.is_contiguous():
        interface["strides"] = tuple(step * dtype.itemsize for step in tensor.stride())
    array = np.asarray(memory)
    return array.view(BFLOAT16) if dtype is BFLOAT16 else array


def _format(torch_dtype: Any) -> tuple[np.dtype[Any], str]:
    name = str(torch_dtype).removeprefix("torch.")
    dtype = next((dtype for dtype in DTYPES if dtype.name == name), None)
    if dtype is None:
        raise TypeError(f"covey cannot move tensors of {torch_dtype}")
    return _formats.setdefault(torch_dtype, (dtype, "<i2" if dtype is BFLOAT16 else dtype.str))
