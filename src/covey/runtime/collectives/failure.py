"""What ended a group, which ranks are told, and the errors that its operations raise because of it.

With `on_loss="raise"` the first fault ends the group. With `on_loss="continue"` operations are all or nothing
(`collectives.atomic`), and the members agree on a fault before it ends the group.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from covey.base.errors import ClosedError, CoveyError, PeerLostError, Remedy
from covey.runtime.collectives.call_log import Call
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from covey.base.errors import MismatchError
    from covey.base.numbers import Rank
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.call_log import CallLog
    from covey.runtime.collectives.evidence import CallEvidence
    from covey.runtime.collectives.operation import CurrentAttempt, CurrentOperation
    from covey.runtime.collectives.roster import CollectiveLanes, GroupFacts, GroupRoster
    from covey.runtime.counters import GroupCounters
    from covey.wire import messages

FAULT_TEXT_LIMIT: Final = 8000
"""Characters of a fault that other ranks are told."""
CAUSE_SECONDS: Final = 0.2
"""How long a rank whose lane broke waits for a message that says why."""
POINT_TO_POINT: Final = Call(0, 0, 0, "point-to-point")


class Survivors(Protocol):
    """The operations of a group that survives losses, as far as its end needs them (`collectives.atomic`)."""

    def give_up(self, fault: Fault, differs_at: int) -> None: ...

    def disturbed(self, attempt: int, trouble: str) -> NoReturn: ...

    def withdraw(self) -> None: ...

    def wake(self) -> None: ...


class Interruptible(Protocol):
    """The messages of a group (`messages.routing`)."""

    def interrupt(self) -> None: ...


class Failure:
    """The fault that ended a group, if one has, and whether it was closed."""

    def __init__(
        self,
        facts: GroupFacts,
        roster: GroupRoster,
        lanes: CollectiveLanes,
        operation: CurrentOperation,
        attempt: CurrentAttempt,
        call_log: CallLog,
        evidence: CallEvidence,
        messages: Interruptible,
        bell: Bell,
        counters: GroupCounters,
    ) -> None:
        self._facts, self._roster, self._lanes, self._operation, self._attempt = (
            facts,
            roster,
            lanes,
            operation,
            attempt,
        )
        self._log, self._evidence, self._messages, self._bell = call_log, evidence, messages, bell
        self._counters = counters
        self.fault: Fault | None = None
        self.is_closed = False
        """Whether the program has closed the group."""
        self._raised: BaseException | None = None
        """The first error that the program was told of. Later calls name it as their cause."""
        self._lock = threading.Lock()
        self.survivors: Callable[[], Survivors | None] = lambda: None
        """Return the operations of a group that survives losses; None in other groups."""

    def agree_with(self, survivors: weakref.ref[Survivors]) -> None:
        """Let the members agree on a fault before it ends the group, by these operations, which are not kept."""
        self.survivors = survivors

    @property
    def has_happened(self) -> bool:
        """Whether a fault has ended the group."""
        return self.fault is not None

    @property
    def is_over(self) -> bool:
        """Whether the group was closed or has failed."""
        return self.is_closed or self.fault is not None

    @property
    def is_mismatch(self) -> bool:
        """Whether the group ended because ranks called different operations."""
        return self.fault is not None and self.fault.kind == "MismatchError"

    @property
    def may_be_mismatch(self) -> bool:
        """Whether the group ended with a loss that the program does not know of yet: a mismatch may be behind it.

        Groups that survive losses agree on what is behind one before they end.
        """
        is_loss = self.fault is not None and self.fault.kind == "PeerLostError"
        return is_loss and self._raised is None and not self._facts.survives

    # Ending the group

    def declare(self, fault: Fault, *, differs_at: int = 0) -> None:
        """Record the first fault, wake the waiting threads, and tell the other ranks. On any thread.

        A group that survives losses ends once its members have agreed to; `differs_at` is the operation that they are
        known to have called differently, if any.
        """
        if (self.fault is not None and not self._yields_to(fault)) or self._roster.node is None:
            self.end_here(fault)
            return
        if fault.kind == "PeerLostError" and self._log.compared:
            return  # the comparison ends the group, with a more useful error
        if (survivors := self.survivors()) is not None:
            self._roster.tell_others(self.revocation(fault))  # before the view that it leads to
            survivors.give_up(fault, differs_at)
        else:
            self.end_here(fault)
            if fault.culprit == self._roster.rank:
                self._evidence.part()
            self._roster.tell_others(self.revocation(fault))

    def end_here(self, fault: Fault) -> None:
        """Record the first fault and wake the waiting threads; tell no other rank. On any thread."""
        with self._lock:
            if self.fault is not None and not self._yields_to(fault):
                return
            if fault.kind == "PeerLostError" and self._log.compared:
                return  # the comparison ends the group, with a more useful error
            self.fault = fault
        self.interrupt(fault)
        if (survivors := self.survivors()) is not None:
            survivors.wake()

    def interrupt(self, fault: Fault) -> None:
        """Wake the thread that runs an operation, and fail the lanes that are being opened."""
        self._attempt.stop()
        self._bell.ring()
        self._messages.interrupt()
        self._lanes.abandon(ClosedError(fault.text))

    def _yields_to(self, fault: Fault) -> bool:
        """Tell whether a mismatch replaces a recorded loss, because the program was not told of the loss yet."""
        is_loss = self.fault is not None and self.fault.kind == "PeerLostError"
        return is_loss and fault.kind == "MismatchError" and self._raised is None

    def revocation(self, fault: Fault) -> messages.Revoke:
        """Return the message that tells another rank of a fault."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        evidence = self._evidence.given() if fault.kind == "PeerLostError" else ()
        return messages.Revoke(self._facts.id, fault.kind, fault.text[:FAULT_TEXT_LIMIT], fault.ranks, *evidence)

    def operation_raised(self, error: BaseException) -> None:
        """End the group because its current operation raised `error` on this rank."""
        survivors, rank = self.survivors(), self._roster.rank
        if self._facts.survives and self.fault is None and isinstance(error, PeerLostError):
            return  # the root was lost, which all ranks know; the group continues
        if self.fault is None:
            what = self._operation.describe()
            why = str(error).removeprefix(f"{what} cannot continue: ")
            text = f"rank {rank} gave up {what}: {type(error).__name__}: {why}"
            fault = Fault("PeerLostError", text, (rank,))
            self._roster.tell_keeper(text, b"")
            if survivors is not None:  # only this rank has failed: the others agree to continue without it
                self.end_here(fault)
                survivors.withdraw()
            else:
                self._evidence.look()
                self.declare(fault)
        if self._raised is None:
            self._first_raised(error)

    def report_loss(self, reason: str) -> None:
        """Tell the keeper that this program ends with `reason`, if that is the loss of another rank, and which one."""
        fault = self.fault
        if fault is not None and fault.kind == "PeerLostError" and fault.culprit != self._roster.rank:
            peer = self._roster.peer(fault.culprit)
            if peer is not None:
                self._roster.tell_keeper(reason, peer.life)

    def disagreed(self, error: MismatchError) -> None:
        """End the group with an error that every rank raises by itself."""
        self.end_here(Fault("MismatchError", str(error)))
        self.note_raised(error)

    def note_raised(self, error: BaseException) -> None:
        """Record that the program is told of `error`; if the group has ended, later calls name it as their cause."""
        if self.fault is not None and self._raised is None:
            self._first_raised(error)

    def _first_raised(self, error: BaseException) -> None:
        self._raised = error
        is_known = self.fault is None or self.fault.kind == "ClosedError"  # the program has closed or revoked the group
        if not is_known and isinstance(error, Exception):
            with contextlib.suppress(OSError):  # no descriptor to import it with: `error` is what the program must see
                from covey.runtime.metrics.flight import write_failed  # most groups do not fail

                write_failed(self._counters, error)

    def forked(self, text: str) -> None:
        """End the group in a forked child, where another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.fault, self._raised = Fault("ClosedError", text), None

    # Raising

    def untold_mismatch(self) -> CoveyError | None:
        """Return the error of a group that ended with a mismatch, if the program was not told; it is told now."""
        if not self.is_mismatch or self._raised is not None:
            return None
        error = self._error("close", self._operation.sequence)
        self.note_raised(error)
        return error

    def raise_fault(self) -> None:
        """Raise the group's error, in the current operation, if it has ended."""
        if self.fault is not None:
            raise self._error(self._operation.call.text, self._operation.sequence)

    def refuse(self, call: Call) -> NoReturn:
        """Raise the error that keeps `call` from running; `base.errors` has the rule."""
        name, sequence = self._facts.name, self._operation.sequence + 1
        if self.fault is None:
            raise ClosedError(f"{call.text}: group {name!r} is closed")
        error = self._error(call.text, sequence)
        if self._raised is None:
            self.note_raised(error)
            raise error
        is_own = isinstance(error, PeerLostError) and self.fault.culprit == self._roster.rank
        if error.remedy is Remedy.REGROUP and not isinstance(error, ClosedError) and not is_own:
            raise error
        raise ClosedError(
            f"{call.text}: group {name!r} is closed since an earlier failure: {self._raised}"
        ) from self._raised

    def require_open(self) -> None:
        """Raise the error that keeps messages from being sent or received, if the group is closed or has ended."""
        if self.is_over:
            self.refuse(POINT_TO_POINT)

    def message_error(self) -> CoveyError | None:
        """Return the error for a message, None while the group has not ended. A caller that raises it notes that."""
        return None if self.fault is None else self._error(POINT_TO_POINT.text, self._operation.sequence)

    def lost_error(self, rank: Rank) -> CoveyError:
        """Return the error for a message to or from a rank whose lane ended; wait a moment for the reason."""
        text = self.why_closed(rank, "end of stream")
        host, sequence = self._roster.host_name(rank), self._operation.sequence
        lost = PeerLostError(text, rank=rank, host=host, operation=POINT_TO_POINT.text, sequence=sequence)
        return self.message_error() or lost

    def why_closed(self, rank: Rank, symptom: str) -> str:
        """Wait a moment for a message that says why a lane ended; return the reason, or what is known without one."""
        peer = self._roster.peer(rank)
        assert peer is not None
        self._bell.await_news(
            CAUSE_SECONDS,
            lambda: (
                self.has_happened
                or bool(peer.failure)
                or peer.has_left
                or peer.is_excluded
                or rank in self._evidence.parted
            ),
        )
        why = f"closed the group, or the connection broke ({symptom})"
        if peer.failure or peer.is_excluded:
            why = peer.how_it_went()
        elif peer.has_left:
            why = "left the group"
        return f"{self._roster.describe((rank,))} {why}"

    def root_lost(self, root: Rank) -> PeerLostError:
        """Return the error for the current operation, whose root is lost. The group continues."""
        return self._missing(root, f"{self._operation.describe()} cannot be done without it")

    def part_lost(self, rank: Rank) -> PeerLostError:
        """Return the error for the current operation, whose result lacks a lost rank's part. The group continues."""
        return self._missing(rank, f"its part of {self._operation.describe()} with it")

    def _missing(self, rank: Rank, consequence: str) -> PeerLostError:
        roster, operation = self._roster, self._operation
        peer = roster.peer(rank)
        how = peer.how_it_went() if peer is not None and peer.failure else "is lost"
        text = f"{roster.describe((rank,))} {how}, and {consequence}"
        host = roster.host_name(rank)
        return PeerLostError(text, rank=rank, host=host, operation=operation.call.text, sequence=operation.sequence)

    def _error(self, what: str, sequence: int) -> CoveyError:
        fault, roster = self.fault, self._roster
        assert fault is not None
        host = roster.host_name(fault.culprit)
        return fault.error(rank=roster.rank, host=host, operation=what, sequence=sequence, group=self._facts.name)
