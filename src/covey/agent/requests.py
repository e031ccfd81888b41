"""What a terminal and an agent send each other in calls: plain values, all of them bounded.

Every call and every item of a stream fits into one message (`CALL_BYTES`), so longer lists are sent page by page.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.wire.calls import INLINE_BYTES

CALL_BYTES: Final = INLINE_BYTES
"""The arguments or the result of one call."""
CHUNK_BYTES: Final = 32 << 10
"""Bytes of a file, or of output, in one call."""
PAGE_ENTRIES: Final = 256
"""Files in one page of a list."""
PATH_BYTES: Final = 1024
WORDS_LIMIT: Final = 1024
"""Arguments of a program."""
WORDS_BYTES: Final = 32 << 10
"""Characters of all of them."""
PROCESSES_LIMIT: Final = 1024
LEASE_LIMIT: Final = 3600.0

RunName = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Word = Annotated[str, msgspec.Meta(max_length=WORDS_BYTES)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=WORDS_LIMIT)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Chunk = Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)]


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """One file of a working folder."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_BYTES)]
    """Relative to the folder, with `/`."""
    size: Number
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """The SHA-256 of its content."""
    is_executable: bool = False


Page = Annotated[tuple[FileEntry, ...], msgspec.Meta(max_length=PAGE_ENTRIES)]


class Interpreter(msgspec.Struct, frozen=True, array_like=True):
    """Which Python runs the script; at most one of the two is given. Neither: that of the agent itself."""

    path: Annotated[str, msgspec.Meta(max_length=PATH_BYTES)] = ""
    requirements: Annotated[str, msgspec.Meta(max_length=CHUNK_BYTES)] = ""
    """The text of a requirements file: the agent has an environment for each."""


class StartRequest(msgspec.Struct, frozen=True, array_like=True):
    """A program to start on one machine, as its share of a run."""

    run: RunName
    processes: Annotated[int, msgspec.Meta(ge=1, le=PROCESSES_LIMIT)]
    """On this machine."""
    options: Words
    """Options of `covey run`, the same on all machines."""
    words: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=WORDS_LIMIT)]
    """The script and its arguments."""
    interpreter: Interpreter = Interpreter()
    lease: Annotated[float, msgspec.Meta(ge=0, le=LEASE_LIMIT)] = 0.0
    """Seconds for which the program goes on without its terminal; 0: it needs none."""

    def __post_init__(self) -> None:
        check_run_name(self.run)
        words = (*self.options, *self.words)
        if sum(map(len, words)) > WORDS_BYTES:
            raise ConfigError(f"the arguments have more than {WORDS_BYTES} characters; put them into a file")
        if any("\0" in word for word in words):
            raise ConfigError("an argument has a NUL character; leave it out")


class JobReport(msgspec.Struct, frozen=True, array_like=True):
    """A program that an agent has started."""

    number: Number
    """Counts the programs of this agent."""
    run: RunName
    words: Words
    """The beginning of its script and arguments."""
    processes: Number
    started_by: str
    """The name of the machine whose member started it."""
    seconds: float
    """Since it was started; once it has ended, how long it ran."""
    code: int | None = None
    """The exit code; None while it runs."""
    folder: str = ""


class OutputBatch(msgspec.Struct, frozen=True, array_like=True):
    """Output of a program, in order."""

    next: Number
    """Where the next batch begins."""
    missing: Number
    """Bytes before this batch that the agent no longer has."""
    records: tuple[tuple[int, bytes], ...]
    """1 (standard output) or 2 (standard error), and what was written."""
    code: int | None = None
    """The exit code, in the last batch."""
    times: tuple[float, ...] = ()
    """When each record was written, by the clock of its machine; agents of earlier releases do not tell."""


def check_run_name(run: str) -> str:
    """Return the name of a run; ConfigError if it cannot be one."""
    if not 0 < len(run) <= 100 or not run.isprintable():
        raise ConfigError(f"run={printable(run, 100)!r} must be a name of 1 to 100 printable characters")
    return run
