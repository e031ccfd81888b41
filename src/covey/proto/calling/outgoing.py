"""The calls that one node makes.

A call is open from its request to the answer of the other node. At most CALLS_LIMIT calls to one node are open; the
others wait here. A caller that gives up gets its outcome at once; the call stays open until the other node has
answered, so that both ends count the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import PRIORITIES, REALTIME
from covey.proto.calling.effects import (
    CallEffect,
    CallEnding,
    Conclude,
    DeliverItem,
    FetchParts,
    GiveUpHandles,
    RefuseParts,
    SendMessage,
)
from covey.proto.calling.turns import Deadlines
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator

CALLS_LIMIT: Final = 256
"""Open calls from one node to another; also what the called node accepts."""
_NO_PAYLOAD: Final = wire.CallPayload()


def arguments_share(depth: int, priority: int) -> float:
    """Return the share of what may wait at the other node that the arguments of a call may use up: from a half on.

    Arguments wait there until there is memory, and the memory may be given back only when deeper calls, and answers,
    have come. So each depth, and in it each class, has some room that no call before it in this order can use up.
    """
    return 0.5 + (depth * len(PRIORITIES) + len(PRIORITIES) - 1 - priority) / (2 * wire.DEPTH_LIMIT * len(PRIORITIES))


@dataclass(slots=True)
class _Made:
    """A call that this node made."""

    peer: int
    number: int
    """What this node calls it."""
    name: str
    payload: wire.CallPayload
    parts: Any
    deadline: float
    target: int
    credit: int
    """The items of a stream that may still come; 0 if there are none, or it is no stream."""
    is_stream: bool
    priority: int = REALTIME
    trace: str = ""
    depth: int = 0
    sent_as: int = 0
    """Its number in messages: those of requests grow. 0 while it waits."""
    is_concluded: bool = False
    """Whether the caller has its outcome."""


class OutgoingCalls:
    """The calls of this node to all others."""

    def __init__(self, effects: deque[CallEffect]) -> None:
        self._effects = effects
        self._numbers: dict[int, int] = {}
        """By peer: the number of the last call."""
        self._sent: dict[int, int] = {}
        """By peer: the number of the last request."""
        self._waiting: dict[int, tuple[dict[int, _Made], ...]] = {}
        """By peer, class and number: calls whose requests are not sent yet, in order."""
        self._open: dict[tuple[int, int], _Made] = {}
        """By peer and number in messages."""
        self._by_number: dict[tuple[int, int], _Made] = {}
        """The same calls by peer and number here."""
        self._open_to: dict[int, int] = {}
        self._fetching: dict[tuple[int, int], wire.CallResult] = {}
        """Results whose parts are on the way."""
        self._lost: dict[int, CallEnding] = {}
        """Peers that are gone for good, and why calls to them end."""
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._open) + sum(len(waiting) for classes in self._waiting.values() for waiting in classes)

    def call(
        self,
        peer: int,
        name: str,
        payload: wire.CallPayload,
        deadline: float,
        now: float,
        *,
        parts: Any = None,
        target: int = 0,
        credit: int = 0,
        priority: int = REALTIME,
        trace: str = "",
        depth: int = 0,
    ) -> int:
        """Make a call, with `credit` a stream of that many items at first; return its number."""
        number = self._numbers[peer] = self._numbers.get(peer, 0) + 1
        made = _Made(peer, number, name, payload, parts, deadline, target, credit, credit > 0, priority, trace, depth)
        if peer in self._lost:
            self._conclude(made, self._lost[peer])
            return number
        if peer not in self._waiting:
            self._waiting[peer] = ({}, {}, {})
        self._waiting[peer][priority][number] = made
        self.deadlines.add((peer, number), deadline)
        self._send_waiting(peer, now)
        return number

    def _send_waiting(self, peer: int, now: float) -> None:
        classes = self._waiting.get(peer, ())
        while self._open_to.get(peer, 0) < CALLS_LIMIT:
            if (waiting := next(filter(None, classes), None)) is None:
                break
            made = waiting.pop(next(iter(waiting)))
            made.sent_as = number = self._sent[peer] = self._sent.get(peer, 0) + 1
            self._open[peer, number] = self._by_number[peer, made.number] = made
            self._open_to[peer] = self._open_to.get(peer, 0) + 1
            left = max(0.0, made.deadline - now)
            request = wire.CallRequest(
                number, made.name, left, made.payload, made.target, made.credit, made.priority, made.trace, made.depth
            )
            self._effects.append(SendMessage(peer, request, made.parts, made.priority))
            made.payload, made.parts = _NO_PAYLOAD, None
        if not any(classes):
            self._waiting.pop(peer, None)

    def cancel(self, peer: int, number: int, why: CallEnding) -> bool:
        """End a call for its caller; return False if it had ended already."""
        if (made := self._by_number.get((peer, number))) is not None:
            if made.is_concluded:
                return False
            if (peer, made.sent_as) not in self._fetching:
                self._effects.append(SendMessage(peer, wire.CallCancel(made.sent_as)))
        else:
            found = (waiting.pop(number, None) for waiting in self._waiting.get(peer, ()))
            if (made := next(filter(None, found), None)) is None:
                return False
            if made.payload.handles:
                self._effects.append(GiveUpHandles(peer, made.payload))
        self._conclude(made, why)
        return True

    def answered(self, peer: int, message: wire.CallResult | wire.CallFailure, now: float) -> None:
        """Take the answer to a call.

        Raises:
            RemoteProtocolError: there is no such open call.
        """
        key = peer, message.number
        made = self._open.get(key)
        if made is None and peer in self._lost:
            return  # this node has given the call up because it leaves, and the answer crossed its last messages
        if made is None or key in self._fetching:
            raise RemoteProtocolError(f"an answer to call {message.number}, which is not open")
        sizes = message.payload.sizes if isinstance(message, wire.CallResult) else ()
        if sizes and isinstance(message, wire.CallResult) and not made.is_concluded:
            self._fetching[key] = message
            self._effects.append(FetchParts(peer, message.number, sizes, is_answer=True))
            return
        if sizes:
            self._effects.append(RefuseParts(peer, message.number, sizes, is_answer=True))
        self._conclude(made, message)
        self._close(made, now)

    def fetched(self, peer: int, number: int, parts: Any, now: float) -> None:
        """Take the parts of a result; None if they do not come."""
        message = self._fetching.pop((peer, number), None)
        made = self._open.get((peer, number))
        if message is not None and made is not None:
            self._conclude(made, message, parts)
            self._close(made, now)

    def item(self, peer: int, message: wire.StreamItem) -> None:
        """Take an item of a stream.

        Raises:
            RemoteProtocolError: there is no such stream, or it has no credit.
        """
        made = self._open.get((peer, message.number))
        if made is None and peer in self._lost:
            return
        if made is None or not made.credit or (peer, message.number) in self._fetching:
            raise RemoteProtocolError(f"an item of stream {message.number}, which was not asked for")
        made.credit -= 1
        if not made.is_concluded:
            self._effects.append(DeliverItem(peer, made.number, message.payload))
        elif message.payload.sizes:
            self._effects.append(RefuseParts(peer, message.number, message.payload.sizes, is_answer=True))

    def give_credit(self, peer: int, number: int, items: int) -> None:
        """Ask for more items of a stream; does nothing if it has ended."""
        made = self._by_number.get((peer, number))
        if made is not None and made.is_stream and not made.is_concluded:
            made.credit += items
            self._effects.append(SendMessage(peer, wire.StreamCredit(made.sent_as, items)))

    def tick(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        for peer, number in self.deadlines.take_due(now):
            self.cancel(peer, number, CallEnding.LATE)

    def lost(self, peer: int, why: CallEnding = CallEnding.LOST) -> None:
        """End all calls to a node that is gone for good, now and later."""
        self._lost.setdefault(peer, why)
        for made in [*self._of(peer)]:
            self._conclude(made, why)
            self._open.pop((peer, made.sent_as), None)
            self._by_number.pop((peer, made.number), None)
            self._fetching.pop((peer, made.sent_as), None)
        self._waiting.pop(peer, None)
        self._open_to.pop(peer, None)

    def close(self, but: int | None = None) -> None:
        """End all calls, except those to one node, because this node is not in the run any more."""
        for peer in sorted({*self._waiting, *self._open_to} - {but}):
            self.lost(peer, CallEnding.CLOSED)

    def _of(self, peer: int) -> Iterator[_Made]:
        yield from (made for (other, _), made in self._open.items() if other == peer)
        for waiting in self._waiting.get(peer, ()):
            yield from waiting.values()

    def _conclude(
        self, made: _Made, outcome: wire.CallResult | wire.CallFailure | CallEnding, parts: Any = None
    ) -> None:
        self.deadlines.discard((made.peer, made.number))
        if not made.is_concluded:
            made.is_concluded = True
            self._effects.append(Conclude(made.peer, made.number, outcome, parts))

    def _close(self, made: _Made, now: float) -> None:
        del self._open[made.peer, made.sent_as], self._by_number[made.peer, made.number]
        self._open_to[made.peer] -= 1
        if not self._open_to[made.peer]:
            del self._open_to[made.peer]
        if made.peer in self._waiting:
            self._send_waiting(made.peer, now)
