"""Output on disk: the latest part of it, in order, for readers in any process.

A record is what was written at one moment: stream, rank, time, and how many lines there were before it. Records are
numbered by the bytes before them, and stay valid while older files are removed. Appending never waits for a reader: one
that falls behind by more than the log holds misses the oldest records, and is told how many bytes. What cannot be
written, because the disk is full for instance, is counted; a line in the log says so as soon as it can be written.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.numbers import NO_RANK

if TYPE_CHECKING:
    from pathlib import Path

SEGMENTS: Final = 4
"""Files of a log; then the oldest is removed."""
RECORD_BYTES: Final = 16 << 10
"""The most of one record, so that a batch is never empty because the next record is too long."""
KEEPER_FOLDER: Final = "keeper"
"""The folder with what `covey run` itself said; those of its processes are called by their numbers."""
_HEADER: Final = struct.Struct(">BidIQ")
LOG_HEADER_BYTES: Final = _HEADER.size
_LOG_PREFIX: Final = "output-"
_OPEN_TRIES: Final = 4
"""How often a reader looks again, if the file that it wants to read has just been removed."""


class OutputRecord(NamedTuple):
    """What was written at one moment."""

    stream: int
    """1: standard output, 2: standard error."""
    rank: int
    """NO_RANK if it is not known."""
    at: float
    """The time of this machine, in seconds since 1970."""
    lines_before: int
    """Lines that were written to this log before, also those that it no longer has."""
    data: bytes


class RecordBatch(NamedTuple):
    """Records in order."""

    next: int
    """Where the next batch begins."""
    missing: int
    """Bytes before these records that the log no longer has."""
    records: tuple[OutputRecord, ...]


class SavedOutput:
    """Writes a log. One thread at a time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Write at most `limit_bytes` into `folder`, which has no log yet; oldest first out."""
        self._folder = folder
        self._segment_bytes = limit_bytes // SEGMENTS
        self._starts = [0]
        """Where each file begins, the oldest first."""
        self.end = 0
        """Where the next record begins."""
        self._lines = 0
        self._lost, self._why = 0, ""
        """Bytes that could not be written since the last that were, and why."""

    def append(self, stream: int, data: bytes, rank: int = NO_RANK, at: float | None = None) -> str:
        """Add output; return why some of it could not be written, else an empty text."""
        now = time.time() if at is None else at
        for start in range(0, len(data), RECORD_BYTES):
            piece = data[start : start + RECORD_BYTES]
            if self._lost:
                gap = f"\ncovey: {self._lost} bytes of output could not be kept here ({self._why})\n".encode()
                if self._write(2, NO_RANK, now, gap):
                    self._lost, self._why = 0, ""
            if self._lost or not self._write(stream, rank, now, piece):
                self._lost += len(piece)
        return self._why

    def remove(self) -> None:
        """Remove the files; the log is of no use afterwards."""
        remove_log(self._folder)

    def _write(self, stream: int, rank: int, at: float, piece: bytes) -> bool:
        record = _HEADER.pack(stream, rank, at, len(piece), self._lines) + piece
        if self.end > self._starts[-1] and self.end - self._starts[-1] + len(record) > self._segment_bytes:
            self._starts.append(self.end)
            while len(self._starts) > SEGMENTS:
                with contextlib.suppress(OSError):
                    self._path(self._starts.pop(0)).unlink(missing_ok=True)
        try:
            self._append(self._path(self._starts[-1]), record, self.end - self._starts[-1])
        except OSError as error:
            self._why = error.strerror or str(error)
            return False
        self.end += len(record)
        self._lines += piece.count(b"\n")
        return True

    def _append(self, path: Path, record: bytes, position: int) -> None:
        """Write a record at the end of a file, or nothing of it; OSError if that is not possible."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(record)
            while rest:
                written = os.pwrite(descriptor, rest, position + len(record) - len(rest))
                rest = rest[written:]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, position)  # a reader must not take half a record for the beginning of one
            raise
        finally:
            os.close(descriptor)

    def _path(self, start: int) -> Path:
        return self._folder / f"{_LOG_PREFIX}{start}"


