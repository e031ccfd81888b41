"""The element types that covey supports, and their codes on the wire."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np

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


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the wire code of `dtype`; raise TypeError if covey does not support it."""
    code = _CODES.get(dtype)
    if code is None:
        hint = "; convert it to the native byte order" if dtype.newbyteorder("=") in _CODES else ""
        raise TypeError(f"covey cannot move arrays of {dtype!r}{hint}. It moves {', '.join(d.name for d in DTYPES)}.")
    return code
