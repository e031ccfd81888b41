"""Runs of this machine as a source: links with their ranks, kept from round to round.

The token in the folder of a run proves that this process may ask. On the collector's thread. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.net.host.runs import local_runs
from covey.net.host.saved_runs import past_runs
from covey.proto.health import ProcessState
from covey.runtime.metrics.flight import fault_of
from covey.runtime.metrics.inspection import PROGRESS, REPORTS
from covey.runtime.peers.local_visit import LocalVisit
from covey.runtime.views.process_table import ProcessStatus
from covey.watch.asking import (
    ANSWER_SECONDS,
    CHECKPOINT_ASK_SECONDS,
    EventNumbers,
    HeardProcess,
    LookRound,
    MachineHeard,
    Pauses,
    RunEnd,
    has_pages,
    read_progress,
    read_reports,
    request_of_checkpoint,
)
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from covey.net.host.runs import LocalRunFound
    from covey.watch.asking import Process
    from covey.wire.progress import RankProgress, Readings, ReportRow

ROUND_LINK_SECONDS: Final = 0.3
"""How long a rank may take to accept a link, in one round."""
LOCAL_ID: Final = "here"
"""The id of this machine where it is in no cluster."""


class LocalSource:
    """The runs of `covey run -n` of this user, on this machine."""

    def __init__(
        self, readings: Callable[[], Readings], *, machine: str = LOCAL_ID, name: str = "", only: str = ""
    ) -> None:
        """`readings` reads how this machine is used. `only` is the one run to look at, by name or process."""
        self._readings, self._machine, self._name, self._only = readings, machine, name, only
        self._visits: dict[int, LocalVisit] = {}
        """By the process of the keeper."""
        self._keys: dict[int, str] = {}
        """By the process of the keeper: the runs of the last round."""
        self._events = EventNumbers()
        self._pauses = Pauses()
        self._processes: dict[str, ProcessStatus] = {}
        self._told: dict[str, HeardProcess] = {}
        """By key: what each process said last."""
        self._lock = threading.Lock()
        """One question at a time."""

    def look(self, wanted: Collection[str]) -> LookRound:
        at, now = time.time(), time.monotonic()
        runs = [run for run in local_runs() if not self._only or self._only in (run.name, str(run.pid))]
        with self._lock:
            over = {pid: key for pid, key in self._keys.items() if pid not in {run.pid for run in runs}}
            ended = {key: self._end_of(key, pid) for pid, key in over.items()}
            self._keys = {run.pid: _key(run) for run in runs}
            for pid in over.keys() & self._visits.keys():
                self._visits.pop(pid).leave()
            heard = [each for run in runs for each in self._ask(run)]
            reports = {
                key: rows for run in runs if (key := _key(run)) in wanted and (rows := self._reports(run)) is not None
            }
        keys = {each.key for each in heard}
        self._events.forget(keys)
        self._pauses.forget(keys)
        self._told = {key: each for key, each in self._told.items() if key in keys}
        self._processes = {key: each for key, each in self._processes.items() if key in keys}
        here = MachineHeard(self._machine, self._name, is_here=True, readings=self._readings())
        names = frozenset(run.name for run in runs)
        return LookRound(at, now, "", tuple(heard), (here,), reports=reports, stoppable=names, ended=ended)

    def _ask(self, run: LocalRunFound) -> Iterable[HeardProcess]:
        visit = self._visits.get(run.pid)
        try:
            if visit is None:
                visit = self._visits[run.pid] = LocalVisit(run, run.token())
            if len(visit.ranks) < run.size:
                visit.link(ROUND_LINK_SECONDS)
        except CoveyError:  # it has just ended
            return []
        run_key = _key(run)
        keys = {rank: f"{run_key}:{rank}" for rank in range(run.size)}
        due = {rank: key for rank, key in keys.items() if rank in visit.ranks and self._pauses.is_due(key)}
        questions = {rank: messages.Inspect(PROGRESS, self._events.page(run_key, key)) for rank, key in due.items()}
        asked = time.monotonic()
        answers = visit.ask_each(questions, ANSWER_SECONDS)
        times = asked, time.monotonic()
        told: dict[str, RankProgress] = {}
        for rank, answer in answers.items():
            if answer is not None:
                self._pauses.answered(keys[rank], has_pages=has_pages(answer))
            if (progress := read_progress(answer)) is not None:
                told[keys[rank]] = progress
        self._events.told(run_key, told, time.time())
        return [self._heard(run, keys[rank], answers.get(rank), told.get(keys[rank]), times) for rank in keys]

    def _heard(
        self, run: LocalRunFound, key: str, answer: object, progress: RankProgress | None, times: tuple[float, float]
    ) -> HeardProcess:
        asked, arrived = times
        before = self._told.get(key)
        pid = progress.pid if progress is not None else before.pid if before is not None else 0
        heard = HeardProcess(
            key=key,
            run=printable(run.name, 100),
            run_key=_key(run),
            machine=self._machine,
            pid=pid,
            version="" if progress is None else progress.version,
            arrived=arrived,
            asked=asked,
            progress=progress,
            tells_less=isinstance(answer, messages.Inspected) and not answer.pages,
            process=self._kernel(key, pid),
        )
        if progress is not None:
            self._told[key] = heard
        return heard

    def _kernel(self, key: str, pid: int) -> Process:
        if not pid:
            return "unknown"
        status, now = self._processes.get(key), time.monotonic()
        if status is None or status.pid != pid:
            status = self._processes[key] = ProcessStatus(b"", pid, now)
        status.look(now)
        kernel: dict[ProcessState, Process] = {ProcessState.STOPPED: "stopped", ProcessState.EXITED: "ended"}
        return kernel.get(status.state, "runs")

    def _end_of(self, run_key: str, keeper: int) -> RunEnd:
        """Return how a run has ended, as its ranks and its keeper have written it down."""
        told = [each for each in self._told.values() if each.run_key == run_key]
        began = min((each.progress.began for each in told if each.progress is not None), default=0.0)
        fault = fault_of({each.pid for each in told}, began)
        with contextlib.suppress(ConfigError):
            for past in reversed(past_runs()):
                if past.record.pid == keeper and not past.record.cluster:
                    return RunEnd(fault, past.outcome(), has_failed=past.has_failed)
        return RunEnd(fault, has_failed=bool(fault))

    def _reports(self, run: LocalRunFound) -> tuple[ReportRow, ...] | None:
        visit = self._visits.get(run.pid)
        reporting = [
            each.progress.rank
            for key, each in self._told.items()
            if each.run_key == _key(run) and each.progress is not None and each.progress.reported
        ]
        if visit is None or not reporting:
            return None
        answers = visit.ask(messages.Inspect(REPORTS), ANSWER_SECONDS)
        found = [rows for _, answer in sorted(answers.items()) if (rows := read_reports(answer))]
        return found[0] if found else None

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        with self._lock:
            run = next((run for run in local_runs() if _key(run) == run_key), None)
            visit = None if run is None else self._visits.get(run.pid)
            answer = None if visit is None else visit.ask_one(request_of_checkpoint(), CHECKPOINT_ASK_SECONDS)
        if answer is None:
            raise DeadlineError(f"no rank of the run answered within the timeout of {CHECKPOINT_ASK_SECONDS:g} s")
        return answer

    def keeper_of(self, run_key: str) -> int:
        """Return the process of the keeper of a run that goes on; ConfigError if it is over."""
        for run in local_runs():
            if _key(run) == run_key:
                return run.pid
        raise ConfigError("the run is over")

    def close(self) -> None:
        with self._lock:
            for visit in self._visits.values():
                with contextlib.suppress(CoveyError, TimeoutError):
                    visit.leave()
            self._visits.clear()


def _key(run: LocalRunFound) -> str:
    return f"{run.name}:{run.pid}"