def remove_log(folder: Path) -> None:
    """Remove the files of a log."""
    for start in _starts_in(folder):
        with contextlib.suppress(OSError):
            (folder / f"{_LOG_PREFIX}{start}").unlink(missing_ok=True)


def log_bytes(folder: Path) -> int:
    """Return how many bytes a log takes on disk."""
    total = 0
    for start in _starts_in(folder):
        with contextlib.suppress(OSError):
            total += os.lstat(folder / f"{_LOG_PREFIX}{start}").st_size
    return total


def logs_in(folder: Path) -> list[tuple[str, Path]]:
    """Return the logs of a run's processes in its folder, by number, and last that of `covey run` itself."""
    try:
        names = [name for name in os.listdir(folder) if name.isdecimal() or name == KEEPER_FOLDER]
    except OSError:
        return []
    names.sort(key=lambda name: (name == KEEPER_FOLDER, int(name) if name.isdecimal() else 0))
    return [(name, folder / name) for name in names]


def log_end(folder: Path) -> int:
    """Return where the next record of a log begins; 0 if it has none."""
    starts = _starts_in(folder)
    with contextlib.suppress(OSError):
        return starts[-1] + os.lstat(folder / f"{_LOG_PREFIX}{starts[-1]}").st_size if starts else 0
    return 0


def tail_of(folder: Path, most: int) -> int:
    """Return an offset at which a record begins, with about `most` bytes or more behind it, if the log has as many."""
    starts, end = _starts_in(folder), log_end(folder)
    return next((start for start in reversed(starts) if end - start >= most), starts[0]) if starts else 0


def read_log(folder: Path, offset: int, most: int) -> RecordBatch:
    """Return the records from `offset` on, at most `most` bytes of the log; none if there are none yet.

    Raises:
        ConfigError: no record begins there.
    """
    for _ in range(_OPEN_TRIES):
        try:
            return _read(folder, offset, most)
        except FileNotFoundError:  # removed since the folder was read
            continue
    return RecordBatch(offset, 0, ())


def _read(folder: Path, offset: int, most: int) -> RecordBatch:
    starts = _starts_in(folder)
    if not starts:
        return RecordBatch(offset, 0, ())
    at = max(offset, starts[0])
    missing, taken, records = at - offset, 0, list[OutputRecord]()
    while True:
        start = max(each for each in starts if each <= at)
        following = next((each for each in starts if each > at), None)
        with open(folder / f"{_LOG_PREFIX}{start}", "rb") as file:
            file.seek(at - start)
            while taken < most or not records:
                record = _next_record(file.read(LOG_HEADER_BYTES), offset)
                if record is None:
                    break
                data = file.read(record[3])
                if len(data) < record[3]:  # is being written
                    break
                if taken + LOG_HEADER_BYTES + len(data) > most and records:
                    return RecordBatch(at, missing, tuple(records))
                stream, rank, when, size, lines = record
                records.append(OutputRecord(stream, rank, when, lines, data))
                at, taken = at + LOG_HEADER_BYTES + size, taken + LOG_HEADER_BYTES + size
        if following is None or taken >= most:
            return RecordBatch(at, missing, tuple(records))
        missing, at = missing + following - at, following


def _next_record(head: bytes, offset: int) -> tuple[int, int, float, int, int] | None:
    if len(head) < LOG_HEADER_BYTES:
        return None
    stream, rank, at, size, lines = _HEADER.unpack(head)
    if stream not in (1, 2) or size > RECORD_BYTES:
        raise ConfigError(f"no output begins at {offset}; begin at 0")
    return stream, rank, at, size, lines


def _starts_in(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(
        int(name[len(_LOG_PREFIX) :]) for name in names if name.startswith(_LOG_PREFIX) and name[7:].isdecimal()
    )
