"""All calls of one node, as a core with deadlines (`proto.core`): messages and time in, effects out."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from covey.proto.calling.effects import CallEffect, CountReference, TakeHandles
from covey.proto.calling.incoming import BOUNDLESS, CALL_PAYLOAD_BYTES, HANDLERS, ArgumentMemory, IncomingCalls
from covey.proto.calling.outgoing import OutgoingCalls
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections.abc import Sequence


_WITH_PAYLOAD: Final = (wire.CallRequest, wire.CallResult, wire.StreamItem)


class Calling:
    """The calls that this node makes (`outgoing`) and serves (`incoming`). Peers are seats; one may be this node."""

    def __init__(
        self,
        *,
        handlers: int = HANDLERS,
        message_bytes: int = CALL_PAYLOAD_BYTES,
        memory: ArgumentMemory = BOUNDLESS,
    ) -> None:
        self.waiting: deque[CallEffect] = deque()
        """The effects that `effects` returns. A driver with several threads may take them from its left end instead."""
        self.outgoing = OutgoingCalls(self.waiting)
        self.incoming = IncomingCalls(self.waiting, handlers=handlers, message_bytes=message_bytes, memory=memory)

    def received(self, peer: int, message: wire.CallMessage, now: float) -> None:
        """Take a message of another node.

        Raises:
            RemoteProtocolError: no correct node sends it now; the peer must be treated as lost.
        """
        if isinstance(message, _WITH_PAYLOAD) and message.payload.handles:
            self.waiting.append(TakeHandles(peer, message.payload))
        match message:
            case wire.CallRequest():
                self.incoming.called(peer, message, now)
            case wire.CallCancel(number):
                self.incoming.cancelled(peer, number, now)
            case wire.StreamCredit():
                self.incoming.credited(peer, message)
            case wire.CallResult() | wire.CallFailure():
                self.outgoing.answered(peer, message, now)
            case wire.StreamItem():
                self.outgoing.item(peer, message)
            case wire.ReferenceRelease() | wire.ReferenceShare() | wire.ReferenceClaim():
                self.waiting.append(CountReference(peer, message))

    def fetched(self, peer: int, number: int, parts: Any, now: float, *, is_answer: bool) -> None:
        """Take the parts of a payload; None if they do not come."""
        if is_answer:
            self.outgoing.fetched(peer, number, parts, now)
        else:
            self.incoming.fetched(peer, number, parts)

    def lost(self, peer: int, now: float) -> None:
        """End all calls with a node that is gone."""
        self.outgoing.lost(peer)
        self.incoming.lost(peer, now)

    def close(self) -> None:
        """End all calls, because this node leaves."""
        self.incoming.close()
        self.outgoing.close()

    def effects(self) -> Sequence[CallEffect]:
        """Return the effects to perform, in order, and clear them."""
        effects = list(self.waiting)
        self.waiting.clear()
        return effects

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self.outgoing.deadlines.next(), self.incoming.deadlines.next())

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        self.outgoing.tick(now)
        self.incoming.tick(now)
