"""The output of one program on disk: the latest part of it, for any number of readers.

A record is a stream number (1 or 2), a length, and what was written. Records are numbered by the bytes before them, and
stay valid while older files are removed. Appending never waits for a reader: one that falls behind by more than the log
holds misses the oldest records, and is told how many bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from typing import TYPE_CHECKING, Final

from covey.agent.requests import OUTPUT_CHUNK_BYTES, OutputBatch
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOG_SEGMENT_BYTES: Final = 8 << 20
SEGMENTS: Final = 4
"""Files of a log; then the oldest is removed."""
OUTPUT_RECORD_BYTES: Final = 16 << 10
"""The most of one record, so that a batch is never empty because the next record is too long."""
_HEADER: Final = struct.Struct(">BI")


class OutputLog:
    """What one program has written. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which has no log yet."""
        self._folder = folder
        self._lock = threading.Lock()
        self._starts = [0]
        """Where each file begins, the oldest first."""
        self._end = 0
        self._file = self._open(0)
        self.code: int | None = None
        """The exit code of the program, once it has ended."""
        self._listeners: list[Callable[[], None]] = []

    def append(self, stream: int, data: bytes) -> None:
        """Add output; what cannot be written (a full disk) is lost, and readers are told."""
        with self._lock:
            for start in range(0, len(data), OUTPUT_RECORD_BYTES):
                piece = data[start : start + OUTPUT_RECORD_BYTES]
                record = _HEADER.pack(stream, len(piece)) + piece
                if self._end - self._starts[-1] + len(record) > LOG_SEGMENT_BYTES:
                    self._next_file()
                try:
                    self._file.write(record)
                    self._end += len(record)
                except OSError:  # a part of the record may have been written: nothing after it could be read
                    self._end += len(record)
                    self._next_file()
        self._tell()

    def end(self, code: int) -> None:
        """Note that the program has ended."""
        with self._lock:
            self.code = code
            with contextlib.suppress(OSError):
                self._file.close()
        self._tell()

    def read(self, offset: int) -> OutputBatch:
        """Return the records from `offset` on, as many as fit into a call; none if there are none yet.

        Raises:
            ConfigError: no record begins there.
        """
        with self._lock:
            begin = max(offset, self._starts[0])
            starts = [start for start in self._starts if start <= begin]
            following = [start for start in self._starts if start > begin]
            limit, is_over = (following[0] if following else self._end), self.code
        records, at, taken = list[tuple[int, bytes]](), begin, 0
        with contextlib.suppress(OSError), open(self._path(starts[-1]), "rb") as file:
            file.seek(begin - starts[-1])
            while at < limit:
                head = file.read(_HEADER.size)
                if len(head) < _HEADER.size:  # could not be written
                    break
                stream, size = _HEADER.unpack(head)
                if stream not in (1, 2) or size > OUTPUT_RECORD_BYTES:
                    raise ConfigError(f"no output begins at {offset}; begin at 0")
                if taken + size > OUTPUT_CHUNK_BYTES:
                    break
                records.append((stream, file.read(size)))
                at, taken = at + _HEADER.size + size, taken + size
        if not records and at < limit:
            at = limit  # the rest of this file could not be written
        missing = max(0, begin - offset) + (at - begin if not records else 0)
        is_last = is_over is not None and at >= self._end
        return OutputBatch(at, missing, tuple(records), is_over if is_last else None)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every change, on the thread of the change; return what ends this."""
        self._listeners.append(listener)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return stop

    def remove(self) -> None:
        """Remove the files; the log is of no use afterwards."""
        with self._lock:
            for start in self._starts:
                self._path(start).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def _path(self, start: int) -> Path:
        return self._folder / f"output-{start}"

    def _open(self, start: int) -> _SegmentFile:
        return _SegmentFile(self._path(start))

    def _next_file(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = self._open(self._end)
        if self._starts[-1] == self._end:
            return
        self._starts.append(self._end)
        while len(self._starts) > SEGMENTS:
            self._path(self._starts.pop(0)).unlink(missing_ok=True)


class _SegmentFile:
    """A file that is written without buffers, so that readers see every record; opened on first use."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1

    def write(self, data: bytes) -> None:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
