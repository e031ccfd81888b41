"""The output of ranks: in one stream, where each line has a prefix or is a line of JSON, and in a file for each rank.

Invariant of the stream: the lines of each rank and stream stay whole and in order. An unfinished line is shown after a
pause, and continued in place if no other rank has written meanwhile; otherwise in another line, if there is more of it.

Either may fail while the run continues: a full disk, a reader that has ended. Bytes that cannot be written are dropped
and counted, and a line says how many are missing once writing works again. A stream (`OutputDescriptor`) that failed on
a full disk is tried again every few seconds. If a log file (`RankLogs`, `covey run --log-dir`) cannot be written, a
line in the output says so at once, and the exit code of the run is not 0.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import select
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_SECONDS: Final = 0.2
"""Seconds without output after which an unfinished line is shown: it may be a prompt or a progress bar."""
LINE_LIMIT_BYTES: Final = 64 * 1024
"""The most of an unfinished line that is held back."""

PREFIX_COLOURS: Final = (36, 33, 32, 35, 34, 31)
REDRAWS: Final = re.compile(rb"\r(?!\n|\Z)")
RANK_LOGS_LIMIT: Final = 4096
"""Labels come from other machines; beyond this many, all others go into one file."""
_RANK: Final = re.compile(r"(?:(.+) )?(\d{1,6})")
RETRY_SECONDS: Final = 2.0
"""Pause between attempts to write to a failed stream."""
FOR_GOOD: Final = (errno.EPIPE, errno.EBADF)
"""Errors after which a stream never works again."""


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


class RankLogs:
    """Appends output to files in a folder, by the label before its lines."""

    def __init__(self, folder: str) -> None:
        """Make the folder; ConfigError if that is not possible."""
        self._folder = Path(folder)
        self._names: set[str] = set()
        self._missing: dict[str, tuple[int, str]] = {}
        """By file: how many bytes could not be written since the last that were, and why."""
        self._told = ""
        self.is_complete = True
        """Whether all output was written so far."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(b"x")
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror}; choose a folder that can be written") from error

    def write(self, label: str, data: bytes) -> str:
        """Append output of the process with this label, such as `3` or `north 3`; return what to tell the user.

        That is a sentence if the files cannot be written for a new reason, and else empty.
        """
        name = file_name(label)
        if name not in self._names and len(self._names) >= RANK_LOGS_LIMIT:
            name = "others.log"
        self._names.add(name)
        missing, why = self._missing.get(name, (0, ""))
        gap = (
            f"\ncovey: {missing} byte{'s' * (missing != 1)} could not be written here ({why})\n".encode()
            if missing
            else b""
        )
        try:
            with open(self._folder / name, "ab", buffering=0) as file:
                taken = file.write(gap + data)
        except OSError as error:  # the run goes on
            taken, why = 0, error.strerror or str(error)
        if taken >= len(gap):
            self._missing.pop(name, None)
            missing, taken = 0, taken - len(gap)
        else:
            taken = 0
        if taken == len(data):
            return ""
        why = why or os.strerror(errno.ENOSPC)  # what a write that is cut short means
        self._missing[name] = missing + len(data) - taken, why
        self.is_complete = False
        is_news, self._told = self._told != why, why
        return f"{self._folder / name} cannot be written ({why}); the run continues without its logs" if is_news else ""


def file_name(label: str) -> str:
    """Return the name of the log file for a label; two labels of a run have different names."""
    found = _RANK.fullmatch(label)
    words = [found[1] or "", f"rank-{found[2]}"] if found is not None else [label.replace("/", "-process-")]
    name = "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", word).lstrip(".")[:120] for word in words if word)
    return f"{name or 'unnamed'}.log"


class OutputDescriptor:
    """A descriptor to write to, and its failure, if any."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure = ""
        """Why nothing can be written now; "" while writing works."""
        self._dropped = 0
        self._retry_at = 0.0
        self._is_in_line = False
        """Whether the last byte that was written is in an unfinished line."""

    def is_open(self) -> bool:
        """Tell whether to try to write now."""
        return not self.failure or time.monotonic() >= self._retry_at

    def drop(self, data: bytes | memoryview) -> None:
        """Count bytes that are not written."""
        self._dropped += len(data)

    def write(self, data: bytes | memoryview) -> int:
        """Write up to PIPE_BUF bytes, which does not block after `select`; return how many were written.

        After a failure, a line about the missing bytes is written first. If nothing can be written, `failure` says
        why.
        """
        try:
            if self.failure:
                self._report_gap()
            taken = os.write(self.descriptor, data[: select.PIPE_BUF])
        except BlockingIOError:  # another process has made the descriptor non-blocking
            return 0
        except OSError as error:
            self.fail(error)
            return 0
        if taken:
            self._is_in_line = data[taken - 1 : taken] != b"\n"
        return taken

    def fail(self, error: OSError) -> None:
        """Note that nothing can be written for now, or ever again."""
        self.failure = error.strerror or str(error)
        self._retry_at = math.inf if error.errno in FOR_GOOD else time.monotonic() + RETRY_SECONDS

    def _report_gap(self) -> None:
        count = f"{self._dropped} byte{'s' if self._dropped != 1 else ''}"
        text = f"covey: output can be written again; {count} could not be ({self.failure})\n"
        line = ("\n" * self._is_in_line + text).encode()
        if (taken := os.write(self.descriptor, line)) < len(line):
            self._is_in_line = self._is_in_line or taken > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.failure, self._dropped, self._is_in_line = "", 0, False


def fill_standard_descriptors() -> None:
    """Open missing standard descriptors: else a socket could get such a number, and receive the output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def is_same_file(one: int, other: int) -> bool:
    """Tell whether two descriptors are of one file; False if one of them is closed."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False
