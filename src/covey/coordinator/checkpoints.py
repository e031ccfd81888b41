"""The checkpoints of a run: asked for, ended by each worker, done. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.coordinator.limits import MAX_CHECKPOINTS
from covey.coordinator.records import CheckpointPhase, CheckpointRecord
from covey.coordinator.refusal import Reason, RefusalError

if TYPE_CHECKING:
    from collections.abc import Collection

    from covey.coordinator.records import RunRecord


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
