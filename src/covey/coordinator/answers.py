"""The messages with which the coordinator answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.coordinator import coordinator_pb2 as pb
from covey.coordinator.records import CheckpointPhase, natural

if TYPE_CHECKING:
    from covey.coordinator.records import CheckpointRecord, ViewRecord
    from covey.coordinator.run import CoordinatedRun, Outlook

PHASE_CODES: Final = {
    CheckpointPhase.PENDING: pb.Checkpoint.PENDING,
    CheckpointPhase.DONE: pb.Checkpoint.DONE,
    CheckpointPhase.ABANDONED: pb.Checkpoint.ABANDONED,
    CheckpointPhase.FAILED: pb.Checkpoint.FAILED,
}


def event(now: Outlook, before: Outlook | None) -> pb.RunEvent:
    """Return what has changed for a worker."""
    found = pb.RunEvent()
    if now.assignment is None:
        found.waiting.CopyFrom(pb.Waiting(registered=now.registered, needed=now.needed, reason=now.reason))
    elif before is None or before.assignment != now.assignment:
        given = now.assignment
        found.assignment.CopyFrom(
            pb.Assignment(round=given.round, rank=given.rank, size=given.size, address=given.address)
        )
    if now.view is not None and (before is None or before.view != now.view):
        found.view.CopyFrom(view(now.view))
    if now.checkpoint is not None and (before is None or before.checkpoint != now.checkpoint):
        id, path, phase = now.checkpoint
        found.checkpoint.CopyFrom(pb.Checkpoint(id=id, path=path, phase=PHASE_CODES[CheckpointPhase(phase)]))
    return found


def view(found: ViewRecord, sequence: int = 0) -> pb.View:
    """Return a view as a message."""
    return pb.View(
        round=found.round,
        generation=found.generation,
        number=found.number,
        members=found.members,
        sequence=sequence,
    )


def checkpoint(found: CheckpointRecord) -> pb.Checkpoint:
    """Return a checkpoint as a message."""
    return pb.Checkpoint(
        id=found.id, path=found.path, phase=PHASE_CODES[found.phase], ended=found.ended, error=found.error
    )


def run_status(run: CoordinatedRun, *, now: float) -> pb.RunStatus:
    """Return a run as a message, its workers by rank, then by id."""
    record, last = run.record, run.checkpoints.last
    workers = sorted(record.workers.values(), key=lambda worker: (worker.rank < 0, worker.rank, natural(worker.id)))
    return pb.RunStatus(
        run=record.name,
        round=record.round,
        size=record.size,
        view=None if record.view is None else view(record.view, run.sequence),
        workers=[
            pb.WorkerStatus(
                worker_id=worker.id,
                name=worker.name,
                address=worker.address,
                rank=worker.rank,
                state=run.state_of(worker, now=now),
                heard_seconds_ago=run.heard_ago(worker.id, now=now),
            )
            for worker in workers
        ],
        checkpoint=None if last is None else checkpoint(last),
    )
