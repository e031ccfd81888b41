"""Ranks as real processes: start a function once per rank, hear what each one says, end them all whatever happens.

A rank's function lives in the test that uses it, but only its source travels: it may use the names imported at the
top of this file and those defined under "In a rank", and nothing else of its own module.

    def add(scale: int) -> list[float]:
        with covey.join() as group:
            return group.all_reduce(np.arange(3.0) + scale * group.rank).tolist()

    assert run_ranks(2, add, 10, lanes="tcp") == [[10, 12, 14]] * 2
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.waiting import DEADLINE

import covey
from covey.base.lane_kinds import LANE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Self

SOURCE = Path(__file__).parents[2] / "src"
LANES = tuple(kind.name for kind in LANE_KINDS.values() if kind.is_automatic)

# Ranks' functions use the modules imported above.
__all__ = ["DEADLINE", "LANES", "Ranks", "attempt", "await_go", "contextlib", "covey", "logging", "multiprocessing"]
__all__ += ["Lived", "np", "run_ranks", "say", "threading", "timed"]


# In the test


def run_ranks(size: int, function: Callable[..., Any], *args: Any, lanes: str, timeout: float = DEADLINE) -> list[Any]:
    """Run `function(*args)` as every rank of a run; return the results by rank once all have ended well."""
    with Ranks(size, function, *args, lanes=lanes) as ranks:
        results = ranks.results(timeout=timeout)
        ranks.await_exit(timeout=timeout)
        return results


class Ranks:
    """Processes that run `function(*args)` as the ranks of one run. Leaving the `with` block ends them all."""

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        lanes: str,
        env: dict[str, str] | None = None,
        start: Collection[int] | None = None,
    ) -> None:
        """`args` are JSON. Ranks outside `start` (default: all) wait for `begin`."""
        from covey.runtime.keeper.keeper import LocalRun  # ranks, which execute this file, have no use for it

        self._run = LocalRun(size)
        path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
        self._env = {"COVEY_LANES": lanes, "PYTHONPATH": path, **(env or {})}
        code = textwrap.dedent(inspect.getsource(function))
        self._argv = [sys.executable, __file__, code, function.__name__, json.dumps(args)]
        self._processes: dict[int, Any] = {}
        self._said: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(size)}
        self._tails: dict[int, bytes] = dict.fromkeys(range(size), b"")
        self._errors: dict[int, bytes] = dict.fromkeys(range(size), b"")
        self._pipes: dict[int, tuple[int, bool]] = {}
        self._poll = select.poll()
        self._begin_all(range(size) if start is None else start)

    def _begin_all(self, ranks: Collection[int]) -> None:
        try:
            for rank in ranks:
                self.begin(rank)
        except BaseException:
            self.__exit__()
            raise

    @property
    def folder(self) -> Path:
        """Where the ranks' sockets are."""
        return Path(self._run.folder)

    def begin(self, rank: int) -> None:
        """Start `rank`; again, if it ended."""
        from unittest.mock import patch

        from tests.support import forked

        from covey.runtime import processes

        pipe = subprocess.PIPE
        with patch.object(processes, "subprocess", forked):
            child = self._run.start(rank, self._argv, env=self._env, stdin=pipe, stdout=pipe, stderr=pipe)
        process = self._processes[rank] = child.process
        for source, is_error in ((process.stdout, False), (process.stderr, True)):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            self._pipes[source.fileno()] = (rank, is_error)
            self._poll.register(source, select.POLLIN)

    def go(self, rank: int) -> None:
        """Let `rank` return from `await_go`."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(b"\n")
        pipe.flush()

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def signal(self, rank: int, signum: int) -> float:
        """Send a signal to one rank, not to its children; return the moment just before, by time.monotonic()."""
        at = time.monotonic()
        os.kill(self.pid(rank), signum)
        return at

    def kill(self, rank: int) -> float:
        return self.signal(rank, signal.SIGKILL)

    def hear(self, event: str, ranks: Collection[int] | None = None, *, timeout: float = DEADLINE) -> list[Any]:
        """Return what each of `ranks` (default: all) said with `say(event, ...)`, once all of them have."""
        wanted = list(self._processes) if ranks is None else list(ranks)

        def heard(rank: int) -> list[dict[str, Any]]:
            return [line for line in self._said[rank] if line["event"] == event]

        deadline = time.monotonic() + timeout
        while missing := [rank for rank in wanted if not heard(rank)]:
            over = [rank for rank in missing if self._processes[rank].poll() is not None]
            more = self._listen(0 if over else 0.1)  # a rank may close its pipes before it ends
            assert more or (not over and time.monotonic() < deadline), self._story(event, missing)
        return [heard(rank)[0] for rank in wanted]

    def results(self, ranks: Collection[int] | None = None, *, timeout: float = DEADLINE) -> list[Any]:
        """Return what `function` returned in each of `ranks`."""
        return [line["result"] for line in self.hear("returned", ranks, timeout=timeout)]

    def await_exit(self, ranks: Collection[int] | None = None, *, code: int = 0, timeout: float = DEADLINE) -> None:
        """Return once `ranks` have ended, with `code`."""
        deadline = time.monotonic() + timeout
        for rank in list(self._processes) if ranks is None else ranks:
            while self._processes[rank].poll() is None:
                assert time.monotonic() < deadline, self._story("its end", [rank])
                self._listen(0.02)
            while self._listen(0):
                pass
            assert self._processes[rank].returncode == code, self._story(f"exit code {code}", [rank])

    def errors(self, rank: int) -> str:
        """Return what `rank` has written to its standard error."""
        while self._listen(0):
            pass
        return self._errors[rank].decode(errors="replace")

    def _listen(self, seconds: float) -> bool:
        """Read what the ranks say now or within `seconds`; tell whether anything came."""
        came = False
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            rank, is_error = self._pipes[descriptor]
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                self._poll.unregister(descriptor)
            elif is_error:
                self._errors[rank] += piece
            else:
                *lines, self._tails[rank] = (self._tails[rank] + piece).split(b"\n")
                self._said[rank] += map(json.loads, lines)
            came = True
        return came

    def _story(self, wanted: str, missing: list[int]) -> str:
        words = [f"no {wanted!r} from rank {', '.join(map(str, missing))}"]
        for rank, process in self._processes.items():
            errors = self._errors[rank].decode(errors="replace")
            words.append(f"rank {rank} (exit code {process.poll()}) said {self._said[rank]}\n{errors}")
        return "\n".join(words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run.children.signal(signal.SIGKILL)
        finally:
            self._run.__exit__()


# In a rank


def say(event: str, **facts: Any) -> None:
    """Tell the test something."""
    os.write(1, json.dumps({"event": event, "at": time.monotonic(), **facts}).encode() + b"\n")


def await_go() -> None:
    """Wait until the test says `go`."""
    sys.stdin.readline()


def attempt(function: Callable[[], Any]) -> dict[str, Any]:
    """Call `function`; return the result, or all about the error, and when it ended."""
    try:
        result = function()
    except BaseException as error:
        facts = {name: getattr(error, name) for name in ("rank", "host", "operation", "sequence", "late")
                 if hasattr(error, name)}  # fmt: skip
        cause = type(error.__cause__).__name__ if error.__cause__ is not None else None
        return {"at": time.monotonic(), "error": type(error).__name__, "text": str(error), "cause": cause, **facts}
    return {"at": time.monotonic(), "error": None, "result": result}


def starved() -> float:
    """Return how long threads of this process have been ready to run while no core was free, in seconds."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            total += int(path.read_text().split()[1])
    return total / 1e9


