"""The demo's processes: starts one worker for each node, kills one of them, and restarts those that a signal ended.

Reports are yielded as they arrive: those of the nodes, and those about starts and kills.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from covey.base.errors import DeadlineError, RankFailedError
from covey.lab import ONE_THREAD
from covey.lab.demo.reports import (
    ROUND,
    FinishedReport,
    JoinedReport,
    KilledReport,
    Report,
    RoundReport,
    StartedReport,
    Told,
    decode,
)
from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.processes import OutputTail, signal_name

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from covey.runtime.processes import Child

SILENCE_SECONDS = 60.0
"""Seconds without a report from any node after which the demo fails. Nodes report many times a second."""
KILL_SHARE = 0.4
"""The share of the steps, or of the time, after which a node is killed."""
ABSENCE = 0.5
"""Seconds before a killed node is started again: long enough to see that the others continue."""
RESTARTS_LIMIT = 5
"""How often a node is restarted."""


class DemoRun(NamedTuple):
    """One training run of the demo."""

    nodes: int
    lots: int
    """Batches in a step of all nodes together; each node takes its share."""
    rounds: int
    seconds: float
    """The run stops at the end of the round in which this time passes."""
    seed: int
    victim: int | None = None
    """The node that is killed during the run."""
    compress: str = ""
    """How gradients are compressed; empty: not at all."""

    def command(self, node: int) -> list[str]:
        """Return the command of a node."""
        lots = ",".join(str(lot) for lot in range(self.lots) if lot % self.nodes == node)
        arguments = [f"--lots={lots}", f"--nodes={self.nodes}", f"--changes={int(self.victim is not None)}"]
        arguments += [f"--rounds={self.rounds}", f"--seconds={self.seconds}", f"--seed={self.seed}"]
        arguments += [f"--compress={self.compress}"] if self.compress else []
        return [sys.executable, "-m", "covey.lab.demo.worker", *arguments]


def reports(plan: DemoRun) -> Generator[tuple[int, Report], None, None]:
    """Start the nodes and yield (node, report) until all have finished and exited.

    A node that a signal ends while others train is restarted. Close the generator (`contextlib.closing`) to end the
    nodes early.

    Raises:
        RankFailedError: a node ended early and is not restarted; the message ends with its last output.
        DeadlineError: no node reported anything for SILENCE seconds.
    """
    with LocalRun(plan.nodes, name="demo") as run:
        yield from _Nodes(plan, run).reports()


class _Nodes:
    """The node processes of one run, until the last one has ended."""

    def __init__(self, plan: DemoRun, run: LocalRun) -> None:
        self._plan, self._run = plan, run
        self._workers: dict[int, _Worker] = {}
        """Node → its latest process."""
        self._restarts = dict.fromkeys(range(plan.nodes), 0)
        self._due: dict[int, float] = {}
        """Nodes that are restarted, and when."""
        self._has_killed = plan.victim is None
        self._joined_at: float | None = None

    def reports(self) -> Iterator[tuple[int, Report]]:
        for node in range(self._plan.nodes):
            yield self._start(node)
        give_up_at = time.monotonic() + SILENCE_SECONDS
        while self._due or any(worker.is_running for worker in self._workers.values()):
            now = time.monotonic()
            printed = self._run.children.outputs(max(0.0, min([give_up_at, *self._due.values()]) - now))
            ended = self._run.children.ended()
            if not printed and not ended and now >= give_up_at:
                missing = tuple(node for node, worker in self._workers.items() if worker.is_running)
                raise DeadlineError(
                    f"no report from nodes {missing} within the timeout of {SILENCE_SECONDS:.0f} s", late=missing
                )
            rest = [each for child in ended for each in self._run.children.rest_of(child)]
            for each in (*printed, *rest):
                worker = self._workers[each.child.name]
                for report in worker.read(each.target, each.data):
                    give_up_at = time.monotonic() + SILENCE_SECONDS
                    yield worker.node, report
                    if self._is_time_to_kill(report):
                        yield self._kill()
            yield from self._handle_ended([self._workers[child.name] for child in ended])
            for node in [node for node, at in self._due.items() if at <= time.monotonic()]:
                del self._due[node]
                yield self._start(node)

    def _start(self, node: int) -> tuple[int, StartedReport]:
        restarts = self._restarts[node]
        env = {**ONE_THREAD, "COVEY_RESTART": str(restarts)} if restarts else ONE_THREAD
        child = self._run.start(node, self._plan.command(node), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._workers[node] = _Worker(node, child)
        return node, StartedReport(child.pid)

    def _is_time_to_kill(self, report: Told) -> bool:
        now = time.monotonic()
        if isinstance(report, JoinedReport):
            self._joined_at = self._joined_at or now
        if self._has_killed or self._joined_at is None or not isinstance(report, RoundReport):
            return False
        is_far = report.step >= KILL_SHARE * self._plan.rounds * ROUND
        return is_far or now - self._joined_at >= KILL_SHARE * self._plan.seconds

    def _kill(self) -> tuple[int, KilledReport]:
        assert self._plan.victim is not None
        self._has_killed = True
        worker = self._workers[self._plan.victim]
        worker.is_known_dead = True
        worker.child.signal(signal.SIGKILL)
        return worker.node, KilledReport("SIGKILL")

    def _handle_ended(self, ended: list[_Worker]) -> Iterator[tuple[int, Report]]:
        """Restart nodes that a signal ended; raise the error of a failed node."""
        failures = []
        for worker in ended:
            if (failure := worker.failure()) is None:
                continue
            if (failure.exit_code or 0) < 0 and self._can_come_back(worker):
                if not worker.is_known_dead:
                    yield worker.node, KilledReport(signal_name(-(failure.exit_code or 0)))
                self._run.children.forget(worker.child)
                self._restarts[worker.node] += 1
                self._due[worker.node] = time.monotonic() + ABSENCE
            else:
                failures.append(failure)
        # One failure may cause others; of those seen together, a node that was killed is the likely first cause.
        if failures:
            raise min(failures, key=lambda failure: failure.exit_code or 0)

    def _can_come_back(self, worker: _Worker) -> bool:
        others = any(other.is_running and not other.is_finished for other in self._workers.values())
        return others and self._restarts[worker.node] < RESTARTS_LIMIT and bool(self._run.survives())


class _Worker:
    """One node's process, and its output so far."""

    def __init__(self, node: int, child: Child) -> None:
        self.node, self.child = node, child
        self.is_finished = False
        self.is_known_dead = False
        """Whether a report has said that the process was killed."""
        self._line = b""
        self._errors = OutputTail()

    @property
    def is_running(self) -> bool:
        return self.child.code is None

    def read(self, target: int, data: bytes) -> list[Told]:
        """Take what the process has written, and return the reports that are now complete."""
        if target == 2:
            self._errors.add(data)
            return []
        *lines, self._line = (self._line + data).split(b"\n")
        whole = [decode(line) for line in lines]
        self.is_finished = self.is_finished or any(isinstance(report, FinishedReport) for report in whole)
        return whole

    def failure(self) -> RankFailedError | None:
        """Return the error of a node that ended without its last report, or with an exit code other than 0."""
        code = self.child.code or 0
        if code == 0 and self.is_finished:
            return None
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        message = f"node {self.node} {how} before it was done{self._errors.quote()}"
        return RankFailedError(message, rank=self.node, exit_code=code)
