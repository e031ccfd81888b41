"""Make text from other nodes safe for errors, logs, tables and terminals. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEXT_LIMIT: Final = 1000
"""The default limit, in characters."""
CUT: Final = "..."
LISTED_ITEMS: Final = 16
"""As many items are named one by one; a text is to be read, and goes to every rank."""


def printable(text: str, most: int = TEXT_LIMIT) -> str:
    """Return `text` with at most `most` characters, in which characters that are not printable are escaped.

    The result is one line without control characters, terminal escapes or changes of the writing direction. Printable
    text of any alphabet does not change.
    """
    if len(text) <= most and text.isprintable():
        return text
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[: most + 1]
    )
    return escaped if len(escaped) <= most else escaped[: most - len(CUT)] + CUT


def spell_error(error: BaseException, most: int = TEXT_LIMIT) -> str:
    """Return the class and the text of an exception of the program, also if its text cannot be made."""
    try:
        text = str(error)
    except BaseException as failure:
        text = f"(its text cannot be made: {type(failure).__name__})"
    name = type(error).__name__
    return printable(f"{name}: {text}" if text else name, most)


def listed(items: Iterable[object]) -> str:
    """Return the items as an English list: "1", "1 and 2", "1, 2 and 3"."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def listed_briefly(items: Iterable[object]) -> str:
    """Return the items as an English list; of many only the first ones, and how many others there are."""
    words = [str(item) for item in items]
    return (
        listed(words)
        if len(words) <= LISTED_ITEMS
        else f"{', '.join(words[: LISTED_ITEMS - 1])} and {len(words) - LISTED_ITEMS + 1} others"
    )


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks, which ascend, as an English list: "0, 1 and 3"; of many the intervals: "0 to 4 and 6 to 127"."""
    if len(ranks) <= LISTED_ITEMS:
        return listed(ranks)
    first = [rank for rank, before in zip(ranks, (None, *ranks), strict=False) if before is None or rank != before + 1]
    last = [rank for rank, after in zip(ranks, (*ranks[1:], None), strict=True) if after is None or rank != after - 1]
    spans = zip(first, last, strict=True)
    return listed_briefly(str(one) if one == other else f"{one} to {other}" for one, other in spans)


def spell_rate(rate: float | None) -> str:
    """Return a speed in bytes per second as bits per second, as links are sold; "unknown" for one that is not known."""
    if rate is None or rate == float("inf"):
        return "unknown"
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def size_text(size: int) -> str:
    """Return a number of bytes, to read."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """Return a duration in words, such as `5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
