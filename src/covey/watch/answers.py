"""What a collector has heard in one round: plain values, from which overviews are made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

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
