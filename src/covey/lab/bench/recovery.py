"""`covey bench recovery`: kills ranks during an all_reduce, and measures how soon the others finish it.

The time runs from the kill until the same operation has returned on every survivor, by one clock. The job's own events
say how long each phase took. Every result is checked bit for bit, and the victim is restarted before the next kill.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, DeadlineError, RankFailedError
from covey.cli.layout import Column
from covey.cli.terminal import FittedTable
from covey.lab import ONE_THREAD
from covey.lab.bench.recovery_worker import SCALES, VALUES_PERIOD, Begins, Returns, decode
from covey.lab.bench.sweep import MAX_RANKS, MEASURED_LANES, format_bytes
from covey.lab.chaos.processes import JobProcesses
from covey.runtime.processes import OutputTail

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from covey.lab.chaos.processes import JobProcess, Told

TIMED_PHASES: Final = ("detect", "freeze", "agree", "reconnect", "redo")
STEP_SECONDS: Final = 60.0
"""How long each step of the drill may take."""
WARM_UP_OPERATIONS: Final = 3
"""Operations that all ranks return together before one is killed."""
HISTOGRAM_ROWS: Final = 8
HISTOGRAM_WIDTH: Final = 40


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What is measured; checked when built."""

    size: int = 3
    kills: int = 20
    lanes: str = "shm"
    nbytes: int = 64 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_RANKS:
            raise ConfigError(f"-n must be from 2 to {MAX_RANKS}, not {self.size}")
        if self.lanes not in MEASURED_LANES:
            raise ConfigError(f"unknown lane {self.lanes!r}; choose from {', '.join(MEASURED_LANES)}")
        if self.kills < 1:
            raise ConfigError(f"at least one kill is needed, not {self.kills}")
        assert SCALES * VALUES_PERIOD * MAX_RANKS * (MAX_RANKS + 1) // 2 < 1 << 24

    @property
    def elements(self) -> int:
        return max(1, self.nbytes // 4)


@dataclass(frozen=True)
class Kill:
    """One kill and the recovery from it."""

    victim: int
    survivors: int
    in_operation: bool
    """Whether the kill hit the operation that all survivors were in, so that they finished it without the victim. If
    not, the victim had contributed to that operation, and was missing in the next."""
    total_ms: float
    """From the kill until that operation had returned on all survivors."""
    phases_ms: dict[str, float]
    """How long each phase took on the survivor that was ready last, by its own events."""
    is_right: bool
    """Whether all survivors have the exact sum of the contributors that they report, and report the same ones."""


def measure(drill: Drill) -> Generator[Kill, None, None]:
    """Yield a recovery for every kill. Close the generator to end the ranks early.

    Raises:
        RankFailedError: a rank that was not killed ended; the message ends with its last output.
        DeadlineError: the ranks did not work together, or did not recover, in time.
    """
    reports = _WorkerReports()
    argv = [sys.executable, "-m", "covey.lab.bench.recovery_worker", f"--elements={drill.elements}"]
    env = {**ONE_THREAD, "COVEY_LANES": drill.lanes}
    draw = random.Random(f"covey bench recovery {drill.seed}")
    with JobProcesses(drill.size, argv, reports, env=env) as job:
        try:
            job.start_all()
            scene = _Scene(job, reports)
            for _ in range(drill.kills):
                victim, moment = draw.randrange(drill.size), draw.uniform(0.1, 0.9)
                yield scene.kill(victim, moment)
                job.start(victim)
        finally:
            job.run.children.signal(signal.SIGKILL)  # an orderly end would save nothing


class _WorkerReports:
    """Decodes the reports of the workers."""

    def __init__(self) -> None:
        self.begun: dict[int, Begins] = {}
        """By process: the latest."""
        self.returned: dict[int, list[Returns]] = {}
        self.errors: dict[int, OutputTail] = {}
        self._lines: dict[int, bytes] = {}

    def heard(self, worker: JobProcess, target: int, data: bytes) -> None:
        pid = worker.pid
        if target == 2:
            self.errors.setdefault(pid, OutputTail()).add(data)
            return
        *lines, self._lines[pid] = (self._lines.get(pid, b"") + data).split(b"\n")
        for report in map(decode, lines):
            if isinstance(report, Begins):
                self.begun[pid] = report
            else:
                self.returned.setdefault(pid, []).append(report)
                del self.returned[pid][:-100]

    def tick(self, now: float) -> float:
        return math.inf


@dataclass
class _Scene:
    """The running ranks, and one kill after another."""

    job: JobProcesses
    reports: _WorkerReports
    told: list[Told] = field(default_factory=list)

    def kill(self, victim: int, moment: float) -> Kill:
        """Kill a rank at `moment` (0 to 1) of an operation, and wait until the others have recovered."""
        self._await("all ranks work together", self._is_steady)
        workers = self.job.running()
        target = self.job.workers[victim]
        pids = [worker.pid for worker in workers]
        length = statistics.median(self._lengths(target.pid))
        steps = [self.reports.begun[pid].step for pid in pids]
        self._await("the next operation begins", lambda: min(self.reports.begun[pid].step for pid in pids) > max(steps))
        begun = {pid: self.reports.begun[pid] for pid in pids}
        time.sleep(max(0.0, max(each.at for each in begun.values()) + moment * length - time.monotonic()))
        self.told.clear()
        killed_at, wall = time.monotonic(), time.time()
        target.signal(signal.SIGKILL)
        rank, generation = begun[target.pid].rank, begun[target.pid].generation
        survivors = [pid for pid in pids if pid != target.pid]
        found: dict[int, Returns] = {}

        def is_over() -> bool:
            for pid in survivors:
                without = (
                    each
                    for each in self.reports.returned.get(pid, ())
                    if each.generation == generation and rank not in each.contributors
                )
                if pid not in found and (first := next(without, None)) is not None:
                    found[pid] = first
            return len(found) == len(survivors) and len({event.pid for event in self._views()}) == len(survivors)

        self._await("the survivors continue", is_over, may_end=target)
        results = list(found.values())
        return Kill(
            victim,
            len(survivors),
            all(begun[pid].step == found[pid].step for pid in survivors),
            1e3 * (max(result.at for result in results) - killed_at),
            self._phases(wall),
            all(result.is_right for result in results) and len({(r.step, r.contributors) for r in results}) == 1,
        )

    def _views(self) -> list[Told]:
        return [event for event in self.told if event.kind == "lost"]

    def _phases(self, killed: float) -> dict[str, float]:
        """Return how long each phase took on the rank that was ready last."""
        slowest = max(self._views(), key=lambda event: event.ended)
        ends = {"detect": slowest.began} | {
            name: slowest.began + slowest.phases[name] / 1e3 for name in TIMED_PHASES[1:] if name in slowest.phases
        }
        found, before = {}, killed
        for name, end in ends.items():
            found[name] = round(1e3 * (end - before), 3)
            before = end
        return found

    def _is_steady(self) -> bool:
        running = self.job.running()
        if len(running) < self.job.size or any(worker.pid not in self.reports.begun for worker in running):
            return False
        begun = [self.reports.begun[worker.pid] for worker in running]
        if len({each.generation for each in begun}) > 1 or begun[0].size < self.job.size:
            return False
        return all(len(self._lengths(worker.pid)) >= WARM_UP_OPERATIONS for worker in running)

    def _lengths(self, pid: int) -> list[float]:
        """Return how long the operations of the current generation took."""
        generation = self.reports.begun[pid].generation
        return [each.at - each.began for each in self.reports.returned.get(pid, ()) if each.generation == generation]

    def _await(self, what: str, is_so: Callable[[], bool], may_end: JobProcess | None = None) -> None:
        give_up_at = time.monotonic() + STEP_SECONDS
        while not is_so():
            turn = self.job.turn(give_up_at)
            self.told += [event for _, event in turn.told]
            for worker in turn.ended:
                if worker is not may_end:
                    errors = self.reports.errors.get(worker.pid, OutputTail())
                    raise RankFailedError(
                        f"rank {worker.rank} {worker.end}{errors.quote()}",
                        rank=worker.rank,
                        exit_code=worker.code,
                    )
            if time.monotonic() > give_up_at:
                raise DeadlineError(f"the timeout of {STEP_SECONDS:.0f} s ended before {what}")


def summary(kills: Sequence[Kill]) -> dict[str, dict[str, float]]:
    """Return the median, 95th percentile and maximum of the total and of each phase, in milliseconds."""
    rows = {"total": [kill.total_ms for kill in kills]}
    rows |= {name: [kill.phases_ms[name] for kill in kills if name in kill.phases_ms] for name in TIMED_PHASES}
    return {
        name: {
            "p50": round(statistics.median(values), 3),
            "p95": round(sorted(values)[max(0, -(-95 * len(values) // 100) - 1)], 3),
            "max": round(max(values), 3),
        }
        for name, values in rows.items()
        if values
    }


def as_json(drill: Drill, kills: Sequence[Kill], facts: dict[str, Any]) -> dict[str, Any]:
    """Return all results as JSON data."""
    return {
        "machine": facts,
        "drill": asdict(drill),
        "kills": [asdict(kill) for kill in kills],
        "summary_ms": summary(kills),
        "all_right": all(kill.is_right for kill in kills),
    }


def headline(drill: Drill, kills: Sequence[Kill]) -> str:
    """Return one line that says what was measured."""
    inside = sum(kill.in_operation for kill in kills)
    size = format_bytes(drill.nbytes)
    return f"all_reduce of {size}, {drill.size} ranks, {drill.lanes}: {len(kills)} kills, {inside} in mid-operation"


def table(kills: Sequence[Kill]) -> FittedTable:
    """Return the distribution as a table."""
    rows = summary(kills)
    numbers = [
        Column(title, [(f"{row[title]:.1f}", "bold" * (name == "total")) for name, row in rows.items()], is_right=True)
        for title in ("p50", "p95", "max")
    ]
    return FittedTable([Column("ms", [(name, "bold" * (name == "total")) for name in rows]), *numbers])


def histogram(values: Sequence[float]) -> list[str]:
    """Return a histogram of the values, one line for each range."""
    low, high = min(values), max(values)
    width = (high - low) / HISTOGRAM_ROWS or 1.0
    counts = [0] * HISTOGRAM_ROWS
    for value in values:
        counts[min(HISTOGRAM_ROWS - 1, int((value - low) / width))] += 1
    tallest = max(counts)
    return [
        f"{low + row * width:8.1f} ms  {'#' * -(-count * HISTOGRAM_WIDTH // tallest)}{f' {count}' if count else ''}"
        for row, count in enumerate(counts)
    ]
