"""The element types that covey supports, with their codes on the wire, and the arithmetic of arrays.

A reduction says how two arrays are combined, and how the last two of a mean are. numpy programs add up the gradients of
parts of a batch with `accumulate`, and clip them by their norm with `clip_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import ml_dtypes
import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

DTYPES: Final[tuple[np.dtype[Any], ...]] = tuple(
    np.dtype(name)
    for name in (
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        ml_dtypes.bfloat16,
        "float32",
        "float64",
        "complex64",
        "complex128",
    )
)
"""Indexed by code. Codes are part of the wire format: only append."""
BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
BOOL_CODE: Final = _DTYPE_CODES[np.dtype(np.bool_)]
BYTE_CODE: Final = _DTYPE_CODES[np.dtype(np.uint8)]
"""The code of an array of bytes, which is how messages of bytes travel."""
Array = np.ndarray[Any, np.dtype[Any]]
Combine = Callable[..., Any]
Op: TypeAlias = Literal["sum", "mean", "min", "max", "prod", "and", "or", "xor"]
"""How arrays are combined: what `op=` of operations may be."""
OPS: Final[tuple[Op, ...]] = get_args(Op)
_UFUNCS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the wire code of `dtype`; raise TypeError if covey does not support it."""
    code = _DTYPE_CODES.get(dtype)
    if code is None:
        hint = "; convert it to the native byte order" if dtype.newbyteorder("=") in _DTYPE_CODES else ""
        raise TypeError(f"covey cannot move arrays of {dtype!r}{hint}. It moves {', '.join(d.name for d in DTYPES)}.")
    return code


class Reduction(NamedTuple):
    """How one operation works on one dtype."""

    op: str
    combine: Combine
    """`combine(left, right, out=...)`; `out` may be either operand."""
    divides: bool
    """True for a mean: the last combination is divided by the number of contributors."""

    def average(self, left: Array, right: Array, out: Array, contributors: int) -> None:
        """Combine the last two arrays of a mean, and divide; half precision is rounded once, after both."""
        if out.itemsize == 2:
            total = left.astype(np.float32)
            total += right.astype(np.float32)
            nans = np.isnan(total)
            # Which of two nans numpy keeps depends on the position when it adds float32, but not with half precision.
            kept = self.combine(left[nans], right[nans]) if nans.any() else None
            total /= np.float32(contributors)
            out[...] = total
            if kept is not None:
                out[nans] = kept
        elif out.size == 1:
            out[...] = self.combine(left, right) / contributors
        else:
            self.combine(left, right, out=out)
            np.divide(out, contributors, out=out)


@cache
def reduction(op: str, dtype: np.dtype[Any]) -> Reduction:
    """Return how `op` works on `dtype`.

    Raises:
        ConfigError: there is no such operation.
        TypeError: the operation does not support the dtype.
    """
    if op not in OPS:
        raise ConfigError(f"op={op!r} is unknown; use one of {', '.join(OPS)}")
    if op not in _allowed(dtype):
        extra = " (convert to float first)" if op == "mean" else ""
        raise TypeError(f"op={op!r} has no meaning for {dtype.name} arrays{extra}; {dtype.name} takes "
                        f"{', '.join(_allowed(dtype))}")  # fmt: skip
    return Reduction(op, _UFUNCS[op], op == "mean")


def _allowed(dtype: np.dtype[Any]) -> tuple[str, ...]:
    if dtype.kind == "b":
        return ("min", "max", "and", "or", "xor")
    if dtype.kind in "iu":
        return ("sum", "min", "max", "prod", "and", "or", "xor")
    if dtype.kind == "c":
        return ("sum", "mean", "prod")
    return ("sum", "mean", "min", "max", "prod")


def identity(op: str, dtype: np.dtype[Any]) -> Any:
    """Return the value that does not change any other under `op`."""
    if op in ("sum", "or", "xor"):
        return dtype.type(0)
    if op == "prod":
        return dtype.type(1)
    if op == "and":
        return dtype.type(True) if dtype.kind == "b" else np.invert(dtype.type(0))
    if dtype.kind == "b":
        return dtype.type(op == "min")
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return dtype.type(limits.max if op == "min" else limits.min)
    return dtype.type(np.inf if op == "min" else -np.inf)


assert all(_allowed(dtype) for dtype in DTYPES)


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
