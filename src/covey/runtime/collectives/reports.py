"""What a group's node reports to it: messages of other ranks about the group, lost peers, new lanes, a fork.

All methods run on the control loop. They record faults and wake threads; they never touch a lane that is in use, so
each lane is used by one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from covey.base.numbers import BULK, Rank
from covey.net.host import tcp
from covey.runtime.fault import Fault
from covey.runtime.lanes.tuning.yielding import Urgency

if TYPE_CHECKING:
    import weakref

    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat, Slot
    from covey.runtime.collectives.atomic import AtomicOperations
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster
    from covey.runtime.collectives.stalls import StallDiagnosis
    from covey.runtime.collectives.suspicion import Suspicion
    from covey.runtime.counters import GroupCounters
    from covey.runtime.lanes.groups import GroupMessage
    from covey.runtime.messages.routing import MessageRouting
    from covey.runtime.views.generation import Generation
    from covey.wire import messages


class ReportedGroup(Protocol):
    """The group that is reported to (`collectives.engine`)."""

    @property
    def attempt(self) -> Attempt: ...

    @property
    def atomic(self) -> AtomicOperations | None: ...

    def forked(self) -> None: ...

    def confirm(self) -> None: ...

    def close(self) -> None: ...


class ControlReports:
    """A group as its node sees it (`lanes.groups`). It may be dropped while a report is under way."""

    has_rings = True

    def __init__(
        self,
        group: weakref.ref[ReportedGroup],
        generation: Generation | None,
        facts: GroupFacts,
        roster: GroupRoster,
        operation: CurrentOperation,
        failure: Failure,
        stalls: StallDiagnosis,
        suspicion: Suspicion,
        routing: MessageRouting,
        counters: GroupCounters,
    ) -> None:
        self._group, self._roster, self._operation, self._failure = group, roster, operation, failure
        self._stalls, self._suspicion, self._routing, self._counters = stalls, suspicion, routing, counters
        self.members, self.generation, self.survives = roster.seats, generation, facts.survives
        self.urgency = Urgency.TENSORS if facts.priority == BULK else Urgency.FIRST

    def heard(self, seat: Seat, message: GroupMessage) -> None:
        """Act on a message from the rank in `seat`."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        rank = self._roster.rank_of.get(seat)
        if self._roster.node is None or rank is None:
            return
        if isinstance(message, messages.Revoke):
            self._revoked(rank, message)
        elif isinstance(message, messages.Calls):
            if not self.survives:
                self._stalls.recall(rank, message)
        else:
            if isinstance(message, messages.Announce) and (fault := self._failure.fault) is not None:
                # The revocation may have reached the asking rank before it made the group.
                self._roster.tell((rank,), self._failure.revocation(fault))
            self._stalls.heard(rank, message)

    def _revoked(self, sender: Rank, message: messages.Revoke) -> None:
        ranks = tuple(Rank(rank) for rank in message.ranks if rank in self._roster.ranks)
        fault = Fault(message.kind, message.text, ranks or (sender,))
        group = self._group()
        if group is not None and group.atomic is not None:
            group.atomic.note_reason(fault)
        elif fault.kind == "PeerLostError":
            self._suspicion.heard(sender, message)
            self._suspicion.reported(fault)
        else:
            self._failure.end_here(fault)

    def peer_gone(self, seat: Seat, *, left: bool) -> None:
        """Act on the loss of the process in `seat`, or on its orderly leaving."""
        roster, rank = self._roster, self._roster.rank_of.get(seat)
        if rank is None:
            return
        if self.survives:
            self._routing.peer_lost(rank)
        elif not left:
            other = roster.peer(rank)
            why = f"is gone: {other.reason}" if other is not None and other.reason else "is gone"
            if other is not None and other.failure:
                why = other.how_it_went()
            self._suspicion.reported(Fault("PeerLostError", f"{roster.describe((rank,))} {why}", (rank,)))

    def lane_arrived(self, seat: Seat, purpose: str, lane: Any) -> bool:
        """Pass on a lane for messages from `seat`; tell whether the group uses it."""
        return purpose == "messages" and self._routing.lane_arrived(self._roster.rank_of[seat], lane)

    def sent_to(self, seat: Seat) -> tuple[int, int]:
        """Return the bytes that were sent to `seat`, and in how many transfers."""
        rank = self._roster.rank_of.get(seat)
        if rank is None:
            return 0, 0
        traffic = self._counters.recorder.traffic()[rank]
        return traffic.sent_bytes, traffic.sends

    def lane_to(self, seat: Seat) -> Any:
        """Return the open lane to `seat`; None if there is none."""
        group, rank = self._group(), self._roster.rank_of.get(seat)
        return None if group is None or rank is None else group.attempt.lanes.of(rank)

    def lane_stuck(self, seat: Seat, attempt: int) -> None:
        """Act on a lane to `seat` whose bytes are not acknowledged, while no operation runs that would notice it.

        This rank has sent its part and gone on; the other one waits for it.
        """
        if self._slot_in(seat, attempt) is None or self._operation.is_running:
            return
        if self.survives:
            assert self.generation is not None
            self.generation.disturbed(attempt)
        else:
            rank = self._roster.rank_of[seat]
            text = f"{self._roster.describe((rank,))} {tcp.STUCK}"
            self._suspicion.reported(Fault("PeerLostError", text, (rank,)))

    def propose_switch(self, seat: Seat, attempt: int, lane: Any, least: int) -> int | None:
        """Return the operation, `least` or later, from which this end wants to use another lane to `seat`.

        None if the attempt is over.
        """
        where = self._slot_in(seat, attempt)
        return None if where is None else where[0].switch.propose(*where, lane, least)

    def accept_switch(self, seat: Seat, attempt: int, lane: Any, sequence: int) -> int | None:
        """Agree to use another lane to `seat` from an operation on; return 0, or how many operations have begun here.

        None if the attempt is over.
        """
        where = self._slot_in(seat, attempt)
        return None if where is None else where[0].switch.accept(*where, lane, sequence)

    def settle_switch(self, seat: Seat, attempt: int, sequence: int | None) -> None:
        """Take the answer of `seat`: it uses the other lane from an operation on, or, if None, keeps the old one."""
        where = self._slot_in(seat, attempt)
        if where is not None and sequence is not None:
            where[0].switch.agree(where[1], sequence)
        elif where is not None:
            where[0].switch.cancel(where[1])

    def _slot_in(self, seat: Seat, attempt: int) -> tuple[Attempt, Slot] | None:
        """Return the present attempt, if it has that number, and the slot of `seat` in it."""
        group, rank = self._group(), self._roster.rank_of.get(seat)
        if group is None or rank is None or self._failure.is_over:
            return None
        present = group.attempt
        if present.number != attempt or rank not in present.ranks:
            return None
        return present, present.slot_of(rank)

    def end(self, fault: Fault) -> None:
        """End the group on this rank."""
        self._failure.end_here(fault)

    def fail(self, fault: Fault) -> None:
        """End the group on all ranks."""
        self._failure.declare(fault)

    def forked(self) -> None:
        """Detach the group from its run, in a process that was forked from a member."""
        if (group := self._group()) is not None:
            group.forked()

    def confirm(self) -> None:
        """Compare the last calls of the group with those of the other ranks, before it is closed. Not on the loop."""
        if (group := self._group()) is not None:
            group.confirm()

    def close(self) -> CoveyError | None:
        """Close the group; return a mismatch of which the program was not told. Not on the loop."""
        if (group := self._group()) is None:
            return None
        group.close()
        return self._failure.untold_mismatch()
