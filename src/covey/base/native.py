"""The extension `covey._native`: whether this process uses it, and why not.

It is an option: Python can do all that it does, with the same bytes on the wire and the same bits in the result.
This is the one module of a pure layer that reads the environment: every layer must see the same answer.
"""

from __future__ import annotations

from functools import cache
from os import environ
from typing import Any, NamedTuple


class Native(NamedTuple):
    """The extension module, or the reason why Python does its work."""

    module: Any
    """None if it is not used."""
    why_not: str = ""


@cache
def native() -> Native:
    """Return the extension as this process uses it."""
    if environ.get("COVEY_NATIVE") == "0":
        return Native(None, "COVEY_NATIVE=0 is set")
    try:
        from covey import _native  # type: ignore[attr-defined,unused-ignore]
    except ImportError as error:
        return Native(None, f"covey._native was not built ({error})")
    trouble = ufunc_trouble(_native)
    return Native(None, trouble) if trouble else Native(_native)


def ufunc_trouble(module: Any, ufuncs: tuple[Any, ...] = ()) -> str:
    """Return why the extension must not read numpy's ufuncs, or "".

    It takes numpy's inner loops out of the memory of ufuncs, whose layout a later numpy may change. So some with
    different numbers of operands, results and loops are looked at, and a few sums are compared with numpy's own.
    """
    import numpy as np

    refusal = f"numpy {np.__version__} keeps the loops of its ufuncs elsewhere than the extension expects"
    for ufunc in ufuncs or (np.add, np.divide, np.maximum, np.logical_or, np.negative, np.divmod):
        types = bytes(np.dtype(letter).num for types in ufunc.types for letter in types.replace("->", ""))
        if not module.is_ufunc_as_expected(ufunc, ufunc.nin, ufunc.nout, ufunc.__name__, types):
            return f"{refusal}: {ufunc.__name__}"
    for dtype in (np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.complex128)):
        left, right, out = np.arange(5).astype(dtype), np.arange(3, 8).astype(dtype), np.zeros(5, dtype)
        rule = module.Reduction(dtype.itemsize, dtype.num, np.add, None, bytes(dtype.itemsize))
        rule.combine(*(array.view(np.uint8) for array in (left, right, out)), False, 1)
        if not np.array_equal(out, np.add(left, right)):
            return f"{refusal}: a sum of {dtype} is wrong"
    return ""
