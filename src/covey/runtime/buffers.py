"""What people pass as an array, seen as the contiguous memory that lanes move. Never copies without need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.dtypes import BFLOAT16, DTYPES, dtype_code

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

BYTES: Final = dtype_code(np.dtype(np.uint8))
"""How objects travel, on the wire."""


class Operand(NamedTuple):
    """An argument, ready to be moved."""

    flat: Array
    """One-dimensional and contiguous; the argument's own memory wherever possible."""
    shape: tuple[int, ...]
    code: int
    """Of the dtype, on the wire."""
    strided: Array | None = None
    """The argument, if it is not contiguous: then `flat` stands in for it between `load` and `store`."""

    @property
    def is_own(self) -> bool:
        """Whether `flat` is the argument's own memory."""
        return self.strided is None

    def load(self) -> Array:
        """Return `flat` with what the argument holds now. An operation may run long after it was issued."""
        if self.strided is not None:
            self.flat.reshape(self.shape)[...] = self.strided
        return self.flat

    def store(self) -> None:
        """Make the argument show what `flat` holds."""
        if self.strided is not None:
            self.strided[...] = self.flat.reshape(self.shape)

    def deliver(self, result: Any) -> Any:
        """Return the result of an operation, once the argument shows what `flat` holds."""
        self.store()
        return result


def writable(x: Any) -> Operand:
    """See `x` as an operand that an operation changes in place; one that is made already is taken as it is.

    Raises:
        TypeError: it is no array, cannot be written, or has a dtype that covey does not move.
    """
    if isinstance(x, Operand):
        return x
    array = as_array(x)
    if not array.flags.writeable:
        raise TypeError("the array is read-only; pass a copy: x = x.copy()")
    return _operand(array)


def readable(x: Any) -> Operand:
    """See `x` as an operand that an operation only reads; numbers and lists are taken as arrays too."""
    if isinstance(x, Operand):
        return x
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


class _TensorMemory:
    """A tensor's memory as numpy takes it. `Tensor.numpy()` would forbid torch to resize the storage ever after."""

    __slots__ = ("__array_interface__", "owner")
    __array_interface__: dict[str, Any]
    owner: Any


_formats: dict[Any, tuple[np.dtype[Any], str]] = {}
"""By torch's dtypes, as they are met: numpy's, and how it is written in an array interface."""


def _tensor_memory(tensor: Any) -> Array:
    """Return an array over a CPU tensor's memory, which it keeps alive; bfloat16 and requires_grad work too."""
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
