"""Overviews, histories and lines of output as JSON for the page.

JSON has no NaN and no infinity, and a loss that becomes one is what people look for: the page gets the words `nan`,
`inf` and `-inf` in their place. A figure that is not known is null.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.watch.output import OutputPage
    from covey.watch.overview import Moment, Overview


def overview_line(overview: Overview) -> bytes:
    """Return an overview as one line of JSON."""
    return msgspec.json.encode(_with_words(msgspec.to_builtins(overview))) + b"\n"


def history_json(moments: Iterable[Moment]) -> bytes:
    """Return the moments of a run as JSON."""
    return msgspec.json.encode(_with_words(msgspec.to_builtins(list(moments))))


def output_json(page: OutputPage) -> bytes:
    """Return lines of output as JSON."""
    return msgspec.json.encode(page)


def _with_words(value: Any) -> Any:
    """Return a value of builtins with words in place of floats that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _with_words(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(each) for each in value]
    return value
