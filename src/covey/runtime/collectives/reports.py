"""What a group's node reports to it: messages of other ranks about the group, lost peers, new lanes, a fork.

All methods run on the control loop. They record faults and wake threads; they never touch a lane that is in use, so
each lane is used by one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.numbers import Rank
from covey.net.host import tcp
from covey.runtime.collectives.part import EnginePart
from covey.runtime.fault import Fault
from covey.runtime.lanes.tuning.urgency import Urgency

if TYPE_CHECKING:
    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat, Slot
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.members.group_registry import GroupMessage
    from covey.wire import messages


class ControlReports(EnginePart):
    """A group as its node sees it (`members.node.Member`). The engine may be dropped while a report is under way."""

    has_rings = True
    urgency = Urgency.TENSORS

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.members, self.generation, self.survives = engine.members, engine.generation, engine.survives

    def heard(self, seat: Seat, message: GroupMessage) -> None:
        """Act on a message from the rank in `seat`."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        engine = self._owner()
        if engine is None or engine.node is None or (rank := engine.roster.rank_of.get(seat)) is None:
            return
        if isinstance(message, messages.Revoke):
            self._revoked(engine, rank, message)
        elif isinstance(message, messages.Calls):
            if engine.atomic is None:
                engine.stalls.recall(rank, message)
        else:
            if isinstance(message, messages.Announce) and (fault := engine.failure.fault) is not None:
                # The revocation may have reached the asking rank before it made the group.
                engine.node.tell((seat,), engine.failure.revocation(fault))
            engine.stalls.heard(rank, message)

    def _revoked(self, engine: Engine, sender: Rank, message: messages.Revoke) -> None:
        ranks = tuple(Rank(rank) for rank in message.ranks if rank in engine.ranks)
        fault = Fault(message.kind, message.text, ranks or (sender,))
        if engine.atomic is not None:
            engine.atomic.note_reason(fault)
        elif fault.kind == "PeerLostError":
            engine.suspicion.heard(sender, message)
            self._suspect(engine, fault)
        else:
            engine.failure.end_here(fault)

    def peer_gone(self, seat: Seat, *, left: bool) -> None:
        """Act on the loss of the process in `seat`, or on its orderly leaving."""
        engine = self._owner()
        if engine is None or (rank := engine.roster.rank_of.get(seat)) is None:
            return
        if engine.atomic is not None:
            engine.routing.peer_lost(rank)
        elif not left:
            other = engine.roster.peer(rank)
            why = f"is gone: {other.reason}" if other is not None and other.reason else "is gone"
            if other is not None and other.failure:
                why = other.how_it_went()
            self._suspect(engine, Fault("PeerLostError", f"{engine.roster.describe((rank,))} {why}", (rank,)))

    def _suspect(self, engine: Engine, fault: Fault) -> None:
        """Record a loss in a group that ends with its first one. The thread that runs an operation decides."""
        engine.suspicion.note(fault)
        if engine.operation.is_running:
            engine.failure.interrupt(fault)
        else:
            engine.suspicion.settle()

    def lane_arrived(self, seat: Seat, purpose: str, lane: Any) -> bool:
        """Pass on a lane for messages from `seat`; tell whether the group uses it."""
        engine = self._owner()
        if engine is None or purpose != "messages":
            return False
        return engine.routing.lane_arrived(engine.roster.rank_of[seat], lane)

    def sent_to(self, seat: Seat) -> tuple[int, int]:
        """Return the bytes that were sent to `seat`, and in how many transfers."""
        engine = self._owner()
        rank = None if engine is None else engine.roster.rank_of.get(seat)
        if engine is None or rank is None:
            return 0, 0
        traffic = engine.counters.recorder.traffic()[rank]
        return traffic.sent_bytes, traffic.sends

    def lane_to(self, seat: Seat) -> Any:
        """Return the open lane to `seat`; None if there is none."""
        engine = self._owner()
        rank = None if engine is None else engine.roster.rank_of.get(seat)
        return None if engine is None or rank is None else engine.attempt.open_lane(rank)

    def lane_stuck(self, seat: Seat, attempt: int) -> None:
        """Act on a lane to `seat` whose bytes are not acknowledged, while no operation runs that would notice it.

        This rank has sent its part and gone on; the other one waits for it.
        """
        where = self._slot_in(seat, attempt)
        if where is None or (engine := where[0].engine).operation.is_running:
            return
        if engine.atomic is not None:
            assert engine.generation is not None
            engine.generation.disturbed(attempt)
        else:
            rank = engine.roster.rank_of[seat]
            text = f"{engine.roster.describe((rank,))} {tcp.STUCK}"
            self._suspect(engine, Fault("PeerLostError", text, (rank,)))

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
        engine = self._owner()
        rank = None if engine is None or engine.is_over else engine.roster.rank_of.get(seat)
        if engine is None or rank is None or engine.attempt.number != attempt or rank not in engine.attempt.ranks:
            return None
        return engine.attempt, engine.attempt.slot_of(rank)

    def end(self, fault: Fault) -> None:
        """End the group on this rank."""
        if (engine := self._owner()) is not None:
            engine.failure.end_here(fault)

    def fail(self, fault: Fault) -> None:
        """End the group on all ranks."""
        if (engine := self._owner()) is not None:
            engine.failure.declare(fault)

    def forked(self) -> None:
        """Detach the group from its run, in a process that was forked from a member."""
        if (engine := self._owner()) is not None:
            engine.forked()

    def confirm(self) -> None:
        """Compare the last calls of the group with those of the other ranks, before it is closed. Not on the loop."""
        if (engine := self._owner()) is not None:
            engine.confirm()

    def close(self) -> CoveyError | None:
        """Close the group; return a mismatch of which the program was not told. Not on the loop."""
        if (engine := self._owner()) is None:
            return None
        engine.close()
        return engine.failure.untold_mismatch()
