"""The output of several ranks in one stream: every line gets a prefix with its rank, or is a line of JSON.

Invariant: the lines of each rank and stream stay whole and in order. An unfinished line is shown after a pause, and
continued in place if no other rank has written meanwhile; otherwise in another line, if there is more of it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import textwrap
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_SECONDS: Final = 0.2
"""Seconds without output after which an unfinished line is shown: it may be a prompt or a progress bar."""
LINE_LIMIT_BYTES: Final = 64 * 1024
"""The most of an unfinished line that is held back."""

PREFIX_COLOURS: Final = (36, 33, 32, 35, 34, 31)
REDRAWS: Final = re.compile(rb"\r(?!\n|\Z)")


class Cursor:
    """The position of an output: at the start of a line, or in an unfinished line of one stream."""

    def __init__(self) -> None:
        self.writer: object = None
        """What stands for the stream whose line is unfinished."""
        self.returned = False
        """Whether the unfinished line ended with a carriage return: what follows overwrites it."""

    def make_room(self, writer: object = None) -> bytes:
        """Return what must be written before `writer` may write: the end of another stream's line."""
        if self.writer in (None, writer):
            return b""
        self.writer, self.returned = None, False
        return b"\n"


class HeldLine:
    """Output that is passed on in whole lines. A line without an end is held back, up to LINE_LIMIT_BYTES of it."""

    def __init__(self) -> None:
        self._held = bytearray()

    def __bool__(self) -> bool:
        return bool(self._held)

    def take(self, data: bytes) -> bytes:
        """Take more output; return the lines that are whole now."""
        self._held += data
        cut = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
        return self._cut(len(self._held) if len(self._held) - cut > LINE_LIMIT_BYTES else cut)

    def rest(self) -> bytes:
        """Return what is held back, which is not held any more."""
        return self._cut(len(self._held))

    def _cut(self, size: int) -> bytes:
        text = bytes(self._held[:size])
        del self._held[:size]
        return text


class OutputStream:
    """One output stream of one rank, which shares an output with others."""

    def __init__(self, number: int, cursor: Cursor, *, coloured: bool, label: Callable[[], str] | None = None) -> None:
        """Choose the colour by `number`, which is also the prefix, unless `label` returns another one."""
        self.show_at: float | None = None
        """When to show an unfinished line with `flush`, unless more output comes first."""
        self._cursor = cursor
        self._held = HeldLine()
        self._is_unfinished = False
        """Whether the last line that was shown had no end."""
        self._label = label or functools.partial(str, number)
        self._form = f"\x1b[{PREFIX_COLOURS[number % len(PREFIX_COLOURS)]}m[%s]\x1b[0m " if coloured else "[%s] "

    def feed(self, data: bytes, *, now: float) -> bytes:
        """Take output of the rank, and return what to write now."""
        text = self._held.take(data)
        self.show_at = now + PROMPT_SECONDS if self._held else None
        return self._compose(text)

    def flush(self) -> bytes:
        """Return the unfinished line, to be shown now."""
        self.show_at = None
        return self._compose(self._held.rest())

    def end(self) -> bytes:
        """Return the rest as a finished line."""
        rest = self.flush()
        return rest + (self._cursor.make_room() if self._cursor.writer is self else b"")

    def _compose(self, text: bytes) -> bytes:
        cursor = self._cursor
        if self._is_unfinished and cursor.writer is not self and text:
            text = text.removeprefix(b"\n")  # another stream has ended the line
            self._is_unfinished = False
        if not text:
            return b""
        self._is_unfinished = not text.endswith(b"\n")
        room = cursor.make_room(self)
        at_start = cursor.writer is None or (cursor.returned and not text.startswith(b"\n"))
        cursor.writer = None if text.endswith(b"\n") else self
        cursor.returned = text.endswith(b"\r")
        prefix = (self._form % self._label()).encode()
        shown = text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
        if b"\r" in shown:
            shown = REDRAWS.sub(b"\r" + prefix, shown)
        return room + (prefix if at_start else b"") + shown


def note_line(text: str, descriptor: int) -> bytes:
    """Return a line about a run, with a newline; on a terminal, wrapped at words to its width."""
    lines = [f"covey: {text}"]
    with contextlib.suppress(OSError):  # no terminal
        width = os.get_terminal_size(descriptor).columns
        lines = textwrap.wrap(lines[0], width, break_long_words=False, break_on_hyphens=False) if width else lines
    return "\n".join(lines).encode() + b"\n"


def event_line(event: str, **about: object) -> bytes:
    """Return an event as a line of JSON, for programs that read what `covey run --json` prints."""
    return json.dumps({"event": event, "at": round(time.time(), 3), **about}).encode() + b"\n"


class JsonStream:
    """One output stream of one rank as lines of JSON: one for each of its lines, as `covey logs --json` has them."""

    show_at: float | None = None
    """Never: a part of a line is no event."""

    def __init__(self, stream: int, machine: str, rank: Callable[[], int | None]) -> None:
        self._stream, self._machine, self._rank = "stderr" if stream == 2 else "stdout", machine, rank
        self._held = HeldLine()

    def feed(self, data: bytes, *, now: float) -> bytes:
        """Take output of the rank, and return what to write now."""
        return self._events(self._held.take(data))

    def flush(self) -> bytes:
        """Return nothing: a part of a line is no event."""
        return b""

    def end(self) -> bytes:
        """Return the rest as a finished line."""
        return self._events(self._held.rest())

    def _events(self, text: bytes) -> bytes:
        about = {"machine": self._machine, "rank": self._rank(), "stream": self._stream}
        lines = text.decode(errors="replace").splitlines()
        return b"".join(event_line("output", **about, text=line) for line in lines)
