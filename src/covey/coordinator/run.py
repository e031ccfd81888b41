"""One run as the coordinator sees it: workers that wait for a rank, when a round begins, what workers report. Pure.

Invariant: a round begins only when the one before it cannot go on. Of its last reported view, every member has left,
was started again or is silent. If some are silent, those that left in order are a quorum: the silent ones cannot have
decided a later view without them, and none of those that left has reported one. A member that crashed may have taken
part in such a decision, and cannot tell any more, so it does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.coordinator.records import CheckpointList, RunRecord, ViewRecord, WorkerRecord, WorkerState, assign, choose
from covey.coordinator.refusal import MAX_WORKERS, Reason, RefusalError
from covey.runtime.environment import is_loopback

if TYPE_CHECKING:
    from covey.coordinator.records import CheckpointRecord, Sizes

RECONNECT_SECONDS: Final = 5.0
"""A worker whose stream broke is taken to have ended after this time: a live one registers again sooner."""
WORKER_SILENCE: Final = 30.0
"""A worker is silent if it was not heard for this long."""


@dataclass(frozen=True)
class Registration:
    """What a worker says when it registers, and the identity that it has proved."""

    worker_id: str
    identity: str
    life: bytes
    name: str
    address: str
    sizes: Sizes
    assignment: Assignment | None = None
    """The rank that this life has already, if it has one."""


@dataclass(frozen=True)
class Assignment:
    """The rank of a worker in a round."""

    round: int
    rank: int
    size: int
    address: str
    """Where rank 0 listens."""


@dataclass(frozen=True)
class Outlook:
    """What a registered worker is told; it is told again whatever has changed."""

    registered: int
    needed: int
    reason: str
    assignment: Assignment | None
    view: ViewRecord | None
    checkpoint: tuple[str, str, str] | None
    """Id, path and phase."""


class CoordinatedRun:
    """The workers of one run. Calls in, and `outlook` out; `tick(now)` at `next_deadline()`."""

    def __init__(self, record: RunRecord, *, now: float) -> None:
        self.record = record
        self.checkpoints = CheckpointList(record)
        self._connected: set[str] = set()
        """Workers whose stream is open."""
        self._heard_at: dict[str, float] = {}
        self._parted_at = dict.fromkeys(record.workers, now)
        """When the stream of a worker ended; after a restart of the coordinator, when it started."""
        self._began_at = now
        self._arrived_at = now
        """When the last worker registered."""
        self._sequence = 0

    # What workers do

    def register(self, asked: Registration, *, now: float) -> None:
        """Take a worker in, or back after its stream broke.

        Raises:
            RefusalError: it is not its own worker id, or what it declares contradicts the others.
        """
        known = self.record.workers.get(asked.worker_id)
        if known is not None:
            self._check_identity(known, asked.identity)
            if known.life == asked.life:
                self._take_back(known, asked)
                self._met(known.id, now)
                self.tick(now)
                return
            self._check_ended(known, now)
        if asked.assignment is not None:
            self._adopt(asked, asked.assignment)
            self._met(asked.worker_id, now)
            return
        self._check_declared(asked)
        if known is None:
            self._make_room()
            known = self.record.workers[asked.worker_id] = _new(asked)
        known.life, known.state, known.name, known.address = asked.life, WorkerState.WAITING, asked.name, asked.address
        self.record.sizes = asked.sizes
        self._arrived_at = now
        self._met(known.id, now)
        self.tick(now)

    def disconnect(self, worker_id: str, life: bytes, *, now: float) -> None:
        """Note that the stream of a worker has ended."""
        known = self.record.workers.get(worker_id)
        if known is not None and known.life == life:
            self._connected.discard(worker_id)
            self._parted_at[worker_id] = now

    def unregister(
        self, worker_id: str, identity: str, life: bytes, view: ViewRecord | None = None, *, now: float
    ) -> None:
        """Let a worker go; its rank is remembered. `view` is its last one."""
        known = self._known(worker_id, identity, life)
        self._take_view(known, view)
        known.has_told = known.state is WorkerState.SEATED or known.has_told
        known.state = WorkerState.GONE
        self._connected.discard(worker_id)
        self.checkpoints.review(self.members)
        self.tick(now)

    def hear(
        self, worker_id: str, identity: str, life: bytes, view: ViewRecord | None, sequence: int, *, now: float
    ) -> bool:
        """Take a heartbeat; return whether the worker reported a later view than was known."""
        known = self._known(worker_id, identity, life)
        self._heard_at[worker_id] = now
        is_later = self._take_view(known, view)
        if view is not None and view.round == self.record.round:
            self._sequence = max(self._sequence, sequence)
        return is_later

    def _take_view(self, worker: WorkerRecord, view: ViewRecord | None) -> bool:
        """Take the view of a worker; return whether it is later than the one that is known."""
        record = self.record
        if view is None or worker.state is not WorkerState.SEATED or view.round != record.round:
            return False
        if not all(0 <= rank < record.size for rank in view.members):
            raise RefusalError(Reason.MALFORMED, f"a view of {record.size} ranks cannot have {view.members}")
        if record.view is not None and view.order <= record.view.order:
            return False
        record.view = view
        self.checkpoints.review(self.members)
        return True

    def end_checkpoint(self, worker_id: str, identity: str, life: bytes, id: str, error: str = "") -> CheckpointRecord:
        """Note that the run of a worker has saved a checkpoint, or why it could not."""
        self._known(worker_id, identity, life)
        return self.checkpoints.end(id, worker_id, error, self.members)

    # Rounds

    def tick(self, now: float) -> bool:
        """Begin the next round if it can begin; return whether it did."""
        ready, sizes = self._ready(), self.record.sizes
        if len(ready) < sizes.least or self._blocker(now):
            return False
        if len(ready) < sizes.most and now < self._arrived_at + sizes.settle:
            return False
        self._begin_round(choose(ready, sizes.most))
        return True

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` should be called at the latest; None if only a call can change anything."""
        ready, sizes = self._ready(), self.record.sizes
        if len(ready) < sizes.least:
            return None
        if self._blocker(now):
            return now + 1.0  # a worker may become silent
        return self._arrived_at + sizes.settle

    def _begin_round(self, chosen: list[WorkerRecord]) -> None:
        record = self.record
        self.checkpoints.abandon()
        for worker in record.workers.values():
            if worker.state is WorkerState.SEATED:
                worker.state = WorkerState.GONE
        ranks = assign(chosen)
        record.round, record.size, record.view = record.round + 1, len(chosen), None
        self._sequence = 0
        for worker in chosen:
            worker.rank, worker.round, worker.state = ranks[worker.id], record.round, WorkerState.SEATED
            worker.has_told = False

    def _ready(self) -> list[WorkerRecord]:
        """Return the workers that wait for a rank and whose stream is open."""
        workers = self.record.workers.values()
        return [each for each in workers if each.state is WorkerState.WAITING and each.id in self._connected]

    def _blocker(self, now: float) -> str:
        """Return why the last round may still go on, in words; empty if it cannot."""
        record = self.record
        if record.round == 0:
            return ""
        ranks = range(record.size) if record.view is None else record.view.members
        seated = self._seated()
        staying = [seated[rank] for rank in ranks if rank in seated]
        if heard := [each for each in staying if not self._is_silent(each, now)]:
            return f"{heard[0].id} (rank {heard[0].rank}) is still in round {record.round}"
        told = {each.rank for each in record.workers.values() if each.round == record.round and each.has_told}
        left = len(told.intersection(ranks))
        if staying and (2 * left < len(ranks) or (2 * left == len(ranks) and ranks[0] not in told)):
            return (
                f"{', '.join(each.id for each in staying)} may still be in round {record.round}, and could continue it "
                "without the others; start them again, or make sure that they have ended and use another name of a run"
            )
        return ""

    def _seated(self) -> dict[int, WorkerRecord]:
        workers = self.record.workers.values()
        return {each.rank: each for each in workers if each.state is WorkerState.SEATED}

    def _is_silent(self, worker: WorkerRecord, now: float) -> bool:
        heard_at = self._heard_at.get(worker.id, self._began_at)
        return worker.id not in self._connected and now > heard_at + WORKER_SILENCE

    # What is known

    @property
    def members(self) -> set[str]:
        """The ids of the workers in the latest view that have not left."""
        view, seated = self.record.view, self._seated()
        return {seated[rank].id for rank in (view.members if view is not None else ()) if rank in seated}

    @property
    def waiting(self) -> int:
        """How many workers wait for the next round."""
        return len(self._ready())

    @property
    def sequence(self) -> int:
        """The most operations that a worker has reported in this round."""
        return self._sequence

    @property
    def is_idle(self) -> bool:
        """Whether no worker waits or has a rank."""
        return all(worker.state is WorkerState.GONE for worker in self.record.workers.values())

    def outlook(self, worker_id: str, life: bytes, *, now: float) -> Outlook | None:
        """Return what to tell a worker; None if this life of it has ended."""
        known = self.record.workers.get(worker_id)
        if known is None or known.life != life or known.state is WorkerState.GONE:
            return None
        last = self.checkpoints.last
        checkpoint = None if last is None else (last.id, last.path, last.phase.value)
        if known.state is WorkerState.WAITING:
            return Outlook(self.waiting, self.record.sizes.least, self._blocker(now), None, None, checkpoint)
        first = self._seated().get(0)
        address = "" if first is None else first.address
        assignment = Assignment(known.round, known.rank, self.record.size, address)
        return Outlook(0, 0, "", assignment, self.record.view, checkpoint)

    def state_of(self, worker: WorkerRecord, *, now: float) -> str:
        """Return the state of a worker in a word: waiting, active, silent, lost or left."""
        if worker.state is WorkerState.WAITING:
            return "waiting" if worker.id in self._connected else "left"
        if worker.state is WorkerState.GONE:
            return "left"
        if self.record.view is not None and worker.rank not in self.record.view.members:
            return "lost"
        return "silent" if self._is_silent(worker, now) else "active"

    def heard_ago(self, worker_id: str, *, now: float) -> float:
        """Return for how many seconds a worker was not heard; negative if it never was."""
        heard_at = self._heard_at.get(worker_id)
        return -1.0 if heard_at is None else now - heard_at

    # Checks

    def _known(self, worker_id: str, identity: str, life: bytes) -> WorkerRecord:
        known = self.record.workers.get(worker_id)
        if known is not None:
            self._check_identity(known, identity)
        if known is None or known.life != life or known.state is WorkerState.GONE:
            raise RefusalError(Reason.NOT_FOUND, f"this start of worker {worker_id!r} is not registered")
        return known

    def _check_identity(self, known: WorkerRecord, identity: str) -> None:
        if known.identity != identity:
            raise RefusalError(
                Reason.NOT_YOURS,
                f"worker {known.id!r} of run {self.record.name!r} was registered by {known.identity}, not by "
                f"{identity}; use another worker_id, or the same key or certificate as before",
            )

    def _check_ended(self, known: WorkerRecord, now: float) -> None:
        """Refuse a second process for a worker whose first may live."""
        if known.state is WorkerState.GONE:
            return
        if known.id in self._connected or now < self._parted_at.get(known.id, 0.0) + RECONNECT_SECONDS:
            raise RefusalError(
                Reason.TAKEN,
                f"another process is registered as worker {known.id!r} of run {self.record.name!r}: end it, or give "
                "each process a worker_id of its own",
            )

    def _check_declared(self, asked: Registration) -> None:
        others = [each for each in self._ready() if each.id != asked.worker_id]
        if others and asked.sizes != self.record.sizes:
            raise RefusalError(
                Reason.CONTRADICTION,
                f"worker {asked.worker_id!r} declares {_words(asked.sizes)}, and {others[0].id!r} declared "
                f"{_words(self.record.sizes)} for run {self.record.name!r}; all must declare the same",
            )
        for other in others:
            if is_loopback(_host(other.address)) != is_loopback(_host(asked.address)):
                raise RefusalError(
                    Reason.CONTRADICTION,
                    f"worker {asked.worker_id!r} listens at {asked.address}, and {other.id!r} at {other.address}: an "
                    "address of loopback cannot be reached from other machines; set address= of the worker",
                )

    def _take_back(self, known: WorkerRecord, asked: Registration) -> None:
        if known.state is WorkerState.GONE:
            raise RefusalError(
                Reason.CONTRADICTION,
                f"round {known.round} of run {self.record.name!r} is over, or worker {known.id!r} has left it; start "
                "the worker again",
            )
        known.name, known.address = asked.name, asked.address

    def _adopt(self, asked: Registration, claimed: Assignment) -> None:
        """Take in a worker that has a rank of which nothing is remembered: the state of the coordinator was lost."""
        record, rank = self.record, claimed.rank
        holder = self._seated().get(rank) if claimed.round == record.round else None
        is_known = record.round == claimed.round and record.size != claimed.size
        if claimed.round < record.round or is_known or rank >= claimed.size or holder is not None:
            raise RefusalError(
                Reason.CONTRADICTION,
                f"worker {asked.worker_id!r} says it is rank {rank} of round {claimed.round}, but run {record.name!r} "
                f"is in round {record.round} without it; start the worker again",
            )
        if claimed.round > record.round:
            record.round, record.size, record.view = claimed.round, claimed.size, None
            for worker in self._seated().values():
                worker.state = WorkerState.GONE
        self._make_room()
        adopted = record.workers[asked.worker_id] = _new(asked)
        adopted.state, adopted.rank, adopted.round = WorkerState.SEATED, rank, claimed.round

    def _make_room(self) -> None:
        """Forget a worker that left in an earlier round, if there are too many."""
        workers = self.record.workers
        if len(workers) < MAX_WORKERS:
            return
        gone = [worker for worker in workers.values() if worker.state is WorkerState.GONE]
        if not gone:
            raise RefusalError(Reason.FULL, f"run {self.record.name!r} has {MAX_WORKERS} workers already")
        del workers[min(gone, key=lambda worker: worker.round).id]

    def _met(self, worker_id: str, now: float) -> None:
        self._connected.add(worker_id)
        self._heard_at[worker_id] = now


def _new(asked: Registration) -> WorkerRecord:
    return WorkerRecord(asked.worker_id, asked.identity, asked.life, asked.name, asked.address, WorkerState.WAITING)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _words(sizes: Sizes) -> str:
    if sizes.least == sizes.most:
        return f"size {sizes.least}"
    return f"{sizes.least} to {sizes.most} workers after {sizes.settle:g} s"
