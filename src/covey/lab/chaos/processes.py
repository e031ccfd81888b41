"""The processes of an observed job: starts them, reads what they print, the events of their run, and their records."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self

import msgspec

from covey.lab.chaos.records import Began, Entered, Exclusion, Left, Obeyed, ProcessEnded, Restored, Stepped, from_lines
from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.processes import describe_end, exit_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.lab.chaos.records import Record
    from covey.runtime.processes import Child, ChildOutput

EVENTS_CHECK_EVERY: Final = 0.02
"""How often the events of the run are read while nothing is printed."""
EVENTS_READ_BYTES: Final = 1 << 16


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
        while data := os.read(self._file, EVENTS_READ_BYTES):
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
    child: Child
    started_at: float
    """In seconds since 1970, like all times that are compared with events."""
    is_member: bool = False
    """Whether it takes part in the run, according to its events."""
    code: int | None = None
    """Its exit code, or the negative number of the signal that killed it; None while it runs."""

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def title(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def signal(self, signum: int) -> bool:
        """Send a signal to the process and its children; False if it has ended."""
        return self.child.signal(signum)

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
        path = os.environ.get("COVEY_EVENTS") or os.path.join(self.run.folder, "events")
        self._env = {**env, "COVEY_EVENTS": path}
        self._events = EventFile(path)
        self._tick_at = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.run.children.signal(signal.SIGCONT)  # a stopped process could not end by itself
            self.run.__exit__(*exception)
        finally:
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
        child = self.run.start(rank, self._argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        worker = self.workers[rank] = self._by_pid[child.pid] = JobProcess(rank, child, time.time())
        return worker

    def running(self) -> list[JobProcess]:
        """Return the processes that have not ended, by rank."""
        return [worker for _, worker in sorted(self.workers.items()) if worker.is_running]

    def turn(self, until: float) -> Turn:
        """Pass on output, and return what happened, no later than `until` (monotonic clock)."""
        now = time.monotonic()  # `tick` may act on silence only after all output up to now was read
        wait = min(until, self._tick_at, now + EVENTS_CHECK_EVERY)
        for printed in self.run.children.outputs(max(0.0, wait - now)):
            self._pass_on(printed)
        self._tick_at = self._listener.tick(now)
        # Events are read after the check for ended processes, so that none of theirs is missed.
        ended = [self._by_pid[child.pid] for child in self.run.children.ended()]
        told = self._read_events()
        for worker in ended:
            worker.code = worker.child.code
            worker.is_member = False
            for printed in self.run.children.rest_of(worker.child):
                self._pass_on(printed)
            for target in worker.child.pipes:  # another process holds it open
                self._listener.heard(worker, target, b"")
            self.run.children.forget(worker.child)
        return Turn(ended, told)

    def _pass_on(self, printed: ChildOutput) -> None:
        self._listener.heard(self._by_pid[printed.child.pid], printed.target, printed.data)

    def _read_events(self) -> list[tuple[JobProcess | None, Told]]:
        found = []
        for event in self._events.read():
            worker = self._by_pid.get(event.pid)
            if worker is not None and event.kind in ("generation", "joined"):
                worker.is_member = True
            found.append((worker, event))
        return found


class Watched:
    """One process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""
        self.records: list[Record] = []
        self.name, self.pid, self.host = "", 0, 0
        self.rank = self.generation = -1
        self.members: tuple[str | None, ...] = ()
        self.story = ""
        self.is_member = False
        """Whether it is in a generation, and knows its members."""
        self.steps: list[float] = []
        """When the state changed in this generation."""
        self.ended = ""

    def read(self) -> list[Obeyed]:
        """Read new records; return the orders that the process obeyed."""
        while data := os.read(self._file, EVENTS_READ_BYTES):
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        obeyed = []
        for record in from_lines(lines):
            self.records.append(record)
            match record:
                case Began():
                    self.name, self.pid, self.host = record.name, record.pid, record.host
                case Entered():
                    self.generation, self.rank, self.is_member = record.generation, record.rank, False
                case Restored():
                    self.members, self.story, self.is_member, self.steps = record.members, record.story, True, []
                case Stepped():
                    self.steps.append(record.at)
                case Left() | Exclusion():
                    self.is_member = False
                case ProcessEnded():
                    self.ended, self.is_member = record.how, False
                case Obeyed():
                    obeyed.append(record)
        return obeyed

    @property
    def title(self) -> str:
        return f"{self.name} (rank {self.rank})"

    @property
    def is_alive(self) -> bool:
        return bool(self.pid) and not self.ended and is_running(self.pid)

    def signal(self, signum: int) -> None:
        """Send a signal, if the process still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def close(self) -> None:
        os.close(self._file)


class Processes:
    """All processes that ever began in a run."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._by_path: dict[str, Watched] = {}

    def look(self) -> list[tuple[Watched, Obeyed]]:
        """Read new records of all processes; return the orders that were obeyed."""
        for path in glob.glob(os.path.join(glob.escape(self._folder), "*.jsonl")):
            if path not in self._by_path:
                self._by_path[path] = Watched(path)
        return [(each, obeyed) for each in self._by_path.values() for obeyed in each.read()]

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._by_path.values()))

    def named(self, pid: int) -> str:
        """Return the name of the latest process with this number."""
        return next((each.name for each in reversed(list(self._by_path.values())) if each.pid == pid), "")

    def alive(self) -> list[Watched]:
        return [each for each in self if each.is_alive]

    def members(self) -> list[Watched]:
        """Return the processes that are at work, by rank."""
        found = [each for each in self.alive() if each.is_member]
        return sorted(found, key=lambda each: (each.generation, each.rank, each.name))

    def records(self) -> dict[str, list[Record]]:
        return {each.name: each.records for each in self if each.name}

    def close(self) -> None:
        for each in self:
            each.close()


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started_for(folder: str) -> list[int]:
    """Return the processes whose environment names the folder of a run."""
    found, mark = [], os.fsencode(folder)
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read() and int(name) != os.getpid() and is_running(int(name)):
                found.append(int(name))
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        for signum in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
