"""The demo's processes: starts one worker per rank and yields their reports as they come."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING

from covey.base.errors import DeadlineError, RankFailedError
from covey.cli.demo.reports import Finished, Report, decode
from covey.runtime.keeper import LocalRun

if TYPE_CHECKING:
    from collections.abc import Generator

SILENCE = 60.0
"""Seconds without a report from any rank after which the crew is given up. Ranks report many times a second."""
LAST_WORDS_BYTES = 4000
"""How much of the end of a failed rank's stderr is kept."""

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
"""Ranks already share the cores; threads of their linear algebra would only get into each other's way."""


def reports(size: int, *, rounds: int, seconds: float, seed: int) -> Generator[tuple[int, Report], None, None]:
    """Start `size` ranks and yield (rank, report) until all have finished and exited.

    Close the generator (`contextlib.closing`) to end the ranks early.

    Raises:
        RankFailedError: a rank ended before it was done; the message ends with its last words.
        DeadlineError: nothing was heard from anyone for SILENCE seconds.
    """
    command = [sys.executable, "-m", "covey.cli.demo.worker"]
    command += [f"--rounds={rounds}", f"--seconds={seconds}", f"--seed={seed}"]
    with LocalRun(size) as run, selectors.DefaultSelector() as selector:
        workers = []
        for rank in range(size):
            pipes = run.start(rank, command, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            workers.append(_Worker(rank, pipes))
            for pipe in workers[-1].open_pipes:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, workers[-1])
        give_up_at = time.monotonic() + SILENCE
        while any(worker.open_pipes for worker in workers):
            ready = selector.select(max(0.0, give_up_at - time.monotonic()))
            if not ready:
                missing = tuple(worker.rank for worker in workers if worker.open_pipes)
                raise DeadlineError(f"no report from ranks {missing} for {SILENCE:.0f} s", late=missing)
            for key, _ in ready:
                worker: _Worker = key.data
                for report in worker.read(key.fileobj):  # type: ignore[arg-type]
                    give_up_at = time.monotonic() + SILENCE
                    yield worker.rank, report
            for worker in workers:
                for pipe in worker.closed_pipes:
                    selector.unregister(pipe)
                worker.closed_pipes.clear()
            # One death makes the others fail too; of those seen together, a rank that was killed is the first cause.
            failures = [failure for worker in workers if (failure := worker.failure())]
            if failures:
                raise min(failures, key=lambda failure: failure.exit_code or 0)


class _Worker:
    """One rank's process with what it has written so far."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.rank, self._process = rank, process
        self.open_pipes: list[IO[bytes]] = [process.stdout, process.stderr]
        self.closed_pipes: list[IO[bytes]] = []
        self._line = b""
        self._last_words = b""
        self._finished = False

    def read(self, pipe: IO[bytes]) -> list[Report]:
        """Take what the pipe holds and return the reports that are now whole."""
        data = os.read(pipe.fileno(), 65536)
        if not data:
            self.open_pipes.remove(pipe)
            self.closed_pipes.append(pipe)
        if pipe is self._process.stderr:
            self._last_words = (self._last_words + data)[-LAST_WORDS_BYTES:]
            return []
        *lines, self._line = (self._line + data).split(b"\n")
        whole = [decode(line) for line in lines]
        self._finished = self._finished or any(isinstance(report, Finished) for report in whole)
        return whole

    def failure(self) -> RankFailedError | None:
        """Return the error if the rank ended otherwise than after its last report with exit code 0."""
        if self.open_pipes:
            return None
        try:
            code = self._process.wait(timeout=SILENCE)
        except subprocess.TimeoutExpired:
            return RankFailedError(f"rank {self.rank} closed its output but does not end", rank=self.rank)
        if code == 0 and self._finished:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last_words = self._last_words.decode(errors="replace").strip()
        message = f"rank {self.rank} {how} before it was done" + (
            f"; its last words:\n{last_words}" if last_words else ""
        )
        return RankFailedError(message, rank=self.rank, exit_code=code)
