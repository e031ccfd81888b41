"""The compiled executor, `covey._native`: whether this process uses it, and why not.

It is an option: Python can do all that it does, with the same bytes on the wire and the same bits in the result.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple


class Native(NamedTuple):
    """The extension module, or the reason why Python does its work."""

    module: Any
    """None if it is not used."""
    why_not: str = ""


@cache
def native() -> Native:
    """Return the compiled executor of this process."""
    if os.environ.get("COVEY_NATIVE") == "0":
        return Native(None, "COVEY_NATIVE=0 is set")
    try:
        from covey import _native  # type: ignore[attr-defined,unused-ignore]
    except ImportError as error:
        return Native(None, f"covey._native was not built ({error})")
    return Native(_native)


@cache
def native_crypto() -> str:
    """Find libcrypto for sealed lanes, and return "", or return why they are sealed by Python."""
    module = native().module
    if module is None:
        return native().why_not
    try:
        import _ssl

        module.load_crypto(getattr(_ssl, "__file__", "") or "")
    except (ImportError, OSError) as error:
        return f"libcrypto was not found ({error})"
    return ""


def describe_executor() -> str:
    """Return which executor this process uses, as people read it."""
    why_not = native().why_not
    if why_not:
        return f"Python, because {why_not}"
    why_not = native_crypto()
    return "compiled" + (f"; Python between hosts, because {why_not}" if why_not else "")
