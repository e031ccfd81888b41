"""The audit log of this machine: what its nodes and commands did, and which connections they refused.

One file for all processes of this user, `audit/log.jsonl` in covey's folder, with one JSON object a line. Lines are
only appended. Each line holds the SHA-256 of the line before it, and `audit/head` holds the number and the hash of the
last one, so `audit_reader.verify` finds lines that were changed, removed, moved or added. There is no key in this: a
process with the rights of this user can write the whole log anew.

A full file is renamed and a new one begun; the last `OLD_FILES` old ones stay, and the chain continues across them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.descriptors import explain
from covey.net.host.folders import check_private, existing, home, private_folder
from covey.net.host.locks import only_one

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger("covey")

AUDITED_EVENTS: Final = {
    "met": "a node of the cluster was met",
    "visited": "a node came that takes part in no run (`covey status`, `covey doctor`, a keeper)",
    "began": "a process of this machine is in the first generation of a run",
    "generation": "a process of this machine is in a later generation of a run",
    "joined": "a node is a member of the run from now on",
    "left": "a member left the run",
    "lost": "a member was lost",
    "ended": "a process of this machine left its run",
    "refused": "a connection or a node was refused here",
    "rejected": "another node refused a node of this machine",
    "denied": "a person denied a node on this machine",
    "allowed": "a person allowed a node again on this machine",
    "list-changed": "a person changed the list of machines that may be in a cluster, on this machine",
    "trusted": "a person let this machine send files and programs to a machine",
    "distrusted": "a person withdrew that",
    "charter": "a node of this machine obeys a new charter of the owner",
    "secret-created": "a cluster was made on this machine",
    "secret-enrolled": "this machine was put into a cluster",
    "machine-paired": "a machine got the secret of a cluster from this one, with a code of six digits",
    "secret-rotated": "a person gave a cluster a new secret on this machine",
    "secret-received": "a node of this machine was sent a new secret",
    "secret-removed": "a cluster was removed from this machine",
    "program-started": "a member started a program on this machine (`covey up`)",
    "program-signalled": "a member sent a signal to a program on this machine",
    "program-ended": "a program that a member had started here has ended",
    "data-began": "a member began to push a data set to this machine (`covey push`)",
    "data-received": "a data set was pushed to this machine whole",
    "data-removed": "a member removed a data set of this machine (`covey data --remove`)",
    "program-refused": "a member that may not start programs here tried to",
    "checkpoint-requested": "a person asked a run for a checkpoint, in a view of it on this machine",
    "run-stopped": "a person stopped a run, in a view of it on this machine",
    "code-shown": "a person had the join code of a cluster shown, in a view on this machine",
    "gap": "entries of this log were missing when the next one was written",
    "torn": "the line before was cut off: its writer was killed, or the disk was full",
    "dropped": "entries could not be written, and were too many to keep",
}
"""All events that entries can be about."""

LOG_FORMAT: Final = 1
"""The format of the log."""
AUDIT_FILE_BYTES: Final = 4 << 20
"""A file gets no larger than this."""
OLD_FILES: Final = 4
"""Old files that stay."""
AUDIT_TEXT_LIMIT: Final = 300
"""Characters of a name, an address or a reason."""
AUDIT_LINE_LIMIT: Final = 16 << 10
"""Bytes of a line, for readers: covey writes no longer ones."""
ONCE_BYTES: Final = 256 << 10
"""How much of the end of the log is searched for an entry that another process may have written already."""
START: Final = "0" * 64
_HEAD_BYTES: Final = 256


class AuditEntry(msgspec.Struct, frozen=True):
    """One line of the log. Texts are printable: control characters are written as escapes."""

    number: int
    """From 1, without gaps."""
    time: str
    """When it happened, in UTC."""
    cluster: str
    event: str
    run: str = ""
    generation: int = 0
    node: str = ""
    """The id of the node that it is about, in hexadecimal; empty if no key was proved."""
    life: str = ""
    """The life of that node, in hexadecimal."""
    name: str = ""
    address: str = ""
    """The address of the other end of the connection."""
    reason: str = ""
    count: int = 1
    """How many such events the entry stands for."""
    pid: int = 0
    """The process that wrote it."""
    previous: str = ""
    """The SHA-256 of the line before."""

    @property
    def at(self) -> datetime:
        """When it happened; ValueError if the text was tampered with."""
        return datetime.fromisoformat(self.time)


@dataclass(frozen=True, slots=True)
class Note:
    """An entry before it has its number and hash in the log."""

    cluster: str
    event: str
    run: str = ""
    generation: int = 0
    node: bytes = b""
    life: bytes = b""
    name: str = ""
    address: str = ""
    reason: str = ""
    count: int = 1
    once: bool = False
    """Whether several processes of this machine note it, and only the first one writes it."""
    time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        assert self.event in AUDITED_EVENTS, f"list the event {self.event!r} in EVENTS"

    def entry(self, number: int, previous: str) -> AuditEntry:
        """Return the entry with this number, after a line with that hash."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        texts = (self.cluster, self.run, self.name, self.address, self.reason)
        cluster, run, name, address, reason = (printable(text, AUDIT_TEXT_LIMIT) for text in texts)
        return AuditEntry(
            number, moment, cluster, self.event, run, self.generation, self.node.hex(), self.life.hex(), name,
            address, reason, self.count, os.getpid(), previous,
        )  # fmt: skip


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of the log, written after every appended line."""

    first: int
    """The number of the oldest entry that must exist."""
    number: int
    hash: str
    size: int
    """The size of the last file in bytes."""
    format: int = 1
    """The format of the whole log."""


class _HeadFormat(msgspec.Struct):
    """The one field of a head that every release reads first."""

    format: int = 1


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a file."""

    number: int
    """Number of the last entry."""
    entry_hash: str
    hash: str
    """Hash of the last line, which may be no entry."""
    is_torn: bool
    """Whether that line has no end."""