class Lived:
    """The time in which this process runs: it notes every few milliseconds that it does.

    A machine that is busy, or stands still, makes less of it pass; a program that waits, as much as the clock says.
    """

    PERIOD, MOST = 0.005, 0.02

    def __init__(self) -> None:
        self.moments = [time.monotonic()]
        threading.Thread(target=self._note, daemon=True).start()

    def _note(self) -> None:
        while True:
            time.sleep(self.PERIOD)
            self.moments.append(time.monotonic())

    @classmethod
    def between(cls, moments: list[float], begin: float, end: float) -> float:
        """Return how much of it passed between two moments, by what a process has noted."""
        noted = [begin, *(moment for moment in moments if begin < moment < end), end]
        return sum(min(cls.MOST, later - earlier) for earlier, later in itertools.pairwise(noted))


def timed(function: Callable[[], Any]) -> dict[str, Any]:
    """As `attempt`, with the time that it `took`, and for how long this process was `starved` meanwhile."""
    before, began = starved(), time.monotonic()
    result = attempt(function)
    return {**result, "took": result["at"] - began, "starved": starved() - before}


def _main() -> None:
    code, name, args = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    names = {**globals()}
    exec(compile(code, f"<{name}>", "exec"), names)
    say("returned", result=names[name](*json.loads(args)))


if __name__ == "__main__":
    _main()
