"""Text that somebody else wrote, made fit for errors, logs, tables and terminals. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

TEXT_LIMIT: Final = 1000
"""Characters of one text, unless its reader says otherwise."""
_CUT: Final = "..."


def printable(text: str, most: int = TEXT_LIMIT) -> str:
    """Return `text` with at most `most` characters, and each that is not printable written as an escape.

    What is left is one line: no control character, line end, terminal escape or change of writing direction gets
    through. Printable text of any alphabet stays as it is.
    """
    if len(text) <= most and text.isprintable():
        return text
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[: most + 1]
    )
    return escaped if len(escaped) <= most else escaped[: most - len(_CUT)] + _CUT


def listed(items: Iterable[object]) -> str:
    """Return the items as people list them: "1", "1 and 2", "1, 2 and 3"."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
