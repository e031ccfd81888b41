"""What is known of machines and runs at one moment, as plain values for views. Pure.

Every figure that is not known is None, never 0. Texts come from other machines: they are printable
(`base.text.printable`), and a view escapes them for its medium. Times are seconds; `at` and `taken` are wall-clock
times of this machine, ages are seconds before `Overview.taken`. Order is stable: machines by name, runs by name, ranks
by number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Level = Literal["fine", "note", "warning", "error"]
RankState = Literal["active", "waiting", "late", "stopped", "silent", "lost", "left", "joining"]
"""`active`: computes or communicates. `waiting`: is in an operation that another rank has not entered. `late`: others
wait for it. `stopped`: its process is stopped (SIGSTOP). `silent`: it does not answer. `lost` and `left`: it is no
longer in the run. `joining`: it waits for the run."""
RunState = Literal["waiting", "running", "ended", "failed"]


@dataclass(frozen=True)
class Sentence:
    """The one sentence that says what is wrong, or that nothing is."""

    text: str
    level: Level = "fine"
    why: tuple[str, ...] = ()
    """What it was concluded from, a line each."""
    commands: tuple[str, ...] = ()
    """What to type next."""


@dataclass(frozen=True)
class GpuSeen:
    """One GPU, as its driver describes it."""

    name: str
    busy: float | None = None
    """The share of time in which it computed, 0 to 1."""
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    """Degrees Celsius."""


@dataclass(frozen=True)
class MachineSeen:
    """One machine of the cluster, or this one."""

    id: str
    """The full id of its node key, or "here" for this machine outside of a cluster."""
    name: str
    host: str = ""
    address: str = ""
    version: str = ""
    site: str = ""
    state: Literal["ready", "running", "silent", "refused"] = "ready"
    problem: str = ""
    """Why it is silent or refused, with the remedy."""
    is_here: bool = False
    cores: int | None = None
    processor: float | None = None
    """The share of its cores in use, 0 to 1."""
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    gpus: tuple[GpuSeen, ...] = ()
    age: float = 0.0
    """How old these figures are."""


@dataclass(frozen=True)
class LinkSeen:
    """How one machine sends to another. A pair of machines has two: one for each direction."""

    source: str
    target: str
    """Ids of machines."""
    lane: str = ""
    interface: str = ""
    medium: str = ""
    """`cable`, `Wi-Fi`, `loopback`, or empty if it is not known."""
    relay: str = ""
    bytes_per_second: float | None = None
    """What it can carry, as measured."""
    sent_per_second: float | None = None
    """What it carries now."""
    round_trip: float | None = None


@dataclass(frozen=True)
class RankSeen:
    """One rank of a run."""

    rank: int
    """-1 for a process that waits for the run."""
    machine: str
    """The id of its machine."""
    pid: int
    state: RankState = "active"
    reason: str = ""
    """Why it was lost, or is late."""
    step: int | None = None
    operation: str = ""
    """The operation in progress; empty between operations."""
    operation_age: float | None = None
    """How long it has been in that operation, or outside of operations."""
    sequence: int | None = None
    """The number of the last operation of its largest group that it began."""
    waits_for: tuple[int, ...] = ()
    compute: float | None = None
    """Seconds outside of operations, of the last step, or of the last second if the program reports no steps."""
    sync: float | None = None
    """Seconds in operations, likewise."""
    sent_per_second: float | None = None
    received_per_second: float | None = None
    saved: float | None = None
    """The share of its gradient bytes that compression saved, 0 to 1."""
    codec: str = ""
    codec_reason: str = ""
    plan: str = ""
    age: float = 0.0


@dataclass(frozen=True)
class Happening:
    """An event of a run: lost, joined, left, plan, codec, checkpoint, moved."""

    at: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    level: Level = "note"


@dataclass(frozen=True)
class RunSeen:
    """One run, in a cluster or of this machine alone."""

    id: str
    """Tells runs of one name apart."""
    name: str
    state: RunState
    began: float | None = None
    program: str = ""
    sentence: Sentence = field(default_factory=lambda: Sentence(""))
    ranks: tuple[RankSeen, ...] = ()
    links: tuple[LinkSeen, ...] = ()
    reports: Mapping[str, float] = field(default_factory=dict)
    """The last value of each name that the program reports; NaN and infinity are kept."""
    reported_by: str = ""
    """Whose values these are: `rank 0`, or `mean of 4 ranks`."""
    step: int | None = None
    step_seconds: float | None = None
    compute_seconds: float | None = None
    sync_seconds: float | None = None
    samples_per_second: float | None = None
    saved: float | None = None
    happenings: tuple[Happening, ...] = ()
    """The last ones, oldest first."""
    can_stop: bool = False
    can_checkpoint: bool = False


@dataclass(frozen=True)
class Applicant:
    """A machine that asks to join the cluster."""

    id: str
    short_id: str
    name: str
    address: str
    age: float = 0.0


@dataclass(frozen=True)
class Moment:
    """A moment in the history of a run, for curves."""

    at: float
    step: int | None = None
    reports: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    compute_seconds: float | None = None
    sync_seconds: float | None = None
    sent_per_second: float | None = None


@dataclass(frozen=True)
class Overview:
    """All that is known at one moment."""

    serial: int
    """Counts overviews of one collector from 1 on."""
    taken: float
    cluster: str = ""
    """Its name; empty on a machine in no cluster."""
    sentence: Sentence = field(default_factory=lambda: Sentence(""))
    machines: tuple[MachineSeen, ...] = ()
    runs: tuple[RunSeen, ...] = ()
    applicants: tuple[Applicant, ...] = ()
    can_approve: bool = False
    approver: str = ""
    """The name of the machine that has the owner key, if that is not this one and it is known."""
