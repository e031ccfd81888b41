"""Runs a command of the user under chaos, from its first process to its last, and passes its output to the terminal."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from covey.lab.chaos.faults import LOSSES, pick, plan
from covey.lab.chaos.injector import Injector
from covey.lab.chaos.report import ChaosStory, ProcessEnding
from covey.runtime.keeper.keeper import RANK_FAILURE_GRACE, RESTARTS
from covey.runtime.keeper.output import Cursor, OutputStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.lab.chaos.faults import ChaosTerms, PlannedFault
    from covey.lab.chaos.injector import Action, Victim
    from covey.lab.chaos.processes import JobProcess, JobProcesses, Told

STRAY_SECONDS: Final = 1.0
"""How long processes that wait to join may live after the last member has ended."""


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


class _CommandInjector(Injector):
    """Also starts processes: those that join."""

    def __init__(self, run: CommandRun, job: JobProcesses, terms: ChaosTerms, say: Callable[[str], None]) -> None:
        super().__init__(run, plan(terms), say, min_alive=terms.min_alive)
        self.coming: set[int] = set()
        """Ranks whose process is about to be restarted."""
        self._processes, self._most = job, terms.most

    def actions(self) -> dict[str, Action]:
        return super().actions() | {"join": self._join}

    def obstacle(self, fault: PlannedFault, count: int) -> str:
        if fault.kind == "join" and not self._gone() and len(self._processes.workers) >= self._most:
            return "all processes run"
        return super().obstacle(fault, count)

    def _join(self, fault: PlannedFault, _members: list[Victim]) -> str:
        """Start a process in the place of one that has ended, or one more."""
        rank = pick(self._gone() or [len(self._processes.workers)], fault.target)[0]
        worker = self._processes.start(rank)
        self.targets = (worker,)
        return f"started {worker.title}"

    def _gone(self) -> list[int]:
        """Return the ranks whose process has ended and is not about to be restarted."""
        workers = sorted(self._processes.workers.items())
        return [rank for rank, worker in workers if not worker.is_running and rank not in self.coming]


class CommandRun:
    """Takes the processes of a command through a plan of faults."""

    def __init__(self, job: JobProcesses, terms: ChaosTerms, say: Callable[[str], None], timeout: float | None) -> None:
        self.story = ChaosStory(terms)
        self._job, self._terms, self._say = job, terms, say
        self._injector = _CommandInjector(self, job, terms, say)
        self.story.injected, self.story.log = self._injector.injected, self._injector.log
        self._give_up_at = float("inf") if timeout is None else time.monotonic() + timeout
        self._injured: dict[int, PlannedFault] = {}
        """Pid → the fault that the process was lost to."""
        self._restarts: dict[int, int] = {}
        self._is_stopping = False

    def perform(self) -> ChaosStory:
        """Run the job to its end and return what happened. After Ctrl-C, `story` has what happened until then."""
        self._job.start_all()
        while self._job.running() or self._injector.coming:
            turn = self._job.turn(min(self._give_up_at, self._injector.next_at))
            for worker, told in turn.told:
                self._hear(worker, told)
            for worker in turn.ended:
                self._on_end(worker)
            self._look_for_strays()
            now = time.monotonic()
            self._injector.turn(now)
            if now >= self._give_up_at:
                self.story.is_out_of_time = True
                self._say("the job did not end in time; stopping it")
                break
        self.story.ended = time.time()
        return self.story

    # What the injector asks and tells

    def members(self) -> list[JobProcess]:
        return [worker for worker in self._job.running() if worker.is_member]

    def on_fault(self, fault: PlannedFault, target: Victim) -> None:
        worker = self._job.workers[target.rank]
        if fault.kind in ("kill", "leave"):
            self._injured[worker.pid] = fault
        worker.is_member = worker.is_member and fault.kind != "kill"

    def on_release(self, fault: PlannedFault, target: Victim) -> None:
        if fault.kind in LOSSES:
            self._injured[target.pid] = fault
            self._job.workers[target.rank].is_member = False  # until its events say that it is back

    # What the job does

    def _hear(self, worker: JobProcess | None, told: Told) -> None:
        self.story.told.append(told)
        if not self.story.began and told.kind in ("generation", "joined"):
            self.story.began = told.time
            self._injector.begin(told.time)
        if worker is not None and told.kind in ("generation", "joined"):
            self._injured.pop(worker.pid, None)  # it is back

    def _on_end(self, worker: JobProcess) -> None:
        story = self.story
        fault = self._injured.get(worker.pid)
        self._injector.calm(worker)
        how = "lost" if fault is not None else "failed"
        if worker.code == 0:
            how = "left" if fault is not None and fault.kind == "leave" else "finished"
        elif self._is_stopping:
            how = "stray"
        ending = ProcessEnding(worker.rank, worker.pid, how, time.time(), worker.code, worker.end)
        story.endings.append(ending)
        story.survives = story.survives or bool(self._job.run.survives())
        if worker.code == 0 or self._is_stopping:
            return
        if not story.survives:
            self._injector.drop_faults()  # a failed job gets no more faults
            if self._job.running():
                self._say(f"rank {worker.rank} {worker.end}; stopping the others")
                self._injector.later(RANK_FAILURE_GRACE, self._stop_all)
            return
        before = self._restarts.get(worker.rank, 0)
        again = ""
        if before < self._terms.restarts and self.members():
            self._restarts[worker.rank] = before + 1
            ending.is_forgiven = True
            self._injector.coming.add(worker.rank)
            self._injector.later(RESTARTS.after(before + 1), lambda: self._start_again(worker.rank))
            again = f"; starting it again ({before + 1} of {self._terms.restarts})"
        self._say(f"rank {worker.rank} {worker.end}{again}")

    def _start_again(self, rank: int) -> None:
        self._injector.coming.discard(rank)
        if self.members():
            self._job.start(rank)

    def _look_for_strays(self) -> None:
        """End the processes that wait to join, when all members have ended."""
        if self._is_stopping or not self.story.began or not any(e.how == "finished" for e in self.story.endings):
            return
        if not self.members():
            self._is_stopping = True
            self._injector.drop_faults()
            self._injector.coming.clear()
            self._injector.later(STRAY_SECONDS, self._stop_all)

    def _stop_all(self) -> None:
        self._is_stopping = True
        self._injector.drop_faults()
        self._injector.coming.clear()
        for worker in self._job.running():
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)
            self._injector.later(RANK_FAILURE_GRACE, lambda worker=worker: self._kill_rest(worker))  # type: ignore[misc]

    def _kill_rest(self, worker: JobProcess) -> None:
        if worker.is_running:
            worker.signal(signal.SIGKILL)
