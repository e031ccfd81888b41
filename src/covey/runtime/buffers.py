"""What people pass as an array, seen as the contiguous memory that lanes move. Never copies without need."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.base.dtypes import BFLOAT16, dtype_code

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


class Operand(NamedTuple):
    """An argument, ready to be moved."""

    flat: Array
    """One-dimensional and contiguous; the argument's own memory wherever possible."""
    shape: tuple[int, ...]
    code: int
    """Of the dtype, on the wire."""
    strided: Array | None = None
    """The argument, if it is not contiguous: then `flat` stands in for it between `load` and `store`."""

    def load(self) -> Array:
        """Return `flat` with what the argument holds now. An operation may run long after it was issued."""
        if self.strided is not None:
            self.flat.reshape(self.shape)[...] = self.strided
        return self.flat

    def store(self) -> None:
        """Make the argument show what `flat` holds."""
        if self.strided is not None:
            self.strided[...] = self.flat.reshape(self.shape)


def writable(x: Any) -> Operand:
    """See `x` as an operand that an operation changes in place.

    Raises:
        TypeError: it is no array, cannot be written, or has a dtype that covey does not move.
    """
    array = as_array(x)
    if not array.flags.writeable:
        raise TypeError("the array is read-only; pass a copy: x = x.copy()")
    return _operand(array)


def readable(x: Any) -> Operand:
    """See `x` as an operand that an operation only reads; numbers and lists are taken as arrays too."""
    is_plain = isinstance(x, list | tuple | int | float | complex | np.generic)
    return _operand(np.asarray(x) if is_plain else as_array(x))


def _operand(array: Array) -> Operand:
    code = dtype_code(array.dtype)
    if array.flags.c_contiguous:
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
        return _tensor_memory(x)
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


def _tensor_memory(tensor: Any) -> Array:
    """Return an array over a CPU tensor's memory, found by its pointer: bfloat16 and requires_grad work too."""
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"the tensor is {tensor.layout} on {tensor.device}; move it to the CPU first: x.cpu()")
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    except TypeError:
        raise TypeError(f"covey cannot move tensors of {tensor.dtype}") from None
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return np.empty(shape, dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("the tensor is a lazy conjugate or negative view; call x.resolve_conj().resolve_neg() first")
    strides = tuple(step * dtype.itemsize for step in tensor.stride())
    extent = dtype.itemsize + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * extent).from_address(tensor.data_ptr())
    memory._covey_owner = tensor  # the memory must outlive the array
    return np.ndarray(shape, dtype, memory, strides=strides)
