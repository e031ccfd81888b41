"""What the coordinator remembers of a run, also after a restart. Pure."""

from __future__ import annotations

import enum

import msgspec


class Sizes(msgspec.Struct, frozen=True):
    """How many workers a round has, and how long it waits for more than the fewest."""

    least: int
    most: int
    settle: float
    """Seconds."""


class WorkerState(enum.Enum):
    """Where a worker stands, by its own calls; whether it lives is for the run's views to say."""

    WAITING = "waiting"
    """It waits for a rank."""
    SEATED = "seated"
    """It has a rank in the current round."""
    GONE = "gone"
    """It has unregistered, or its round is over."""


class WorkerRecord(msgspec.Struct):
    """A worker that has registered at least once."""

    id: str
    identity: str
    """What its caller had proved when it registered first; only this caller may act for it."""
    life: bytes
    """The start of the worker that registered last."""
    name: str
    address: str
    state: WorkerState
    rank: int = -1
    """The last rank that it had; -1 if it had none."""
    round: int = 0
    """The round of that rank."""
    has_told: bool = False
    """Whether it has left that round itself, and said what its last view was; a worker that crashed has not."""


class ViewRecord(msgspec.Struct, frozen=True):
    """The members of a round, as a worker reported them."""

    round: int
    generation: int
    number: int
    members: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """A later view has a greater one; under `on_loss="raise"`, where losses make no views, one of fewer members."""
        return self.round, self.generation, self.number, -len(self.members)


class CheckpointPhase(enum.Enum):
    """How far a checkpoint is."""

    PENDING = "pending"
    DONE = "done"
    ABANDONED = "abandoned"
    """Its round ended first."""
    FAILED = "failed"
    """Some ranks could not save it."""


class CheckpointRecord(msgspec.Struct):
    """A checkpoint that was asked for."""

    id: str
    path: str
    round: int
    phase: CheckpointPhase = CheckpointPhase.PENDING
    ended: list[str] = msgspec.field(default_factory=list)
    """The workers that have ended it, in that order."""
    error: str = ""
    """Why it could not be saved, as the first such worker said."""


class RunRecord(msgspec.Struct):
    """All that is remembered of a run."""

    name: str
    sizes: Sizes
    round: int = 0
    """The number of the last round, from 1; 0 before the first."""
    size: int = 0
    """Ranks of that round."""
    workers: dict[str, WorkerRecord] = msgspec.field(default_factory=dict)
    view: ViewRecord | None = None
    """The latest view of that round."""
    checkpoints: list[CheckpointRecord] = msgspec.field(default_factory=list)
