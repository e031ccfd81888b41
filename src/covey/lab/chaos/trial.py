"""Runs one job under chaos, from its first process to its last: injects the faults and records what happens."""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from covey.lab.chaos.cutting import cut
from covey.runtime.keeper.keeper import FAILURE_GRACE, RESTARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.lab.chaos.faults import Chaos, PlannedFault
    from covey.lab.chaos.processes import JobProcesses, Told, Worker

HOLD_SECONDS: Final = 30.0
"""How long a fault waits until its target, and enough other processes, are members."""
STRAY_SECONDS: Final = 1.0
"""How long processes that wait to join may live after the last member has ended."""
OUT_OF_TIME: Final = 124
"""The exit code of a job that did not end in time, the same as that of timeout(1)."""


@dataclass
class Injected:
    """A fault that was injected: when, and into which process."""

    fault: PlannedFault
    at: float
    """In seconds since 1970."""
    worker: Worker | None = None
    note: str = ""
    """Its immediate effect; or why no process was touched."""

    @property
    def was_done(self) -> bool:
        return self.worker is not None


@dataclass
class Ending:
    """How a process ended."""

    worker: Worker
    at: float
    """In seconds since 1970."""
    how: str
    """`finished`, `left`, `lost` to a fault, `failed`, or `stray`: it waited to join when the job was over."""


@dataclass
class Story:
    """All that happened."""

    began: float = 0.0
    """When the work began, in seconds since 1970; 0 if it never did."""
    injected: list[Injected] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    forgiven: set[int] = field(default_factory=set)
    """Processes that failed and were started again."""
    survives: bool = False
    """Whether the job continues without lost members, by its own events."""
    is_out_of_time: bool = False
    ended: float = 0.0

    @property
    def code(self) -> int:
        """The exit code of the job: 0 if a process finished, and no untouched process failed."""
        if self.is_out_of_time:
            return OUT_OF_TIME
        failed = [ending.worker for ending in self.endings if ending.how == "failed"]
        unforgiven = [worker for worker in failed if worker.pid not in self.forgiven]
        if unforgiven:
            # One death makes other processes fail; a process that was killed is the likely first cause.
            return min(unforgiven, key=lambda worker: worker.code or 0).status
        if any(ending.how in ("finished", "left") for ending in self.endings):
            return 0
        lost = [ending.worker.status for ending in self.endings if ending.how == "lost"]
        return lost[-1] if lost else 1


