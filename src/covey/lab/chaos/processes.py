"""The processes of an observed job: starts them, reads what they print and the events of their run.

For tools that disturb processes and observe the effect: `covey chaos` and `covey bench recovery`. It has no thread; its
owner calls `turn` repeatedly.
"""

from __future__ import annotations

import functools
import math
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final, Protocol, Self

import msgspec

from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.processes import describe_end, drain, exit_status, register_output, signal_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS: Final = 0.02
"""How often ended processes and events are checked for while nothing is printed."""
READ_BYTES: Final = 1 << 16


class Told(msgspec.Struct, frozen=True):
    """A line of COVEY_EVENTS: an event of a run, as one process saw it."""

    pid: int
    kind: str
    time: float
    generation: int
    view: int
    ranks: tuple[int, ...] = ()
    phases: dict[str, float] = {}

    @property
    def began(self) -> float:
        """When the loss was first noticed, in seconds since 1970."""
        return self.time - self.phases.get("agree", 0.0) / 1e3

    @property
    def ended(self) -> float:
        """When operations continued."""
        last = max(self.phases.values(), default=0.0)
        return self.began + last / 1e3


_told: Final = msgspec.json.Decoder(Told)


class EventFile:
    """Reads the file to which the processes of a run append their events."""

    def __init__(self, path: str) -> None:
        """Begin at the end of the file, which is made if it does not exist."""
        self._file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.lseek(self._file, 0, os.SEEK_END)
        self._unread = b""

    def read(self) -> list[Told]:
        """Return the events that were added."""
        while data := os.read(self._file, READ_BYTES):
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [_told.decode(line) for line in lines if line]

    def close(self) -> None:
        os.close(self._file)


@dataclass(eq=False)
class JobProcess:
    """One process of the job."""

    rank: int
    """Its number in the job; a process that replaces another has the same number."""
    process: subprocess.Popen[bytes]
    started_at: float
    """In seconds since 1970, like all times that are compared with events."""
    is_member: bool = False
    """Whether it takes part in the run, according to its events."""
    code: int | None = None
    """Its exit code, or the negative number of the signal that killed it; None while it runs."""
    pipes: list[IO[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def title(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def signal(self, signum: int) -> bool:
        """Send a signal to the process and its children; False if it has ended."""
        return signal_group(self.pid, signum, reaped=self.process.poll() is not None)

    @property
    def status(self) -> int:
        """The exit status that a shell would report."""
        return exit_status(self.code or 0)

    @property
    def end(self) -> str:
        """How it failed, in words."""
        return describe_end(self.code or 0)


class Listener(Protocol):
    """Receives what the processes print."""

    def heard(self, worker: JobProcess, target: int, data: bytes) -> None:
        """Called with output; `target` is 1 or 2. Empty data means that the process has closed it."""

    def tick(self, now: float) -> float:
        """Called when all output up to `now` (monotonic clock) was passed on; returns when to call it next."""


@dataclass(frozen=True)
class Turn:
    """What happened in a turn."""

    ended: list[JobProcess]
    told: list[tuple[JobProcess | None, Told]]


class JobProcesses:
    """The processes of a local run. Use it in `with`: leaving ends them all."""

    def __init__(
        self, size: int, argv: Sequence[str], listener: Listener, *, env: Mapping[str, str], slots: int | None = None
    ) -> None:
        """Start nothing yet. There will be at most `slots` ranks: those of newcomers may be above `size`."""
        self.run = LocalRun(size, name="chaos")
        self.size = size
        self._slots = size if slots is None else slots
        self._argv, self._listener = argv, listener
        self.workers: dict[int, JobProcess] = {}
        """Rank → its latest process."""
        self._by_pid: dict[int, JobProcess] = {}
        self._starts: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        path = os.environ.get("COVEY_EVENTS") or os.path.join(self.run.folder, "events")
        self._env = {**env, "COVEY_EVENTS": path}
        self._events = EventFile(path)
        self._tick_at = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.run.signal(signal.SIGCONT)  # a stopped process could not end by itself
            self.run.__exit__(*exception)
        finally:
            self._selector.close()
            self._events.close()

    def start_all(self) -> None:
        """Start the processes with which the job begins."""
        for rank in range(self.size):
            self.start(rank)
        self.run.size = self._slots  # newcomers dial every rank that there may be

    def start(self, rank: int) -> JobProcess:
        """Start a process: a newcomer to the run, unless it is the first of its rank and starts with the others."""
        before = self._starts.get(rank, 0)
        self._starts[rank] = before + 1
        restart = before if rank < self.size else before + 1
        env = {**self._env, "COVEY_RESTART": str(restart)} if restart else self._env
        process = self.run.start(rank, self._argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        worker = self.workers[rank] = JobProcess(rank, process, time.time())
        self._by_pid[process.pid] = worker
        worker.pipes = register_output(process, self._selector, lambda _pipe, target: (worker, target))
        return worker

    def running(self) -> list[JobProcess]:
        """Return the processes that have not ended, by rank."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.is_running]

    def turn(self, until: float) -> Turn:
        """Pass on output, and return what happened, no later than `until` (monotonic clock)."""
        now = time.monotonic()  # `tick` may act on silence only after all output up to now was read
        wait = min(until, self._tick_at, now + POLL_SECONDS)
        for key, _ in self._selector.select(max(0.0, wait - now)):
            worker, target = key.data
            self._read(worker, target, key.fileobj)  # type: ignore[arg-type]
        self._tick_at = self._listener.tick(now)
        # Events are read after the check for ended processes, so that none of theirs is missed.
        ended = [worker for worker in self.running() if worker.process.poll() is not None]
        told = self._read_events()
        for worker in ended:
            worker.code = worker.process.returncode
            worker.is_member = False
            self._clear_away(worker)
        return Turn(ended, told)

    def _read(self, worker: JobProcess, target: int, pipe: IO[bytes]) -> bool:
        """Read once; False at the end."""
        data = os.read(pipe.fileno(), READ_BYTES)
        if not data:
            self._selector.unregister(pipe)
            worker.pipes.remove(pipe)
        self._listener.heard(worker, target, data)
        return bool(data)

    def _clear_away(self, worker: JobProcess) -> None:
        """Read the last output of a process that has ended, and end what it left running."""
        for pipe in list(worker.pipes):
            target = 1 if pipe is worker.process.stdout else 2
            drain(functools.partial(self._read, worker, target, pipe))
            if pipe in worker.pipes:
                self._selector.unregister(pipe)
                self._listener.heard(worker, target, b"")
        worker.pipes.clear()
        self.run.clear_away(worker.process)

    def _read_events(self) -> list[tuple[JobProcess | None, Told]]:
        found = []
        for event in self._events.read():
            worker = self._by_pid.get(event.pid)
            if worker is not None and event.kind in ("generation", "joined"):
                worker.is_member = True
            found.append((worker, event))
        return found
