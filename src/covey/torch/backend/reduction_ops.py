"""torch's reduction operators, as covey names them."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.torch.backend.devices import EIGHT_BITS

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