class Trial:
    """Takes a job through a plan of faults."""

    def __init__(
        self,
        job: JobProcesses,
        chaos: Chaos,
        faults: Sequence[PlannedFault],
        say: Callable[[str], None],
        timeout: float | None,
    ) -> None:
        self.story = Story()
        self._job, self._chaos, self._say = job, chaos, say
        self._faults = list(faults)
        self._give_up_at = float("inf") if timeout is None else time.monotonic() + timeout
        self._began_at = float("inf")
        """The moment that faults count from, by the monotonic clock."""
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        """Other actions, and when they are due: processes to continue, to stop again, to restart."""
        self._disturbed: set[int] = set()
        """Processes that are stopped, slow or asked to leave now."""
        self._injured: dict[int, PlannedFault] = {}
        """By process: the fault that it was lost to."""
        self._restarts: dict[int, int] = {}
        self._coming: set[int] = set()
        """Ranks whose process is about to be restarted."""
        self._is_stopping = False
        self._actions: dict[str, Callable[[PlannedFault, Worker, Injected], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "slow": self._slow,
            "leave": self._leave,
            "cut": self._cut,
        }

    def run(self) -> Story:
        """Run the job to its end and return what happened. After Ctrl-C, `story` has what happened until then."""
        self._job.start_all()
        while self._job.running() or self._coming:
            turn = self._job.turn(self._next_at())
            for worker, told in turn.told:
                self._hear(worker, told)
            for worker in turn.ended:
                self._on_end(worker)
            now = time.monotonic()
            while self._agenda and self._agenda[0][0] <= now:
                heapq.heappop(self._agenda)[2]()
            self._look_for_strays()
            if self._faults and not self._is_stopping and now >= self._began_at + self._faults[0].at:
                self._try(self._faults[0], now)
            if now >= self._give_up_at:
                self.story.is_out_of_time = True
                self._say("the job did not end in time; stopping it")
                break
        self.story.ended = time.time()
        return self.story

    def _next_at(self) -> float:
        due = [self._give_up_at, *(at for at, _, _ in self._agenda[:1])]
        if self._faults:
            due.append(self._began_at + self._faults[0].at)
        return min(due)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), what))

    # What the job does

    def _hear(self, worker: Worker | None, told: Told) -> None:
        self.story.told.append(told)
        if not self.story.began and told.kind in ("generation", "joined"):
            self.story.began, self._began_at = told.time, time.monotonic()
        if worker is not None and told.kind in ("generation", "joined"):
            self._injured.pop(worker.pid, None)  # it is back

    def _on_end(self, worker: Worker) -> None:
        pid, story = worker.pid, self.story
        fault = self._injured.get(pid)
        self._disturbed.discard(pid)
        how = "lost" if fault is not None else "failed"
        if worker.code == 0:
            how = "left" if fault is not None and fault.kind == "leave" else "finished"
        elif self._is_stopping:
            how = "stray"
        story.endings.append(Ending(worker, time.time(), how))
        story.survives = story.survives or bool(self._job.run.survives())
        if worker.code == 0 or self._is_stopping:
            return
        if not story.survives:
            self._faults.clear()  # a failed job gets no more faults
            if self._job.running():
                self._say(f"rank {worker.rank} {worker.end}; stopping the others")
                self._later(FAILURE_GRACE, self._stop_all)
            return
        before = self._restarts.get(worker.rank, 0)
        if before < self._chaos.restarts and any(other.is_member for other in self._job.running()):
            self._restarts[worker.rank] = before + 1
            story.forgiven.add(pid)
            self._coming.add(worker.rank)
            self._later(RESTARTS.after(before + 1), lambda: self._start_again(worker.rank))
            again = f"; starting it again ({before + 1} of {self._chaos.restarts})"
        else:
            again = ""
        self._say(f"rank {worker.rank} {worker.end}{again}")

    def _start_again(self, rank: int) -> None:
        self._coming.discard(rank)
        if any(worker.is_member for worker in self._job.running()):
            self._job.start(rank)

    def _look_for_strays(self) -> None:
        """End the processes that wait to join, when all members have ended."""
        if self._is_stopping or not self.story.began or not any(e.how == "finished" for e in self.story.endings):
            return
        if not any(worker.is_member for worker in self._job.running()):
            self._is_stopping = True
            self._coming.clear()
            self._later(STRAY_SECONDS, self._stop_all)

    def _stop_all(self) -> None:
        self._is_stopping = True
        self._coming.clear()
        for worker in self._job.running():
            self._job.signal(worker, signal.SIGTERM)
            self._job.signal(worker, signal.SIGCONT)
            self._later(FAILURE_GRACE, lambda worker=worker: self._kill_rest(worker))  # type: ignore[misc]

    def _kill_rest(self, worker: Worker) -> None:
        if worker.is_running:
            self._job.signal(worker, signal.SIGKILL)

    # Faults

    def _try(self, fault: PlannedFault, now: float) -> None:
        """Inject a fault; or postpone it while its target, or enough undisturbed members, are missing."""
        obstacle = self._obstacle(fault)
        late = now - self._began_at - fault.at
        if obstacle and late < HOLD_SECONDS:
            return
        del self._faults[0]
        self._began_at += late  # the pauses between faults stay as they were drawn
        if obstacle:
            self.story.injected.append(Injected(fault, time.time(), None, obstacle))
            self._say(f"{self._clock()} no {fault}: {obstacle}")
        else:
            self._inject(fault)

    def _obstacle(self, fault: PlannedFault) -> str:
        """Return why a fault is not possible now; empty if it is."""
        worker = self._job.workers.get(fault.rank)
        if fault.kind == "join":
            is_there = (worker is not None and worker.is_running) or fault.rank in self._coming
            return f"rank {fault.rank} runs already" if is_there else ""
        calm = {each.rank for each in self._job.running() if each.is_member and each.pid not in self._disturbed}
        for rank in (fault.rank, fault.other):
            if rank >= 0 and rank not in calm:
                return f"rank {rank} is not in the run"
        if fault.kind != "cut" and len(calm) - 1 < self._chaos.min_alive:
            return "too few others are in the run"
        return ""

    def _inject(self, fault: PlannedFault) -> None:
        worker = self._job.workers.get(fault.rank)
        done = Injected(fault, time.time(), worker)
        self.story.injected.append(done)
        if fault.kind == "join":
            done.worker = self._job.start(fault.rank)
        else:
            assert worker is not None
            self._actions[fault.kind](fault, worker, done)
        assert done.worker is not None
        note = f": {done.note}" if done.note else ""
        self._say(f"{self._clock()} {fault} (pid {done.worker.pid}){note}")

    def _clock(self) -> str:
        return f"{time.time() - self.story.began:7.3f} s "

    def _kill(self, fault: PlannedFault, worker: Worker, _: Injected) -> None:
        self._injured[worker.pid] = fault
        worker.is_member = False
        self._job.signal(worker, signal.SIGKILL)

    def _leave(self, fault: PlannedFault, worker: Worker, _: Injected) -> None:
        self._injured[worker.pid] = fault
        self._disturbed.add(worker.pid)
        self._job.signal(worker, signal.SIGTERM)

    def _stop(self, fault: PlannedFault, worker: Worker, _: Injected) -> None:
        self._disturbed.add(worker.pid)
        self._job.signal(worker, signal.SIGSTOP)

        def let_go() -> None:
            self._disturbed.discard(worker.pid)
            if fault.is_loss:
                self._injured[worker.pid] = fault
                worker.is_member = False  # until its events say that it is back
            self._job.signal(worker, signal.SIGCONT)

        self._later(fault.seconds, let_go)

    def _slow(self, fault: PlannedFault, worker: Worker, _: Injected) -> None:
        self._disturbed.add(worker.pid)
        until = time.monotonic() + fault.seconds

        def stop() -> None:
            if worker.is_running and time.monotonic() < until:
                self._job.signal(worker, signal.SIGSTOP)
                self._later(fault.pulse, let_go)
            else:
                self._disturbed.discard(worker.pid)

        def let_go() -> None:
            self._job.signal(worker, signal.SIGCONT)
            self._later(fault.pulse, stop)

        stop()

    def _cut(self, fault: PlannedFault, worker: Worker, done: Injected) -> None:
        count = cut(worker.pid, self._job.workers[fault.other].pid)
        done.note = f"{count} connection{'' if count == 1 else 's'}"
