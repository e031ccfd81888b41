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
    return Native(_native)
