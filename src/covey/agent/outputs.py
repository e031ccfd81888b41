"""The output of one program that an agent has started, for any number of readers. Any thread may call any method."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from covey.agent.requests import OUTPUT_CHUNK_BYTES, OutputBatch
from covey.net.host.saved_output import SavedOutput, read_log, tail_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOG_BYTES: Final = 32 << 20
"""What is kept of the output of a program."""
VIEW_TAIL_BYTES: Final = 256 << 10
"""What a view shows of the output before it was opened."""


class OutputLog:
    """What one program has written, and how it has ended."""

    def __init__(self, folder: Path) -> None:
        """Write into `folder`, which has no log yet."""
        self._folder = folder
        self._lock = threading.Lock()
        self._log = SavedOutput(folder, LOG_BYTES)
        self.code: int | None = None
        """The exit code of the program, once it has ended."""
        self._listeners: list[Callable[[], None]] = []

    def append(self, stream: int, data: bytes) -> None:
        """Add output; what cannot be written (a full disk) is lost, and readers are told."""
        with self._lock:
            self._log.append(stream, data)
        self._tell()

    def end(self, code: int) -> None:
        """Note that the program has ended."""
        with self._lock:
            self.code = code
        self._tell()

    def read(self, offset: int) -> OutputBatch:
        """Return the records from `offset` on, as many as fit into a call; none if there are none yet.

        Raises:
            ConfigError: no record begins there.
        """
        with self._lock:
            end, code = self._log.end, self.code
        batch = read_log(self._folder, offset, OUTPUT_CHUNK_BYTES)
        records = tuple((record.stream, record.data) for record in batch.records)
        times = tuple(record.at for record in batch.records)
        return OutputBatch(batch.next, batch.missing, records, code if batch.next >= end else None, times)

    def tail(self) -> int:
        """Return an offset shortly before the end, at which a record begins."""
        return tail_of(self._folder, VIEW_TAIL_BYTES)

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
            self._log.remove()

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            listener()
