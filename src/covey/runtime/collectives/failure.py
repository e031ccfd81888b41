"""What ended a group, which ranks are told, and the errors that its operations raise because of it.

With `on_loss="raise"` the first fault ends the group. With `on_loss="continue"` operations are all or nothing
(`collectives.atomic`), and the members agree on a fault before it ends the group.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from covey.base.errors import ClosedError, CoveyError, PeerLostError, Remedy
from covey.runtime import loop as control
from covey.runtime.collectives.call_log import Call
from covey.runtime.collectives.part import EnginePart
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    from covey.base.errors import MismatchError
    from covey.base.numbers import Rank
    from covey.runtime.collectives.engine import Engine
    from covey.wire import messages

TEXT_LIMIT: Final = 8000
"""Characters of a fault that other ranks are told."""
MESSAGES: Final = Call(0, 0, 0, "point-to-point")


class Failure(EnginePart):
    """The fault that ended a group, if one has."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.fault: Fault | None = None
        self._raised: BaseException | None = None
        """The first error that the program was told of. Later calls name it as their cause."""
        self._lock = threading.Lock()

    @property
    def has_happened(self) -> bool:
        """Whether a fault has ended the group."""
        return self.fault is not None

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
        return is_loss and self._raised is None and self.engine.atomic is None

    # Ending the group

    def declare(self, fault: Fault, *, differs_at: int = 0) -> None:
        """Record the first fault, wake the waiting threads, and tell the other ranks. On any thread.

        A group that survives losses ends once its members have agreed to; `differs_at` is the operation that they are
        known to have called differently, if any.
        """
        engine = self.engine
        if (self.fault is not None and not self._yields_to(fault)) or engine.node is None:
            self.end_here(fault)
            return
        if fault.kind == "PeerLostError" and engine.stalls.is_comparing:
            return  # the comparison ends the group, with a more useful error
        if engine.atomic is not None:
            engine.roster.tell_others(self.revocation(fault))  # before the view that it leads to
            engine.atomic.give_up(fault, differs_at)
        else:
            self.end_here(fault)
            if fault.culprit == engine.rank:
                engine.stalls.part()
            engine.roster.tell_others(self.revocation(fault))

    def end_here(self, fault: Fault) -> None:
        """Record the first fault and wake the waiting threads; tell no other rank. On any thread."""
        engine = self.engine
        with self._lock:
            if self.fault is not None and not self._yields_to(fault):
                return
            if fault.kind == "PeerLostError" and engine.stalls.is_comparing:
                return  # the comparison ends the group, with a more useful error
            self.fault = fault
        self.interrupt(fault)
        if engine.atomic is not None:
            engine.atomic.wake()

    def interrupt(self, fault: Fault) -> None:
        """Wake the thread that runs an operation, and fail the lanes that are being opened."""
        engine = self.engine
        engine.attempt.stop()
        engine.bell.ring()
        engine.routing.interrupt()
        if engine.node is not None:
            engine.node.lanes.abandon(lambda key: key.group == engine.id, ClosedError(fault.text))

    def _yields_to(self, fault: Fault) -> bool:
        """Tell whether a mismatch replaces a recorded loss, because the program was not told of the loss yet."""
        is_loss = self.fault is not None and self.fault.kind == "PeerLostError"
        return is_loss and fault.kind == "MismatchError" and self._raised is None

    def revocation(self, fault: Fault) -> messages.Revoke:
        """Return the message that tells another rank of a fault."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        testimony = self.engine.suspicion.testimony() if fault.kind == "PeerLostError" else ()
        return messages.Revoke(self.engine.id, fault.kind, fault.text[:TEXT_LIMIT], fault.ranks, *testimony)

    def operation_raised(self, error: BaseException) -> None:
        """End the group because its current operation raised `error` on this rank."""
        engine = self.engine
        if engine.atomic is not None and self.fault is None and isinstance(error, PeerLostError):
            return  # the root was lost, which all ranks know; the group continues
        if self.fault is None:
            what = engine.operation.describe()
            why = str(error).removeprefix(f"{what} cannot go on: ")
            text = f"rank {engine.rank} gave up {what}: {type(error).__name__}: {why}"
            fault = Fault("PeerLostError", text, (engine.rank,))
            if engine.node is not None:
                self._tell_keeper(text, b"")
            if engine.atomic is not None and engine.generation is not None:
                # Only this rank has failed: the others agree to continue without it.
                self.end_here(fault)
                control.soon(engine.generation.withdraw)
            else:
                engine.suspicion.look()
                self.declare(fault)
        if self._raised is None:
            self._first_raised(error)

    def report_loss(self, reason: str) -> None:
        """Tell the keeper that this program ends with `reason`, if that is the loss of another rank, and which one."""
        fault, engine = self.fault, self.engine
        if fault is not None and fault.kind == "PeerLostError" and fault.culprit != engine.rank:
            peer = engine.roster.peer(fault.culprit)
            if peer is not None:
                self._tell_keeper(reason, peer.life)

    def _tell_keeper(self, reason: str, cause: bytes) -> None:
        """Let the keeper know which process is the cause: this one, before others fail because of it, or another."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        assert self.engine.node is not None
        self.engine.node.tell_keeper(messages.Failing(reason[: messages.REASON_LIMIT], cause))

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

                write_failed(self.engine.counters, error)

    def forked(self, text: str) -> None:
        """End the group in a forked child, where another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self.fault, self._raised = Fault("ClosedError", text), None

    # Raising

    def untold_mismatch(self) -> CoveyError | None:
        """Return the error of a group that ended with a mismatch, if the program was not told; it is told now."""
        if not self.is_mismatch or self._raised is not None:
            return None
        error = self._error("close", self.engine.operation.sequence)
        self.note_raised(error)
        return error

    def check(self) -> None:
        """Raise the group's error if it has ended. On the thread that runs the operation."""
        suspicion, operation = self.engine.suspicion, self.engine.operation
        if suspicion.is_open:
            suspicion.weigh()
        elif self.may_be_mismatch:  # the loss was declared just before the operation was known to run
            suspicion.reconsider()
        if self.fault is not None:
            raise self._error(operation.call.text, operation.sequence)

    def refuse(self, call: Call) -> None:
        """Raise the error that keeps `call` from running; `base.errors` has the rule."""
        engine = self.engine
        name, sequence = engine.name, engine.operation.sequence + 1
        if self.fault is None:
            raise ClosedError(f"{call.text}: group {name!r} is closed")
        if self._raised is None:
            if self.may_be_mismatch and call is not MESSAGES:
                engine.suspicion.reconsider(call)
            error = self._error(call.text, sequence)
            self.note_raised(error)
            raise error
        error = self._error(call.text, sequence)
        is_own = isinstance(error, PeerLostError) and self.fault.culprit == engine.rank
        if error.remedy is Remedy.REGROUP and not isinstance(error, ClosedError) and not is_own:
            raise error
        raise ClosedError(
            f"{call.text}: group {name!r} is closed since an earlier failure: {self._raised}"
        ) from self._raised

    def require_open(self) -> None:
        """Raise the error that keeps messages from being sent or received, if the group is closed or has ended."""
        if self.fault is not None or self.engine.is_closed:
            self.refuse(MESSAGES)

    def message_error(self) -> CoveyError | None:
        """Return the error for a message, None while the group has not ended. A caller that raises it notes that."""
        return None if self.fault is None else self._error(MESSAGES.text, self.engine.operation.sequence)

    def lost_error(self, rank: Rank) -> CoveyError:
        """Return the error for a message to or from a rank whose lane ended; wait a moment for the reason."""
        engine = self.engine
        text = engine.lane_trouble.why_closed(rank, "end of stream")
        host, sequence = engine.roster.host_name(rank), engine.operation.sequence
        lost = PeerLostError(text, rank=rank, host=host, operation=MESSAGES.text, sequence=sequence)
        return self.message_error() or lost

    def root_lost(self, root: Rank) -> PeerLostError:
        """Return the error for the current operation, whose root is lost. The group continues."""
        return self._missing(root, f"{self.engine.operation.describe()} cannot be done without it")

    def part_lost(self, rank: Rank) -> PeerLostError:
        """Return the error for the current operation, whose result lacks a lost rank's part. The group continues."""
        return self._missing(rank, f"its part of {self.engine.operation.describe()} with it")

    def _missing(self, rank: Rank, consequence: str) -> PeerLostError:
        roster, operation = self.engine.roster, self.engine.operation
        peer = roster.peer(rank)
        how = peer.how_it_went() if peer is not None and peer.failure else "is lost"
        text = f"{roster.describe((rank,))} {how}, and {consequence}"
        host = roster.host_name(rank)
        return PeerLostError(text, rank=rank, host=host, operation=operation.call.text, sequence=operation.sequence)

    def _error(self, what: str, sequence: int) -> CoveyError:
        fault, roster = self.fault, self.engine.roster
        assert fault is not None
        host = roster.host_name(fault.culprit)
        return fault.error(rank=roster.rank, host=host, operation=what, sequence=sequence, group=self.engine.name)