# Writing


def note(
    cluster: str,
    event: str,
    *,
    run: str = "",
    node: bytes = b"",
    name: str = "",
    address: str = "",
    reason: str = "",
) -> None:
    """Write one entry now, for commands; if that fails, print a warning. Blocks: not for the event loop."""
    try:
        append([Note(cluster, event, run=run, node=node, name=name, address=address, reason=reason)])
    except ConfigError as error:
        warn(error)


def warn(error: ConfigError) -> None:
    """Warn that the log cannot be written."""
    logger.warning("the audit log is not written: %s. Everything else continues", error)


def append(notes: Sequence[Note], folder: Path | None = None) -> None:
    """Append entries atomically. Blocks: not for the event loop.

    Raises:
        ConfigError: they cannot be written.
    """
    folder = made_folder() if folder is None else private_folder(folder)
    with only_one(folder / ".lock"):
        try:
            _append(folder, notes)
        except OSError as error:
            path = folder / "log.jsonl"
            raise ConfigError(
                f"cannot write {path}: {explain(error)}; make room, or set COVEY_HOME elsewhere"
            ) from error


def _append(folder: Path, notes: Sequence[Note]) -> None:
    path, head = file_at(folder, 0), read_head(folder)
    descriptor = open_log(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        is_known = head is not None and head.size == size > 0
        tail = (
            _Tail(head.number, head.hash, head.hash, False) if head and is_known else _tail_of(folder, descriptor, size)
        )
        news = [*_amends(notes, tail, head), *_not_yet_noted(descriptor, size, notes)]
        if not news:
            return
        number = max(tail.number, head.number if head else 0)
        lines, number, last = _chain(news, number, tail.hash)
        data = b"\n" * tail.is_torn + lines
        first = head.first if head else 1
        if size and size + len(data) > AUDIT_FILE_BYTES:
            first = _turn_over(folder, Head(first, tail.number, tail.hash, 0))
            os.close(descriptor)
            descriptor = open_log(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            size = 0
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write_head(folder, Head(first, number, last, size + len(data)))
    finally:
        os.close(descriptor)


def _chain(notes: Iterable[Note], number: int, previous: str) -> tuple[bytes, int, str]:
    """Return lines for `notes` after the line of that number and hash, and the number and hash of the last line."""
    lines = b""
    for each in notes:
        number += 1
        line = msgspec.json.encode(each.entry(number, previous))
        previous = hashlib.sha256(line).hexdigest()
        lines += line + b"\n"
    return lines, number, previous


def _amends(notes: Sequence[Note], tail: _Tail, head: Head | None) -> Iterator[Note]:
    """Yield notes about damage at the end of the log, which come before new entries."""
    cluster = notes[0].cluster if notes else ""
    if tail.is_torn:
        yield Note(cluster, "torn", reason=AUDITED_EVENTS["torn"])
    if head is None and tail.number:
        yield Note(cluster, "gap", reason="the file `head` was missing or damaged; entries may have been removed")
    elif head is not None and head.number > tail.number:
        yield Note(cluster, "gap", reason=f"entries {tail.number + 1} to {head.number} were removed, or never reached "
                   "the disk (a power cut)")  # fmt: skip
    elif head is not None and head.number == tail.number and head.hash != tail.entry_hash:
        yield Note(cluster, "gap", reason=f"entry {tail.number} was changed")


def _not_yet_noted(descriptor: int, size: int, notes: Sequence[Note]) -> Iterator[Note]:
    """Yield the notes that no other process has written yet."""
    start = max(0, size - ONCE_BYTES)
    end = os.pread(descriptor, size - start, start) if any(each.once for each in notes) else b""
    for each in notes:
        # The fields from cluster to life are next to each other in every line.
        line = msgspec.json.encode(each.entry(0, ""))
        key = line[line.index(b'"cluster":') : line.index(b'"name":')]
        if not (each.once and key in end):
            yield each


def _tail_of(folder: Path, descriptor: int, size: int) -> _Tail:
    """Return the end of the log: of its last file, or of the one before if that is empty."""
    if size:
        start = max(0, size - 2 * AUDIT_LINE_LIMIT)
        return _tail(os.pread(descriptor, size - start, start), is_whole=start == 0)
    with contextlib.suppress(FileNotFoundError):
        return _tail(read_log(file_at(folder, 1))[-2 * AUDIT_LINE_LIMIT :], is_whole=False)
    return _Tail(0, START, START, False)


def _tail(data: bytes, *, is_whole: bool) -> _Tail:
    """Return the end of these bytes; unless they are a whole file (`is_whole`), their first line may be cut off."""
    lines = data.split(b"\n")
    is_torn = lines[-1] != b""
    lines = lines[0 if is_whole else 1 :] if is_torn else lines[0 if is_whole else 1 : -1]
    entries = ((entry.number, hash_of(line)) for line in reversed(lines) if (entry := parse(line)) is not None)
    number, entry_hash = next(entries, (0, START))
    return _Tail(number, entry_hash, hash_of(lines[-1]) if lines else START, is_torn)


def _turn_over(folder: Path, head: Head) -> int:
    """Rename the files to make room for a new one; return the number of the oldest entry that stays.

    The head is updated before the oldest file is removed, so that all entries that it promises exist at any moment.
    """
    oldest = [_first_number(file_at(folder, age)) for age in range(OLD_FILES - 1, -1, -1)]
    first = next((number for number in oldest if number), head.first)
    _write_head(folder, msgspec.structs.replace(head, first=first))
    for age in range(OLD_FILES - 1, -1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(file_at(folder, age), file_at(folder, age + 1))
    return first


def _first_number(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        descriptor = open_log(path, os.O_RDONLY)
        try:
            start = os.pread(descriptor, AUDIT_LINE_LIMIT, 0)
        finally:
            os.close(descriptor)
        entry = parse(start.partition(b"\n")[0])
        return entry.number if entry is not None else 0
    return 0


def _write_head(folder: Path, head: Head) -> None:
    descriptor = open_log(folder / "head", os.O_RDWR | os.O_CREAT)
    try:
        os.pwrite(descriptor, msgspec.json.encode(head).ljust(_HEAD_BYTES - 1) + b"\n", 0)
    finally:
        os.close(descriptor)


def read_head(folder: Path) -> Head | None:
    """Return the end that the log should have; None if that is unknown; ConfigError for a log of a later release."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        data = read_log(folder / "head")
        try:
            check_format(msgspec.json.decode(data, type=_HeadFormat).format, LOG_FORMAT)
        except NewerFormatError as error:
            raise newer_file(file_at(folder, 0), error) from None
        return msgspec.json.decode(data, type=Head)
    return None


def parse(line: bytes) -> AuditEntry | None:
    """Return the entry in a line; None if there is none."""
    with contextlib.suppress(msgspec.DecodeError, ValueError):
        return msgspec.json.decode(line, type=AuditEntry)
    return None


def hash_of(line: bytes) -> str:
    """Return the hash of a line, which the next line holds."""
    return hashlib.sha256(line).hexdigest()


# Files


def log_folder() -> Path:
    """Return the folder of the log, which may not exist; ConfigError if other users may enter it."""
    return existing("audit")


def made_folder() -> Path:
    """Return the folder of the log, made if missing; ConfigError if other users may enter it, or it cannot be made."""
    return private_folder(home() / "audit")


def file_at(folder: Path, age: int) -> Path:
    """Return the file that entries are appended to, or an older one: `OLD_FILES` is the oldest."""
    return folder / (f"log.{age}.jsonl" if age else "log.jsonl")


def open_log(path: Path, flags: int) -> int:
    """Open a private file; FileNotFoundError if there is none, ConfigError if other users can read it."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a symbolic link; move it away") from error
    try:
        check_private(path, os.fstat(descriptor), most=4 * AUDIT_FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_log(path: Path) -> bytes:
    """Return the contents of a private file; FileNotFoundError if there is none, ConfigError if it cannot be read."""
    try:
        descriptor = open_log(path, os.O_RDONLY)
        with open(descriptor, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {explain(error)}") from error
