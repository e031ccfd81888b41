"""What a terminal and an agent send each other in calls: plain values, all of them bounded, and paths that are safe.

A path has one spelling and stays inside the working folder: two paths of a list never mean one file, on any file
system, whatever it does about case or about letters that can be written in two ways.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.wire.calls import CALL_INLINE_BYTES

AGENT_CALL_BYTES: Final = CALL_INLINE_BYTES
"""The arguments or the result of one call."""
OUTPUT_CHUNK_BYTES: Final = 32 << 10
"""Bytes of a file, or of output, in one call."""
PAGE_ENTRIES: Final = 256
"""Files in one page of a list."""
PATH_BYTES: Final = 1024
ARGUMENTS_LIMIT: Final = 1024
"""Arguments of a program."""
WORDS_BYTES: Final = 32 << 10
"""Characters of all of them."""
JOB_PROCESSES_LIMIT: Final = 1024
LEASE_LIMIT: Final = 3600.0
WHEEL_RUN: Final = "the covey of a terminal"
"""The folder to which the wheel of another release of covey is sent."""
RunName = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Word = Annotated[str, msgspec.Meta(max_length=WORDS_BYTES)]
Words = Annotated[tuple[Word, ...], msgspec.Meta(max_length=ARGUMENTS_LIMIT)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Chunk = Annotated[bytes, msgspec.Meta(max_length=OUTPUT_CHUNK_BYTES)]
PATH_PART_BYTES: Final = 255
"""Longest part of a path: file systems take no more."""
FOLDERS_DEEP: Final = 32


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
    requirements: Annotated[str, msgspec.Meta(max_length=OUTPUT_CHUNK_BYTES)] = ""
    """The text of a requirements file: the agent has an environment for each."""
    release: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """With requirements: the SHA-256 of the wheel of covey that was sent for it; empty: the agent's own covey."""


class StartRequest(msgspec.Struct, frozen=True, array_like=True):
    """A program to start on one machine, as its share of a run."""

    run: RunName
    processes: Annotated[int, msgspec.Meta(ge=1, le=JOB_PROCESSES_LIMIT)]
    """On this machine."""
    options: Words
    """Options of `covey run`, the same on all machines."""
    words: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1, max_length=ARGUMENTS_LIMIT)]
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
    tail: Number = 0
    """Where the last part of its output begins, for those that do not want all of it."""


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


class FileChunk(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes of a file that a program has written, in order."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_PART_BYTES)]
    size: Number
    """Bytes of the whole file."""
    data: Chunk


def check_run_name(run: str) -> str:
    """Return the name of a run; ConfigError if it cannot be one."""
    if not 0 < len(run) <= 100 or not run.isprintable():
        raise ConfigError(f"run={printable(run, 100)!r} must be a name of 1 to 100 printable characters")
    return run


def check_path(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path; ConfigError if it is not the plain path of a file below a folder."""
    parts = tuple(path.split("/"))
    problem = _problem(path, parts)
    if problem:
        raise ConfigError(f"the path {printable(path, 200)!r} cannot be sent: {problem}")
    return parts


def _problem(path: str, parts: tuple[str, ...]) -> str:
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "it is no UTF-8"
    if sum(sizes) + len(sizes) - 1 > PATH_BYTES or max(sizes) > PATH_PART_BYTES or len(parts) > FOLDERS_DEEP:
        return (
            f"it is longer than {PATH_BYTES} bytes, {PATH_PART_BYTES} for a name, or deeper than {FOLDERS_DEEP} folders"
        )
    if path.startswith("/"):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "it has a part that is empty, `.` or `..`"
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for letter in path):
        return "it has letters that cannot be seen"
    if "\\" in path or (len(parts[0]) > 1 and parts[0][1] == ":"):
        return "it could mean another folder on another system"
    if unicodedata.normalize("NFC", path) != path:
        return "it has letters that can be written in two ways; rename it to the composed form (NFC)"
    return ""


class PathSet:
    """The paths of one list: each is checked, and none of them means the same file or a folder of another one."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        """By the form that ignores case: the first spelling."""

    def add(self, path: str) -> tuple[str, ...]:
        """Return the parts of a path; ConfigError if it cannot be used, or collides with another one."""
        parts = check_path(path)
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            other = self._files.get(_folded(folder)) or self._folders.setdefault(_folded(folder), folder)
            if other != folder or _folded(folder) in self._files:
                raise _collision(other, folder)
        key = _folded(path)
        if (found := self._files.get(key) or self._folders.get(key)) is not None:
            raise _collision(found, path)
        self._files[key] = path
        return parts


def _collision(one: str, other: str) -> ConfigError:
    return ConfigError(f"the paths {printable(one, 200)!r} and {printable(other, 200)!r} mean one file on some systems")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", path).casefold())
