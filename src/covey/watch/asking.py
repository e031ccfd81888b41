"""What sources share: what was heard in a round, what to ask next of a process, and how answers are read. Pure."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

from covey.base.errors import RemoteProtocolError
from covey.runtime.metrics.inspection import PROGRESS, READINGS, REPORTS
from covey.wire import messages
from covey.wire.progress import NO_EVENTS, decode_progress, decode_readings, decode_reports

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from covey.watch.overview import Applicant
    from covey.wire.messages import Tell
    from covey.wire.progress import RankProgress, Readings, ReportRow

Process = Literal["runs", "stopped", "ended", "unknown"]


@dataclass(frozen=True)
class HeardProcess:
    """One process of a run, as it was heard in this round."""

    key: str
    """Tells processes apart."""
    run: str
    """The name of its run, as people know it."""
    run_key: str
    """Tells runs of one name apart; empty if it is not known."""
    machine: str
    """The id of its machine."""
    pid: int = 0
    version: str = ""
    arrived: float = 0.0
    """When its answer came, on the monotonic clock of the collector."""
    asked: float = 0.0
    """When it was asked: what it has answered is not older."""
    progress: RankProgress | None = None
    """None if it gave no answer, or tells less."""
    tell: Tell | None = None
    """What it said of its run, if it was asked."""
    tells_less: bool = False
    """Whether it answered, and does not know the question: its covey is older."""
    process: Process = "unknown"
    """What the kernel says of it, if it is on this machine."""
    clock_offset: float = 0.0
    """Seconds that the clock of its machine is ahead of this one."""

    @property
    def has_answered(self) -> bool:
        return self.progress is not None or self.tell is not None or self.tells_less


@dataclass(frozen=True)
class MachineHeard:
    """One machine, as it was heard in this round."""

    id: str
    name: str
    host: str = ""
    address: str = ""
    version: str = ""
    is_agent: bool = False
    is_here: bool = False
    problem: str = ""
    cores: int | None = None
    memory: int | None = None
    site: int | None = None
    """Equal for machines that are near each other, as the ranks of a run have measured."""
    accelerators: tuple[str, ...] = ()
    readings: Readings | None = None


@dataclass(frozen=True)
class RunEnd:
    """How a run is known to have ended."""

    fault: str = ""
    """The error with which a group of it failed."""
    outcome: str = ""
    """In words, as its keeper has written it down: `exit code 1: rank 2 was killed by SIGKILL`."""
    has_failed: bool = False


@dataclass(frozen=True)
class LookRound:
    """All that was heard in one round."""

    at: float
    """By the wall clock of this machine."""
    now: float
    """By the monotonic clock."""
    cluster: str = ""
    heard: tuple[HeardProcess, ...] = ()
    machines: tuple[MachineHeard, ...] = ()
    applicants: tuple[Applicant, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes that were refused here, and why."""
    can_approve: bool = False
    approver: str = ""
    reports: Mapping[str, tuple[ReportRow, ...]] = field(default_factory=dict)
    """By run (`HeardProcess.run_key` or `run`): what its program has reported since it began, if that was asked for."""
    stoppable: frozenset[str] = frozenset()
    """Runs, by name, that can be stopped from here."""
    ended: Mapping[str, RunEnd] = field(default_factory=dict)
    """By run key: runs that are known to be over since the last round."""
    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By the ids of two machines: what the link from one to the other can carry, as ranks have measured."""
    others_run: bool = False
    """Whether there are agents, and none of them starts programs for this machine."""


ANSWER_SECONDS: Final = 0.5
"""How long a round waits for answers; processes of other machines may answer later, in a further round."""
CHECKPOINT_ASK_SECONDS: Final = 5.0
RECOVERY_SECONDS: Final = 15.0
"""How long an event of a loss is asked for again, until it says how long the recovery took."""
MOST_ROUNDS_BETWEEN: Final = 16
"""A process that answers without pages is asked in every second round, then every fourth, up to this one."""


class RoundSource(Protocol):
    """Something that can be looked at, once a second."""

    def look(self, wanted: Collection[str]) -> LookRound:
        """Ask every process once; of the runs with these keys also all that their programs have reported."""

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        """Ask a run for a checkpoint; CoveyError if none of its processes answers."""

    def close(self) -> None:
        """Ask no more."""


class EventNumbers:
    """How many events of each run are known, and which processes are asked for further ones.

    Of each run the lowest and the highest rank that answer are asked: the other one tells at once that one was lost.
    """

    def __init__(self) -> None:
        self._tellers: dict[str, tuple[str, ...]] = {}
        """By run: the processes that are asked."""
        self._next: dict[str, int] = {}
        """By process."""

    def page(self, run_key: str, key: str) -> int:
        """Return the page of the question to a process."""
        return self._next.get(key, 0) if key in self._tellers.get(run_key, ()) else NO_EVENTS

    def told(self, run_key: str, answers: dict[str, RankProgress], now: float) -> None:
        """Note what processes of a run have told, and choose which of them tell in the next round."""
        if not answers:
            return
        kept = [key for key in self._tellers.get(run_key, ()) if key in answers]
        for key in kept:
            progress = answers[key]
            waiting = [
                at
                for at, event in enumerate(progress.events)
                if event.kind in ("lost", "left", "view")
                and "redo" not in event.phases
                and now - event.time < RECOVERY_SECONDS
            ]
            again = len(progress.events) - waiting[0] if waiting else 0
            self._next[key] = max(0, progress.next_event - again)
        by_rank = sorted(answers, key=lambda key: (answers[key].rank, key))
        self._tellers[run_key] = tuple(dict.fromkeys([*kept, by_rank[0], by_rank[-1]]))[:2]

    def forget(self, keys: Collection[str]) -> None:
        """Forget all processes but these."""
        self._next = {key: number for key, number in self._next.items() if key in keys}
        self._tellers = {run: told for run, told in self._tellers.items() if any(key in keys for key in told)}


class Pauses:
    """Asks processes less often that answer without pages: they are asked too often, or do not know the question."""

    def __init__(self) -> None:
        self._pauses: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def is_due(self, key: str) -> bool:
        """Tell whether to ask a process in this round."""
        left = self._left.get(key, 0)
        self._left[key] = max(0, left - 1)
        return left == 0

    def answered(self, key: str, *, has_pages: bool) -> None:
        """Note an answer."""
        if has_pages:
            self._pauses.pop(key, None)
            self._left.pop(key, None)
        else:
            pause = self._pauses[key] = min(MOST_ROUNDS_BETWEEN, 2 * self._pauses.get(key, 1))
            self._left[key] = pause - 1

    def forget(self, keys: Collection[str]) -> None:
        """Forget all processes but these."""
        self._pauses = {key: pause for key, pause in self._pauses.items() if key in keys}
        self._left = {key: left for key, left in self._left.items() if key in keys}


def has_pages(answer: object) -> bool:
    """Tell whether an answer to a question has pages."""
    return isinstance(answer, messages.Inspected) and answer.pages > 0


def read_progress(answer: object) -> RankProgress | None:
    """Return what a process has told; None if it told nothing that can be read."""
    if isinstance(answer, messages.Inspected) and answer.what == PROGRESS and answer.pages and answer.body:
        with contextlib.suppress(RemoteProtocolError):
            return decode_progress(answer.body)
    return None


def read_reports(answer: object) -> tuple[ReportRow, ...] | None:
    """Return the reports that a process has told; None if it told nothing that can be read."""
    if isinstance(answer, messages.Inspected) and answer.what == REPORTS and answer.pages:
        with contextlib.suppress(RemoteProtocolError):
            return decode_reports(answer.body).rows
    return None


def read_readings(answer: object) -> Readings | None:
    """Return how a machine is used; None if nothing was told that can be read."""
    if isinstance(answer, messages.Inspected) and answer.what == READINGS and answer.pages:
        with contextlib.suppress(RemoteProtocolError):
            return decode_readings(answer.body)
    return None


def request_of_checkpoint() -> messages.RequestCheckpoint:
    """Return a request with an id of its own."""
    import secrets

    return messages.RequestCheckpoint(secrets.token_hex(8), "")
