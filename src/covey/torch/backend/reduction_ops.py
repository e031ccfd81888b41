"""torch's reduction operators, as covey names them, and means of integers, which covey's groups do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from covey.arrays.torch_devices import tensor_memory, tensor_over, writing_to
from covey.base.arithmetic import dtype_code
from covey.base.errors import ConfigError
from covey.runtime.buffers import Operand
from covey.torch.backend.devices import EIGHT_BITS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

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
