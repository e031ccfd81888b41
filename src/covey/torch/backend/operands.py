"""torch's tensors as operands: in place, staged in host memory, or cut into pieces that overlap copies and network.

And what is done with them: torch's reduction operators, as covey names them, and means of integers, which covey's
groups do not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from covey.arrays.torch_devices import TENSORS, device_adapter_of, tensor_memory, tensor_over, writing_to
from covey.base.arithmetic import dtype_code
from covey.base.errors import ConfigError
from covey.runtime.buffers import Operand, StagedOperand, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    Array = Any

DEVICE_PIECE_BYTES: Final = 8 << 20
"""Larger tensors are cut into pieces of this size: while one is on the network, the next is copied from the device and
the last one back to it."""


class _LastOperand(Operand):
    """The last piece of a tensor that is not contiguous: storing it stores the whole tensor."""

    _piece: Operand
    _after: Callable[[], None]

    @classmethod
    def of(cls, piece: Operand, after: Callable[[], None]) -> _LastOperand:
        made = cls(piece.flat, piece.shape, piece.code)
        made._piece, made._after = piece, after
        return made

    @property
    def is_own(self) -> bool:
        return self._piece.is_own

    def load(self) -> Array:
        return self._piece.load()

    def store(self) -> None:
        self._piece.store()
        self._after()


def operand_of(tensor: torch.Tensor | Operand, *, is_read: bool = True) -> Array | Operand:
    """Return the operand for `tensor`: its own memory if that can be used in place."""
    if isinstance(tensor, Operand):
        return tensor
    if tensor.dtype in EIGHT_BITS:
        tensor = tensor.view(torch.uint8)
    if device_adapter_of(tensor) is None:
        return tensor_memory(tensor)
    return StagedOperand.of(tensor, TENSORS, is_read=is_read, is_ordered=False)  # `TorchWork` orders what follows


EIGHT_BITS: Final = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
"""Dtypes that covey moves as bytes and cannot reduce."""


def blocks_of(whole: torch.Tensor, count: int) -> list[Operand]:
    """Return operands for equal shares of a contiguous tensor in host memory."""
    memory = writable(operand_of(whole))
    return [Operand(row, row.shape, memory.code) for row in memory.flat.reshape(count, memory.flat.size // count)]


def piece_length(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements in each piece of tensors of equal length; 0 if they are not cut.

    Ranks that call the same operation compute the same, whatever devices their tensors are on.
    """
    first = tensors[0]
    itemsize: int = first.element_size()
    if first.numel() * itemsize <= DEVICE_PIECE_BYTES or any(other.numel() != first.numel() for other in tensors):
        return 0
    return DEVICE_PIECE_BYTES // itemsize


def operands_of(
    tensor: torch.Tensor, length: int, *, is_read: bool = True, is_written: bool = True
) -> list[Array | Operand]:
    """Return the operands of the pieces of `length` elements that a tensor is cut into; 0 does not cut it."""
    if not length:
        return [operand_of(tensor, is_read=is_read)]
    whole = tensor.detach()
    if not tensor.is_contiguous():
        whole = whole.contiguous() if is_read else torch.empty_like(whole, memory_format=torch.contiguous_format)
    pieces = [operand_of(piece, is_read=is_read) for piece in whole.view(-1).split(length)]
    if is_written and not tensor.is_contiguous():
        last, target, writing = pieces[-1], tensor.detach(), writing_to(tensor)

        def deliver() -> None:
            with writing():
                target.copy_(whole)

        pieces[-1] = _LastOperand.of(last if isinstance(last, Operand) else writable(last), deliver)
    return pieces


_OPS: Final = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
    (dist.ReduceOp.BXOR, "xor"),
)
"""In the order of use: they are compared one by one, because torch's operators cannot be keys of a dict."""
RANKS_COUNTED_TOGETHER: Final = 64
"""Every so many ranks count themselves in one element, which an integer of 8 bits can hold."""
_OF_FLAGS: Final = {"sum": "or", "prod": "and"}
"""What reductions of bool are: as in torch, True + True is True."""


def reduction(op: Any, dtype: torch.dtype) -> tuple[str, Any]:
    """Return covey's name of torch's reduction, and the factor to multiply tensors with before it, or None.

    Raises:
        TypeError: tensors of this dtype cannot be reduced, or not with this operator.
        ConfigError: covey has no such reduction.
    """
    if dtype in EIGHT_BITS:
        raise TypeError(f"covey can move {dtype} but not reduce it; reduce in bfloat16 or float32")
    for known, name in _OPS:
        if op == known:
            return _OF_FLAGS.get(name, name) if dtype is torch.bool else name, None
    if op == dist.ReduceOp.PREMUL_SUM:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"PREMUL_SUM multiplies by a fraction, which {dtype} cannot hold; use float32")
        factor = op.__getstate__()[1]
        return "sum", factor
    raise ConfigError(f"covey has no reduction {op}; use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")


def averages_integers(op: Any, dtype: torch.dtype) -> bool:
    """Tell whether a reduction is the mean of integers: a sum of `WholeMean` operands."""
    return op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


class WholeMean(Operand):
    """A tensor of integers whose sum over ranks becomes their mean, rounded towards zero as NCCL rounds it.

    `flat` holds a copy of the elements, and behind them how many ranks contribute: with `on_loss="continue"` that is
    known only when the sum is.
    """

    _source: torch.Tensor
    _target: torch.Tensor
    _writing: Callable[[], AbstractContextManager[None]]
    _rank: int

    @classmethod
    def of(cls, tensor: torch.Tensor, rank: int, size: int) -> WholeMean:
        """Return the operand of this `rank`, of `size`; the mean is written to the tensor."""
        source = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        dtype = tensor_memory(source).dtype
        flat = np.zeros(source.numel() + 1 + (size - 1) // RANKS_COUNTED_TOGETHER, dtype)
        made = cls(flat, flat.shape, dtype_code(dtype))
        made._source, made._target, made._rank = source, tensor.detach(), rank
        made._writing = writing_to(tensor)
        return made

    @property
    def is_own(self) -> bool:
        return False

    def load(self) -> Any:
        """Return `flat` with the elements of the tensor and the count of this rank."""
        length = self._source.numel()
        self.flat[:length] = tensor_memory(self._source)
        self.flat[length:] = 0
        self.flat[length + self._rank // RANKS_COUNTED_TOGETHER] = 1
        return self.flat

    def store(self) -> None:
        """Divide the sum by the number of ranks, and write it to the tensor."""
        length = self._source.numel()
        count, sums = self.flat.dtype.type(self.flat[length:].sum(dtype=np.int64)), self.flat[:length]
        mean, rest = np.divmod(sums, count)
        mean += (sums < 0) & (rest != 0)  # numpy rounds down
        with self._writing():
            self._target.copy_(tensor_over(mean).view(self._target.shape))
