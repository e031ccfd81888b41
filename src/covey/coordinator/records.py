"""What the coordinator remembers of a run, also after a restart, and the rules for ranks and checkpoints. Pure."""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING

import msgspec

from covey.coordinator.refusal import MAX_CHECKPOINTS, Reason, RefusalError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


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


def choose(waiting: Iterable[WorkerRecord], most: int) -> list[WorkerRecord]:
    """Return the workers of the next round: those of the latest rounds first, then by id."""
    return sorted(waiting, key=lambda worker: (-worker.round, natural(worker.id)))[:most]


def assign(workers: Sequence[WorkerRecord]) -> dict[str, int]:
    """Return a rank for each worker, by id: 0 to one less than their number.

    A worker keeps the rank that it had, unless that is too large, or another worker had it in a later round. The others
    get the free ranks in the order of their ids, so that ranks do not depend on which worker came first.
    """
    ranks: dict[str, int] = {}
    taken: set[int] = set()
    for worker in sorted(workers, key=lambda worker: (-worker.round, natural(worker.id))):
        if 0 <= worker.rank < len(workers) and worker.rank not in taken:
            ranks[worker.id] = worker.rank
            taken.add(worker.rank)
    free = (rank for rank in range(len(workers)) if rank not in taken)
    for worker in sorted(workers, key=lambda worker: natural(worker.id)):
        if worker.id not in ranks:
            ranks[worker.id] = next(free)
    return ranks


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which texts are sorted with their numbers: w2 before w10."""
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", text)]


class CheckpointList:
    """Keeps the list of a run's checkpoints. At most one is pending."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    @property
    def last(self) -> CheckpointRecord | None:
        """The checkpoint that was asked for last."""
        return self._record.checkpoints[-1] if self._record.checkpoints else None

    @property
    def pending(self) -> CheckpointRecord | None:
        """The checkpoint that not all members have ended."""
        return self.last if self.last is not None and self.last.phase is CheckpointPhase.PENDING else None

    def get(self, id: str) -> CheckpointRecord:
        """Return a checkpoint, the last one if `id` is empty."""
        found = self.last if not id else next((each for each in self._record.checkpoints if each.id == id), None)
        if found is None:
            text = f"run {self._record.name!r} has no checkpoint {id!r}" if id else "no checkpoint was asked for yet"
            raise RefusalError(Reason.NOT_FOUND, text)
        return found

    def start(self, path: str, id: str) -> CheckpointRecord:
        """Ask for a checkpoint of this new id; return the pending one instead if it is for the same path."""
        record, pending = self._record, self.pending
        if pending is not None:
            if pending.path == path:
                return pending
            raise RefusalError(
                Reason.NOT_NOW, f"checkpoint {pending.id} to {pending.path!r} is pending; ask again when it is done"
            )
        if record.view is None:
            raise RefusalError(Reason.NOT_NOW, f"no worker of run {record.name!r} has joined its group yet")
        started = CheckpointRecord(id, path, record.round)
        record.checkpoints.append(started)
        del record.checkpoints[:-MAX_CHECKPOINTS]
        return started

    def end(self, id: str, worker: str, error: str, members: Collection[str]) -> CheckpointRecord:
        """Note that a worker has ended a checkpoint, with an error or none; it is over when all `members` have."""
        found = self.get(id)
        found.error = found.error or error
        if worker not in found.ended:
            found.ended.append(worker)
        self.review(members)
        return found

    def review(self, members: Collection[str]) -> None:
        """Take note of the workers that are members now: a lost one need not end the pending checkpoint."""
        if (pending := self.pending) is not None and members and set(members) <= set(pending.ended):
            pending.phase = CheckpointPhase.FAILED if pending.error else CheckpointPhase.DONE

    def abandon(self) -> None:
        """Give up the pending checkpoint: its round is over."""
        if self.pending is not None:
            self.pending.phase = CheckpointPhase.ABANDONED
