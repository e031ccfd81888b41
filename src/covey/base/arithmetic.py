"""The element types that covey supports, with their codes on the wire, and what `op=` does with each of them.

A reduction says how two arrays are combined, and how the last two of a mean are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import ml_dtypes
import numpy as np

from covey.base.errors import ConfigError

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
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
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
    code = _CODES.get(dtype)
    if code is None:
        hint = "; convert it to the native byte order" if dtype.newbyteorder("=") in _CODES else ""
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
