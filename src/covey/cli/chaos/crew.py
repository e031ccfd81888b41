"""The processes of a job that is being watched: starts them, hears what they print and what their run tells.

A `Crew` is for tools that do things to processes and want to see what comes of it. It does nothing by itself: whoever
drives it asks for one `turn` after another.
"""

from __future__ import annotations

import contextlib
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
from covey.runtime.processes import signal_group, signal_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOK_SECONDS: Final = 0.02
"""How often ends and events are looked for while nothing is printed."""
READ_BYTES: Final = 1 << 16


class Told(msgspec.Struct, frozen=True):
    """A line of COVEY_EVENTS: what one process told of its run."""

    pid: int
    kind: str
    time: float
    generation: int
    view: int
    ranks: tuple[int, ...] = ()
    phases: dict[str, float] = {}

    @property
    def began(self) -> float:
        """When the first sign of trouble came, in seconds since 1970."""
        return self.time - self.phases.get("agree", 0.0) / 1e3

    @property
    def ended(self) -> float:
        """When operations went on."""
        last = max(self.phases.values(), default=0.0)
        return self.began + last / 1e3


_told: Final = msgspec.json.Decoder(Told)


@dataclass(eq=False)
class Worker:
    """One process of the job."""

    rank: int
    """Its slot: that of whoever it replaces, too."""
    process: subprocess.Popen[bytes]
    started_at: float
    """By the clock that counts from 1970, as all times that are compared with what the job tells."""
    is_member: bool = False
    """Whether it takes part in the run, as far as it has told."""
    code: int | None = None
    """How it ended: its exit code, or the negative number of a signal."""
    pipes: list[IO[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def status(self) -> int:
        """What a shell would make of how it ended."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.code or 0
        return f"failed with exit code {code}" if code > 0 else f"was killed by {signal_name(-code)}"


class Listener(Protocol):
    """Who takes what the processes print."""

    def heard(self, worker: Worker, target: int, data: bytes) -> None:
        """`target` is 1 or 2; no data: the process has closed it."""

    def tick(self, now: float) -> float:
        """All that was printed by `now`, of the monotonic clock, was told; returns when to call again at the latest."""


@dataclass(frozen=True)
class Turn:
    """What happened in a turn."""

    ended: list[Worker]
    told: list[tuple[Worker | None, Told]]


class Crew:
    """The processes of a local run. Use it in `with`: leaving ends them all."""

    def __init__(
        self, size: int, argv: Sequence[str], listener: Listener, *, env: Mapping[str, str], slots: int | None = None
    ) -> None:
        """Nobody is started yet. There will be at most `slots` ranks: those of newcomers may be above `size`."""
        self.run = LocalRun(size)
        self.size = size
        self._slots = size if slots is None else slots
        self._argv, self._listener = argv, listener
        self.workers: dict[int, Worker] = {}
        """The latest of each slot."""
        self._by_pid: dict[int, Worker] = {}
        self._starts: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        path = os.environ.get("COVEY_EVENTS") or os.path.join(self.run.folder, "events")
        self._env = {**env, "COVEY_EVENTS": path}
        self._events = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.lseek(self._events, 0, os.SEEK_END)
        self._unread = b""
        self._tick_at = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.run.signal(signal.SIGCONT)  # or those that are stopped cannot end well
            self.run.__exit__(*exception)
        finally:
            self._selector.close()
            os.close(self._events)

    def start_all(self) -> None:
        """Start the processes with which the job begins."""
        for rank in range(self.size):
            self.start(rank)
        self.run.size = self._slots  # newcomers knock at all doors that there may be

    def start(self, rank: int) -> Worker:
        """Start a process; not the first in its slot, or not with the others, it is a newcomer to the run."""
        before = self._starts.get(rank, 0)
        self._starts[rank] = before + 1
        restart = before if rank < self.size else before + 1
        env = {**self._env, "COVEY_RESTART": str(restart)} if restart else self._env
        process = self.run.start(rank, self._argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        worker = self.workers[rank] = Worker(rank, process, time.time())
        self._by_pid[process.pid] = worker
        for source, target in ((process.stdout, 1), (process.stderr, 2)):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            worker.pipes.append(source)
            self._selector.register(source, selectors.EVENT_READ, (worker, target))
        return worker

    def running(self) -> list[Worker]:
        """Return the processes that have not ended, by slot."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.is_running]

    def signal(self, worker: Worker, signum: int) -> bool:
        """Send a signal to a process and all that it started; False if it has ended."""
        return signal_group(worker.pid, signum, reaped=worker.process.poll() is not None)

    def turn(self, until: float) -> Turn:
        """Return what happened, at the latest at `until` by the monotonic clock; pass on what was printed."""
        now = time.monotonic()  # all that was printed by then is read before anybody's silence counts
        wait = min(until, self._tick_at, now + LOOK_SECONDS)
        for key, _ in self._selector.select(max(0.0, wait - now)):
            worker, target = key.data
            self._read(worker, target, key.fileobj)  # type: ignore[arg-type]
        self._tick_at = self._listener.tick(now)
        # Who has ended has told all that it ever will.
        ended = [worker for worker in self.running() if worker.process.poll() is not None]
        told = self._read_events()
        for worker in ended:
            worker.code = worker.process.returncode
            worker.is_member = False
            self._bury(worker)
        return Turn(ended, told)

    def _read(self, worker: Worker, target: int, pipe: IO[bytes]) -> bool:
        """Read once; False at the end."""
        data = os.read(pipe.fileno(), READ_BYTES)
        if not data:
            self._selector.unregister(pipe)
            worker.pipes.remove(pipe)
        self._listener.heard(worker, target, data)
        return bool(data)

    def _bury(self, worker: Worker) -> None:
        """Hear the last words of a process that has ended, and end what it left running."""
        for pipe in list(worker.pipes):
            target = 1 if pipe is worker.process.stdout else 2
            with contextlib.suppress(BlockingIOError):  # a descendant that escaped holds it open
                for _ in range(64):
                    if not self._read(worker, target, pipe):
                        break
            if pipe in worker.pipes:
                self._selector.unregister(pipe)
                self._listener.heard(worker, target, b"")
        worker.pipes.clear()
        self.run.clear_away(worker.process)

    def _read_events(self) -> list[tuple[Worker | None, Told]]:
        found = []
        while data := os.read(self._events, READ_BYTES):
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in filter(None, lines):
            event = _told.decode(line)
            worker = self._by_pid.get(event.pid)
            if worker is not None and event.kind in ("generation", "joined"):
                worker.is_member = True
            found.append((worker, event))
        return found
