"""The error that ends this process's program, as text for the other ranks, whose errors name it as the cause."""

from __future__ import annotations

import sys

from covey.base.numbers import REASON_LIMIT
from covey.base.text import printable


def ending_error() -> BaseException | None:
    """Return the uncaught exception that ends this program, if one does.

    The interpreter has set `sys.last_value` before it calls `atexit` handlers. At an interactive prompt such an error
    does not end the program.
    """
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) and not hasattr(sys, "ps1") else None


def is_failure(error: BaseException | None) -> bool:
    """Tell whether a program that ends with this exception has failed."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def describe(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, bounded and printable."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit code {error.code}"
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ of the program's own class
        lines = []
    name = type(error).__name__
    return printable(f"{name}: {lines[0]}" if lines else name, REASON_LIMIT)
