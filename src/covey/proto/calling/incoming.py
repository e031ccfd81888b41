"""The calls that one node serves.

A call waits for the parts of its arguments, then for a handler; each queue serves the peers in turn. It is answered
once: with what its function returned, or before that, because it was cancelled, its deadline passed, or this node
leaves.

Parts are fetched when there is memory for them, which other calls and the program may hold. Whatever these hold, a call
gets memory if no other one of its depth has any: one that a function makes for a call is deeper than it. So of all
calls of a run that wait for memory, the deepest ones wait for none that waits for them. Deeper ones go first while
there is room, but no number of them keeps those of another depth waiting.

A thread cannot be ended. So a function that still runs after the answer gives its handler back and is *left over*; so
is the closing of a stream that was answered. As many functions may be left over as there are handlers; beyond that, a
function keeps its handler, and a closing waits. A peer is refused whose calls would wait only for functions that have
gone on for ANSWERED_CALLS_SECONDS after the answer. So at most twice the number of handlers run, no peer has all of
them, and whatever functions do, calls are answered.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import RemoteProtocolError
from covey.proto.calling.effects import (
    CallEffect,
    CloseStream,
    FetchParts,
    GiveUpHandles,
    RefuseParts,
    RunHandler,
    SendMessage,
    StepStream,
    StopHandler,
)
from covey.proto.calling.outgoing import CALLS_LIMIT
from covey.proto.calling.turns import ClassedQueue, Deadlines, FairQueue, HandlerShares
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections import deque

HANDLERS: Final = 64
"""Functions that run at the same time on one node."""
CALL_PAYLOAD_BYTES: Final = 1 << 30
"""Bytes of the arguments, or of the result, of one call."""

ANSWERED_CALLS_SECONDS: Final = 5.0
"""How long calls wait for functions whose own calls were answered to return."""


class _CallState(enum.Enum):
    """How far a call is that this node serves."""

    NEW = "new"
    WAITS_FOR_MEMORY = "waits for memory"
    FETCHING = "fetching"
    READY = "ready"
    """It waits for a handler: to begin, or, as a stream, to go on."""
    RUNNING = "running"
    """Its function has a handler; if the call is answered, it waits to be left over."""
    PARKED = "parked"
    """A stream that has no credit."""
    UNCLOSED = "unclosed"
    """A stream that was answered between two items, and waits for its closing."""
    LEFT_OVER = "left over"
    """It was answered, and its function runs on, or its stream is being closed."""
    DONE = "done"


@dataclass(slots=True, eq=False)
class _Served:
    """A call of another node."""

    peer: int
    number: int
    request: wire.CallRequest
    deadline: float
    state: _CallState
    credit: int
    has_memory: bool = False
    """Whether the parts of its arguments were asked for."""
    parts: Any = None
    """What was fetched."""
    is_answered: bool = False
    has_begun: bool = False
    is_stuck: bool = False
    """Whether its function still has its handler ANSWERED_CALLS_SECONDS after the answer."""


class ArgumentMemory(Protocol):
    """Memory that arguments share with everything else of the process."""

    def reserve(self, nbytes: int, *, is_needed: bool) -> bool:
        """Set so much aside until the parts are fetched, if there is room, or if it `is_needed`; return whether."""

    def note_wait(self) -> None:
        """Take note that a call waits for memory."""


class BoundlessMemory:
    """There is always room."""

    def reserve(self, nbytes: int, *, is_needed: bool) -> bool:
        """Return True."""
        return True

    def note_wait(self) -> None:
        """Do nothing: no call waits."""


BOUNDLESS: Final = BoundlessMemory()


class IncomingCalls:
    """The calls of other nodes to this one."""

    def __init__(
        self,
        effects: deque[CallEffect],
        *,
        handlers: int = HANDLERS,
        message_bytes: int = CALL_PAYLOAD_BYTES,
        memory: ArgumentMemory = BOUNDLESS,
    ) -> None:
        """Serve up to `handlers` calls at a time, and arguments of up to `message_bytes` in all and for each call."""
        self._effects, self._memory = effects, memory
        self._message_bytes = message_bytes
        self._calls: dict[tuple[int, int], _Served] = {}
        """Not answered, or still running."""
        self._open_from: dict[int, int] = {}
        """By peer: calls without an answer."""
        self._last: dict[int, int] = {}
        """By peer: the number of its last call."""
        self._for_memory: tuple[ClassedQueue[_Served], ...] = tuple(ClassedQueue() for _ in range(wire.DEPTH_LIMIT))
        """By depth."""
        self.waiting_for_memory = 0
        """How many calls wait for memory."""
        self._with_memory = [0] * wire.DEPTH_LIMIT
        """By depth: calls that have memory."""
        self._for_handler: ClassedQueue[_Served] = ClassedQueue()
        self._answered: FairQueue[_Served] = FairQueue()
        """Answered calls that wait to be left over."""
        self._held_bytes = 0
        self._handlers, self._left_over = HandlerShares(handlers), HandlerShares(handlers)
        self._stuck: dict[int, int] = {}
        """By peer: functions that are stuck."""
        self._now = 0.0
        self._is_closing = False
        self.deadlines = Deadlines()

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def running(self) -> int:
        """The number of functions that have a handler, streams that make an item among them."""
        return self._handlers.taken

    @property
    def left_over(self) -> int:
        """The number of functions that run on without a handler, and of streams that are being closed."""
        return self._left_over.taken

    @property
    def unanswered(self) -> int:
        """The number of calls without an answer."""
        return sum(self._open_from.values())

    # What the caller sends

    def called(self, peer: int, request: wire.CallRequest, now: float) -> None:
        """Take a call.

        Raises:
            RemoteProtocolError: its number is not new, or too many calls of this peer are open.
        """
        if request.number <= self._last.get(peer, 0):
            raise RemoteProtocolError(f"call {request.number} came after call {self._last[peer]}")
        if self._open_from.get(peer, 0) >= CALLS_LIMIT:
            raise RemoteProtocolError(f"more than {CALLS_LIMIT} calls at a time")
        if request.payload.inline and request.payload.sizes:
            raise RemoteProtocolError("a payload with parts and their sizes")
        self._last[peer], self._now = request.number, now
        deadline = now + request.seconds
        served = _Served(peer, request.number, request, deadline, _CallState.NEW, request.credit)
        self._calls[peer, request.number] = served
        self._open_from[peer] = self._open_from.get(peer, 0) + 1
        self.deadlines.add((peer, request.number), deadline)
        total = sum(request.payload.sizes or map(len, request.payload.inline))
        if self._is_closing:
            self._fail(served, wire.CLOSING, "the node that was called is leaving")
        elif total > self._message_bytes:
            text = f"the arguments have {total} bytes, and the node that was called takes {self._message_bytes}"
            self._fail(served, wire.TOO_LARGE, text)
        elif request.payload.sizes:
            served.state = _CallState.WAITS_FOR_MEMORY
            self._for_memory[request.depth].push(peer, served, request.priority)
            self.waiting_for_memory += 1
            self._proceed()
            if served.state is _CallState.WAITS_FOR_MEMORY:
                self._memory.note_wait()
        elif self._for_handler.count or not self._handlers.take(peer):
            self._queue(served)
            self._proceed()
        else:
            self._begin(served)

    def cancelled(self, peer: int, number: int, now: float) -> None:
        """Cancel a call for its caller; if it was answered meanwhile, nothing happens."""
        self._check_number(peer, number)
        self._now = now
        served = self._calls.get((peer, number))
        if served is not None and not served.is_answered:
            self._fail(served, wire.CANCELLED, "the caller cancelled the call")
            self._proceed()

    def credited(self, peer: int, message: wire.StreamCredit) -> None:
        """Take credit for a stream; if it has ended meanwhile, nothing happens.

        Raises:
            RemoteProtocolError: there was no such call, or the credit is beyond the limit.
        """
        self._check_number(peer, message.number)
        served = self._calls.get((peer, message.number))
        if served is None or served.is_answered:
            return
        if not served.request.credit or served.credit + message.items > wire.CREDIT_LIMIT:
            raise RemoteProtocolError(f"credit of {message.items} items for call {message.number}")
        served.credit += message.items
        if served.state is _CallState.PARKED:
            self._queue(served)
            self._proceed()

    def _check_number(self, peer: int, number: int) -> None:
        if number > self._last.get(peer, 0):
            raise RemoteProtocolError(f"a message about call {number}, which was never made")

    # What this node reports

    def fetched(self, peer: int, number: int, parts: Any) -> None:
        """Take the parts of a call's arguments; None if they do not come."""
        served = self._calls.get((peer, number))
        if served is None or served.state is not _CallState.FETCHING:
            return
        if served.is_answered:
            self._forget(served)
        else:
            served.parts = parts
            self._queue(served)
        self._proceed()

    def yielded(self, peer: int, number: int, payload: wire.CallPayload, parts: Any = None) -> None:
        """Send the item that a stream has made."""
        served = self._stop_running(peer, number)
        if served is None:
            return
        if served.is_answered:
            if payload.handles:
                self._effects.append(GiveUpHandles(peer, payload))
            self._leave_over(served, _CallState.UNCLOSED)
        else:
            served.credit -= 1
            self._effects.append(SendMessage(peer, wire.StreamItem(number, payload), parts, served.request.priority))
            if served.credit:
                self._queue(served)
            else:
                served.state = _CallState.PARKED
        self._proceed()

    def finished(
        self, peer: int, number: int, answer: wire.CallResult | wire.CallFailure | None, parts: Any = None
    ) -> None:
        """Answer a call whose function has ended; `answer` is None for one that was stopped, or a closed stream."""
        served = self._stop_running(peer, number)
        if served is None:
            return
        if not served.is_answered:
            if answer is None:
                answer = wire.CallFailure(number, wire.CANCELLED, "", "the handler was cancelled")
            self._effects.append(SendMessage(peer, answer, parts, served.request.priority))
            self._note_answer(served)
        elif isinstance(answer, wire.CallResult) and answer.payload.handles:
            self._effects.append(GiveUpHandles(peer, answer.payload))
        self._forget(served)
        if self.waiting_for_memory or self._for_handler.count or self._answered.lines:
            self._proceed()

    def memory_came(self) -> None:
        """Look again whether there is room for the calls that wait for memory."""
        if self.waiting_for_memory:
            self._proceed()

    def tick(self, now: float) -> None:
        """Fail the calls whose deadline has passed, and note functions that do not return."""
        self._now = now
        for key in self.deadlines.take_due(now):
            served = self._calls[key]
            if served.is_answered:
                served.is_stuck = True
                self._stuck[served.peer] = self._stuck.get(served.peer, 0) + 1
            else:
                text = f"{served.request.name!r} was not done within its timeout of {served.request.seconds:.3g} s"
                if served.state is _CallState.READY and not served.has_begun:
                    text += f": it waited for one of {self.running} functions to return"
                elif served.state is _CallState.WAITS_FOR_MEMORY:
                    text += (
                        f": the node that was called had no memory for {served.request.payload.total_bytes} bytes of "
                        "arguments; its pool_bytes and call_bytes say how much there is"
                    )
                self._fail(served, wire.DEADLINE_PASSED, text)
        self._proceed()

    def lost(self, peer: int, now: float) -> None:
        """Drop the calls of a node that is gone, and stop their functions."""
        self._now = now
        for served in [served for served in self._calls.values() if served.peer == peer]:
            if not served.is_answered:
                self._end(served)
        self._last.pop(peer, None)
        self._proceed()

    def drain(self) -> None:
        """Refuse calls that come from now on; those that have come are served."""
        self._is_closing = True

    def close(self) -> None:
        """Answer all calls, and refuse those that come from now on, because this node leaves."""
        self._is_closing = True
        for served in list(self._calls.values()):
            if not served.is_answered:
                self._fail(served, wire.CLOSING, "the node that was called is leaving")
        self._proceed()

    # Helpers

    def _proceed(self) -> None:
        """Start what there are memory and handlers for."""
        if self.waiting_for_memory:
            self._give_memory()
        while (served := self._answered.pop(lambda peer, _: self._left_over.take(peer))) is not None:
            if served.state is _CallState.RUNNING:
                self._free_handler(served)
            else:
                self._effects.append(CloseStream(served.peer, served.number))
            served.state = _CallState.LEFT_OVER
        while (served := self._for_handler.pop(lambda peer, _: self._handlers.take(peer))) is not None:
            self._begin(served)
        if self._stuck and self._refuse_hopeless():
            self._proceed()

    def _give_memory(self) -> None:
        """Fetch the parts of the calls for which there is memory, the deepest ones first."""
        for queue in reversed(self._for_memory):
            while (served := queue.pop(self._has_memory)) is not None:
                self.waiting_for_memory -= 1
                self._with_memory[served.request.depth] += 1
                served.state = _CallState.FETCHING
                served.has_memory = True
                self._held_bytes += served.request.payload.total_bytes
                sizes = served.request.payload.sizes
                self._effects.append(FetchParts(served.peer, served.number, sizes, is_answer=False))

    def _begin(self, served: _Served) -> None:
        """Let a call use the handler that its peer has taken: to begin, or, as a stream, to go on."""
        served.state = _CallState.RUNNING
        if served.has_begun:
            self._effects.append(StepStream(served.peer, served.number))
        else:
            served.has_begun = True
            parts, served.parts = served.parts, None
            self._effects.append(RunHandler(served.peer, served.number, served.request, served.deadline, parts))

    def _refuse_hopeless(self) -> bool:
        """Refuse the calls that can get a handler only when a stuck function returns; tell whether there were any."""
        has_refused, are_all_stuck = False, sum(self._stuck.values()) == self._handlers.limit
        for peer in self._for_handler.peers():
            has = self._handlers.of(peer)
            if are_all_stuck or (has and self._stuck.get(peer) == has):
                count = self._handlers.of(peer) + self._left_over.of(peer)
                text = (
                    f"{count} functions that this node called, and {self.running + self.left_over} of all nodes, still "
                    "run though their calls have ended, and no further one is started before some of them return; a "
                    "long function should return when node.caller().is_cancelled"
                )
                for served in self._for_handler.of(peer):
                    self._fail(served, wire.NO_RESULT, text)
                    has_refused = True
        return has_refused

    def _has_memory(self, _peer: int, served: _Served) -> bool:
        size = served.request.payload.total_bytes
        if not self._with_memory[served.request.depth]:
            return self._memory.reserve(size, is_needed=True)
        return self._held_bytes + size <= self._message_bytes and self._memory.reserve(size, is_needed=False)

    def _queue(self, served: _Served) -> None:
        served.state = _CallState.READY
        self._for_handler.push(served.peer, served, served.request.priority)

    def _leave_over(self, served: _Served, state: _CallState) -> None:
        """Let an answered call wait until it may be left over."""
        served.state = state
        self._answered.push(served.peer, served)

    def _stop_running(self, peer: int, number: int) -> _Served | None:
        """Note that a function has returned, or that a stream is closed; None if there is no such function."""
        served = self._calls.get((peer, number))
        if served is None or served.state not in (_CallState.RUNNING, _CallState.LEFT_OVER):
            return None
        if served.state is _CallState.LEFT_OVER:
            self._left_over.give_back(peer)
        elif served.is_answered:
            self._answered.remove(peer, served)
            self._free_handler(served)
        else:
            self._handlers.give_back(peer)
        served.state = _CallState.DONE
        return served

    def _free_handler(self, served: _Served) -> None:
        """Take the handler of a call that was answered ANSWERED_CALLS_SECONDS ago at most, or that is stuck."""
        self._handlers.give_back(served.peer)
        self.deadlines.discard((served.peer, served.number))
        if served.is_stuck:
            served.is_stuck = False
            self._stuck[served.peer] -= 1
            if not self._stuck[served.peer]:
                del self._stuck[served.peer]

    def _fail(self, served: _Served, kind: int, text: str) -> None:
        self._answer(served, wire.CallFailure(served.number, kind, "", text))

    def _answer(self, served: _Served, answer: wire.CallResult | wire.CallFailure, parts: Any = None) -> None:
        self._effects.append(SendMessage(served.peer, answer, parts))
        self._end(served)

    def _end(self, served: _Served) -> None:
        """Note that a call needs no answer any more, and stop what is under way for it."""
        peer, number, sizes = served.peer, served.number, served.request.payload.sizes
        self._note_answer(served)
        match served.state:
            case _CallState.FETCHING:
                return  # until the parts are here
            case _CallState.RUNNING:
                self.deadlines.add((peer, number), self._now + ANSWERED_CALLS_SECONDS)
                self._effects.append(StopHandler(peer, number))
                self._leave_over(served, _CallState.RUNNING)
                return  # until its function returns
            case _CallState.WAITS_FOR_MEMORY:
                self._for_memory[served.request.depth].remove(peer, served)
                self.waiting_for_memory -= 1
            case _CallState.READY:
                self._for_handler.remove(peer, served)
        if served.has_begun and served.state is not _CallState.DONE:
            self._leave_over(served, _CallState.UNCLOSED)
            return  # until its stream is closed
        if sizes and served.state in (_CallState.NEW, _CallState.WAITS_FOR_MEMORY):
            self._effects.append(RefuseParts(peer, number, sizes, is_answer=False))
        self._forget(served)

    def _note_answer(self, served: _Served) -> None:
        served.is_answered = True
        self.deadlines.discard((served.peer, served.number))
        self._open_from[served.peer] -= 1
        if not self._open_from[served.peer]:
            del self._open_from[served.peer]

    def _forget(self, served: _Served) -> None:
        del self._calls[served.peer, served.number]
        if served.has_memory:
            self._held_bytes -= served.request.payload.total_bytes
            self._with_memory[served.request.depth] -= 1
