"""Reads the audit log of this machine: its entries, a check that none was changed, and new ones as they come."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.text import printable
from covey.net.audit.audit_log import (
    AUDIT_LINE_LIMIT,
    AUDIT_TEXT_LIMIT,
    OLD_FILES,
    START,
    AuditEntry,
    file_at,
    hash_of,
    log_folder,
    open_log,
    parse,
    read_head,
    read_log,
)
from covey.net.host.locks import only_one

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from covey.net.audit.audit_log import Head

AUDIT_PROBLEMS_LIMIT: Final = 20


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of `verify`."""

    count: int
    """The number of entries."""
    last: str
    """The hash of the last line: if a copy is kept elsewhere, a rewritten log is noticed."""
    problems: tuple[str, ...]
    """Lines that were changed, removed, moved or added; at most `AUDIT_PROBLEMS_LIMIT`."""
    remarks: tuple[str, ...]
    """Lines that were cut off when they were written."""


def entries() -> Iterator[AuditEntry]:
    """Yield the entries, oldest first, without lines that are no entries.

    Raises:
        ConfigError: other users can read a file, or it cannot be read.
    """
    for _, line in _lines(log_folder()):
        if (entry := parse(line)) is not None:
            yield entry


def verify() -> AuditVerdict:
    """Check that no line was changed, removed, moved or added since it was written.

    Raises:
        ConfigError: other users can read a file, or it cannot be read.
    """
    folder = log_folder()
    if not folder.exists():
        return AuditVerdict(0, "", (), ())
    with only_one(folder / ".lock"):
        return _verify(_lines(folder), read_head(folder))


def _verify(lines: Iterable[tuple[str, bytes]], head: Head | None) -> AuditVerdict:
    problems, remarks = list[str](), list[str]()
    count, first, number, previous, torn = 0, 0, 0, "", ""
    hash_at_head = ""
    for where, line in lines:
        entry, own = parse(line), hash_of(line)
        if torn and (entry is None or entry.event != "torn"):
            problems.append(f"{torn} is no entry")
        if entry is None:
            torn, previous = where, own
            continue
        if torn:
            remarks.append(f"{torn} was cut off when it was written")
        torn = ""
        count += 1
        if first == 0:
            first = entry.number
            expected = previous or (START if first == 1 else entry.previous)
            if entry.previous != expected:
                problems.append(f"{where}: what was before entry {first} is missing or was changed")
        elif entry.number != number + 1:
            problems.append(f"{where}: entry {entry.number} follows entry {number}")
        elif entry.previous != previous:
            problems.append(f"{where}: entry {number}, before entry {entry.number}, was changed")
        if entry.event == "gap":
            problems.append(f"{where}: {printable(entry.reason, AUDIT_TEXT_LIMIT)}")
        number, previous = entry.number, own
        if head is not None and number == head.number:
            hash_at_head = own
    if torn:
        remarks.append(f"{torn} was cut off when it was written")
    if head is None and count:
        problems.append("the file `head` is missing or damaged: the last entries may have been removed")
    elif head is not None and number < head.number:
        problems.append(f"the last entries are missing: {number + 1} to {head.number}")
    elif head is not None and hash_at_head != head.hash and head.number:
        problems.append(f"entry {head.number} was changed")
    if head is not None and first > head.first:
        problems.append(f"the oldest entries are missing: {head.first} to {first - 1}")
    more = len(problems) - AUDIT_PROBLEMS_LIMIT
    if more > 0:
        problems[AUDIT_PROBLEMS_LIMIT:] = [f"and {more} more"]
    return AuditVerdict(count, previous if count else "", tuple(problems), tuple(remarks))


class Follower:
    """Reads entries as they are appended."""

    def __init__(self) -> None:
        """Begin at the end of the log."""
        self._folder = log_folder()
        self._descriptor = -1
        self._rest = b""
        self._reopen()
        if self._descriptor >= 0:
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def read(self) -> list[AuditEntry]:
        """Return the new entries."""
        found = self._read_on()
        if self._was_turned_over():
            found += self._read_on()  # up to the end of the old file
            self._reopen()
            found += self._read_on()
        return found

    def _read_on(self) -> list[AuditEntry]:
        if self._descriptor < 0:
            return []
        data = self._rest
        while piece := os.read(self._descriptor, 1 << 20):
            data += piece
        *lines, rest = data.split(b"\n")
        self._rest = rest[-AUDIT_LINE_LIMIT:]
        return [entry for line in lines if (entry := parse(line)) is not None]

    def _was_turned_over(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(file_at(self._folder, 0))
            return self._descriptor < 0 or os.fstat(self._descriptor).st_ino != there.st_ino
        return False

    def _reopen(self) -> None:
        self.close()
        self._rest = b""
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = open_log(file_at(self._folder, 0), os.O_RDONLY)

    def close(self) -> None:
        """Stop reading. Closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _lines(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every line, oldest first, and where it is."""
    for age in range(OLD_FILES, -1, -1):
        path = file_at(folder, age)
        with contextlib.suppress(FileNotFoundError):
            lines = read_log(path).split(b"\n")
            for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
                yield f"{path.name}, line {number}", line
