"""Passes the output of a job's processes to the terminal, with lines of `covey chaos` in between."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from covey.runtime.keeper.output import Cursor, OutputStream

if TYPE_CHECKING:
    from covey.lab.chaos.processes import JobProcess


class Relay:
    """Passes output on as `covey run` does: whole lines, with the rank in front."""

    def __init__(self, *, only_stderr: bool) -> None:
        """Pass all output to standard error if `only_stderr`: standard output is for the report."""
        self._targets = {1: 2 if only_stderr else 1, 2: 2}
        one_place = only_stderr or os.path.sameopenfile(1, 2)
        err = Cursor()
        self._cursors = {1: err if one_place else Cursor(), 2: err}
        self._streams: dict[tuple[int, int], tuple[int, OutputStream]] = {}
        """(pid, stream) → where its output goes, and the output that was not shown yet."""

    def heard(self, worker: JobProcess, target: int, data: bytes) -> None:
        key = worker.pid, target
        if key not in self._streams:
            shown = self._targets[target]
            coloured = os.isatty(shown) and not os.environ.get("NO_COLOR")
            self._streams[key] = shown, OutputStream(worker.rank, self._cursors[target], coloured=coloured)
        shown, stream = self._streams[key]
        if data:
            _write(shown, stream.feed(data, now=time.monotonic()))
        else:
            _write(shown, stream.end())
            del self._streams[key]

    def tick(self, now: float) -> float:
        for shown, stream in self._streams.values():
            if stream.show_at is not None and stream.show_at <= now:
                _write(shown, stream.flush())
        return min(
            (stream.show_at for _, stream in self._streams.values() if stream.show_at is not None), default=math.inf
        )

    def say(self, text: str) -> None:
        """Print a line of `covey chaos` itself, on standard error."""
        _write(2, self._cursors[2].make_room() + f"covey: {text}\n".encode())


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]
