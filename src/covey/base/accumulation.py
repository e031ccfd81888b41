"""Gradients of numpy programs before the optimizer uses them: adding up those of parts, and clipping by the norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    Array = np.ndarray[Any, np.dtype[Any]]

NORM_EPSILON: Final = 1e-6
"""Added to the norm before the division, as torch does: gradients of zero stay zero."""


def accumulate(total: MutableMapping[str, Array], gradients: Mapping[str, Array], weight: float = 1.0) -> None:
    """Add gradients, times `weight`, to those in `total`, in place; names that are new there are copied.

    For batches that do not fit into memory at once: accumulate the gradients of the parts, each with the weight 1 /
    parts, then let the ranks combine `total`. With the weight 1, sums have the bits of torch's `tensor.grad`.

    Raises:
        ConfigError: an array has another shape or dtype than the one in `total`.
    """
    for name, gradient in gradients.items():
        known = total.get(name)
        if known is not None and (known.shape, known.dtype) != (gradient.shape, gradient.dtype):
            raise ConfigError(
                f"accumulate: {name!r} is {gradient.dtype}{list(gradient.shape)}, and was "
                f"{known.dtype}{list(known.shape)} before"
            )
    for name, gradient in gradients.items():
        part = gradient if weight == 1.0 else np.multiply(gradient, weight, dtype=gradient.dtype)
        if name in total:
            np.add(total[name], part, out=total[name])
        else:
            total[name] = part.copy() if part is gradient else part


def clip_norm(gradients: Mapping[str, Array], max_norm: float) -> float:
    """Scale gradients in place so that their norm, as that of one vector, is at most `max_norm`; return their norm.

    Clip after the ranks have combined the gradients: then the norm is that of the mean, and has the same bits on all
    ranks. Norms are added up in float64; the result is torch's `clip_grad_norm_` up to rounding. A norm that is not
    finite makes all gradients nan or zero, as it does there: compare what this returns.

    Raises:
        ConfigError: `max_norm` is not a number above 0.
    """
    if not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm!r} must be above 0")
    squares = (float(np.sum(np.square(gradients[name], dtype=np.float64))) for name in sorted(gradients))
    norm = math.sqrt(math.fsum(squares))
    scale = max_norm / (norm + NORM_EPSILON)
    if not scale >= 1.0:  # also nan
        for gradient in gradients.values():
            np.multiply(gradient, scale, out=gradient, dtype=gradient.dtype)
    return norm
