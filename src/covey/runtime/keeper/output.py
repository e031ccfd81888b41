"""What the ranks of a run say, joined into the keeper's own output: every line with the name of its rank in front.

Text only: bytes as they were read go in, bytes to write come out. Lines keep their order for each rank and stream, and
stay whole. One that takes long to finish is shown as far as it goes, and continued in place if nobody spoke meanwhile.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

SILENCE: Final = 0.2
"""Seconds without output after which an unfinished line is shown, so that prompts and progress bars can be seen."""
LINE_LIMIT_BYTES: Final = 64 * 1024
"""Most of an unfinished line that is held back."""

COLOURS: Final = (36, 33, 32, 35, 34, 31)
REDRAWS: Final = re.compile(rb"\r(?!\n|\Z)")


class Cursor:
    """Where an output stands: at the start of a line, or in one that a voice has not finished."""

    def __init__(self) -> None:
        self.speaker: OutputStream | None = None
        self.returned = False
        """The unfinished line ended in a carriage return: what follows overwrites it."""

    def make_room(self, speaker: OutputStream | None = None) -> bytes:
        """Return what must be written before `speaker` may write."""
        if self.speaker in (None, speaker):
            return b""
        self.speaker, self.returned = None, False
        return b"\n"


class OutputStream:
    """One output stream of one rank, on its way to an output that it shares with others."""

    def __init__(self, number: int, cursor: Cursor, *, coloured: bool, label: Callable[[], str] | None = None) -> None:
        """`number` decides the colour; it stands in front of every line, unless there is a `label` that may change."""
        self.show_at: float | None = None
        """When an unfinished line is shown with `hush`, unless more is heard first."""
        self._cursor = cursor
        self._held = bytearray()
        self._label = label or functools.partial(str, number)
        self._form = f"\x1b[{COLOURS[number % len(COLOURS)]}m[%s]\x1b[0m " if coloured else "[%s] "

    def hear(self, data: bytes, *, now: float) -> bytes:
        """Take what the rank wrote and return what may be shown of it now."""
        self._held += data
        cut = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
        if len(self._held) - cut > LINE_LIMIT_BYTES:
            cut = len(self._held)
        text = bytes(self._held[:cut])
        del self._held[:cut]
        self.show_at = now + SILENCE if self._held else None
        return self._compose(text)

    def hush(self) -> bytes:
        """Return the unfinished line as far as it goes."""
        text = bytes(self._held)
        self._held.clear()
        self.show_at = None
        return self._compose(text)

    def end(self) -> bytes:
        """Return what is left, as a finished line."""
        rest = self.hush()
        return rest + (self._cursor.make_room() if self._cursor.speaker is self else b"")

    def _compose(self, text: bytes) -> bytes:
        if not text:
            return b""
        cursor = self._cursor
        room = cursor.make_room(self)
        at_start = cursor.speaker is None or (cursor.returned and not text.startswith(b"\n"))
        cursor.speaker = None if text.endswith(b"\n") else self
        cursor.returned = text.endswith(b"\r")
        prefix = (self._form % self._label()).encode()
        shown = text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
        if b"\r" in shown:
            shown = REDRAWS.sub(b"\r" + prefix, shown)
        return room + (prefix if at_start else b"") + shown
