"""The calls of one node: the core (`proto.calling`), and what performs its effects.

Any thread may call any method. One lock guards the core. Effects are performed in order by one thread at a time: the
one that caused them, or another one that performs effects already. None of them blocks.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from covey.base.config import check_timeout
from covey.base.errors import (
    CallCancelledError,
    CallRefusedError,
    ClosedError,
    CoveyError,
    DeadlineError,
    RemoteProtocolError,
)
from covey.base.numbers import Seat
from covey.base.text import printable
from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import Ending
from covey.runtime import loop as control
from covey.runtime.calls.functions import FunctionRegistry
from covey.runtime.calls.objects import ExportedObjects, Handle
from covey.runtime.calls.outcomes import failure_error, too_large
from covey.runtime.calls.serving import Serving
from covey.runtime.calls.transport import Loopback
from covey.runtime.calls.values import ValueConverter
from covey.runtime.calls.work import STREAM_CREDIT, CallStream, CallWork, StreamState
from covey.runtime.counters import process
from covey.wire import calls as wire
from covey.wire.call_values import ANYTHING, ValueDecoder, pack

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from covey.base.config import GroupConfig
    from covey.runtime.calls.transport import CallListener, CallTransport

logger = logging.getLogger("covey")


class _Outgoing:
    """A call of this node that has not ended."""

    __slots__ = ("decoder", "description", "rank", "seconds", "state", "work")

    def __init__(self, description: str, rank: int, seconds: float, decoder: ValueDecoder) -> None:
        self.description, self.rank, self.seconds, self.decoder = description, rank, seconds, decoder
        self.work: CallWork[Any] | None = None
        self.state: StreamState | None = None


class CallService:
    """Makes and serves the calls of one node."""

    def __init__(self, connect: Callable[[CallListener], CallTransport | None], config: GroupConfig, name: str) -> None:
        """`connect` returns the transport that reports to this service, None for a node that is alone.

        `name` is that of the run.
        """
        self._config, self._name = config, name
        self._core = Calling(
            handlers=config.call_handlers, handlers_per_peer=config.call_handlers, message_bytes=config.call_bytes
        )
        self._lock = threading.Lock()
        self._queue: deque[done.CallEffect] = deque()
        self._performing = threading.Lock()
        self._made: dict[tuple[int, int], _Outgoing] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_closed = False
        self.functions = FunctionRegistry()
        self._converters: dict[Seat, ValueConverter] = {}
        self._transport = Loopback(self, connect(self))
        self.seat = self._transport.seat
        self.exported = ExportedObjects(self.seat)
        self._serving = Serving(
            self,
            self.functions,
            self.exported,
            self._converter,
            name=f"{name} calls",
            message_bytes=config.call_bytes,
        )

    # Calls of this node

    def call(
        self,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        *,
        rank: int,
        timeout: float | None = None,
        target: int = 0,
        decoder: ValueDecoder = ANYTHING,
    ) -> CallWork[Any]:
        """Start a call; see `Node.call_async`. `rank` is what errors call the peer."""
        what = f"call of {printable(name, 100)!r} on rank {rank}"
        work: CallWork[Any] = CallWork(what, self)
        made = _Outgoing(what, rank, self._seconds(timeout), decoder)
        made.work = work
        self._start(peer, name, args, named, made, target=target, credit=0)
        return work

    def stream(
        self,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        *,
        rank: int,
        timeout: float | None = None,
        decoder: ValueDecoder = ANYTHING,
    ) -> CallStream[Any]:
        """Start a stream; see `Node.stream`."""
        made = _Outgoing(f"stream of {printable(name, 100)!r} on rank {rank}", rank, self._seconds(timeout), decoder)
        state = made.state = StreamState()
        number = self._start(peer, name, args, named, made, target=0, credit=STREAM_CREDIT)
        return CallStream(self, peer, number, state)

    def _seconds(self, timeout: float | None) -> float:
        return self._config.timeout if timeout is None else check_timeout(timeout)

    def _start(
        self,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        made: _Outgoing,
        *,
        target: int,
        credit: int,
    ) -> int:
        parts = pack((args, named), self._converter(peer))
        size = sum(map(len, parts))
        if size > self._config.call_bytes:
            raise CallRefusedError(
                f"{made.description}: {too_large(1, 'the list of arguments', size, self._config.call_bytes).text}"
            )
        if not 0 < len(name) <= wire.NAME_LIMIT:
            raise CallRefusedError(f"{made.description}: a name has 1 to {wire.NAME_LIMIT} characters")
        payload, now = wire.payload_of(parts), time.monotonic()
        apart = parts if payload.sizes else None
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{made.description}: this node has left its run; join again")
            number = self._core.outgoing.call(
                peer, name, payload, now + made.seconds, now, parts=apart, target=target, credit=credit
            )
            self._made[peer, number] = made
            if made.work is not None:
                made.work.began(peer, number)
            at = self._take_effects()
        self._go_on(at)
        return number

    def cancel(self, peer: Seat, number: int) -> bool:
        """Cancel a call; return False if it had ended already."""
        with self._lock:
            is_cancelled = self._core.outgoing.cancel(peer, number, Ending.CANCELLED)
            at = self._take_effects()
        self._go_on(at)
        return is_cancelled

    def taken(self, peer: Seat, number: int, items: int) -> None:
        """Ask for more items of a stream."""
        self._tell(self._core.outgoing.give_credit, peer, number, items)

    # Exported objects

    def export(self, value: Any) -> Handle:
        """Return a handle of an object."""
        return Handle(self, self.seat, self.exported.export(value), type(value).__qualname__)

    def call_object(
        self, owner: Seat, target: int, method: str, args: tuple[Any, ...], named: dict[str, Any], timeout: float | None
    ) -> CallWork[Any]:
        """Call a method of an exported object."""
        return self.call(owner, method, args, named, rank=owner, timeout=timeout, target=target)

    def drop_handle(self, owner: Seat, target: int) -> None:
        """Note that a handle is gone. On the control loop."""
        if self._is_closed:
            return
        if owner == self.seat:
            self.exported.drop(target, owner)
        else:
            self._transport.send(owner, wire.encode_call_message(wire.ReferenceRelease(target, 1)))

    # What the transport reports

    def heard(self, peer: Seat, data: bytes) -> None:
        """Take a message of another node."""
        try:
            self._tell(self._core.received, peer, wire.decode_call_message(data), time.monotonic())
        except CoveyError as error:
            self.broke_protocol(peer, error)

    def lost(self, peer: Seat) -> None:
        """End all calls with a node that is gone."""
        self.exported.lost(peer)
        self._tell(self._core.lost, peer)

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a node that broke the protocol."""
        logger.warning("the node in seat %d sent nonsense about calls and is cut off: %s", peer, printable(str(error)))
        self.lost(peer)
        self._transport.cut_off(peer, error)

    def close(self) -> None:
        """End all calls, because this node leaves its run. Closing twice is fine."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first:
                self._core.close()
                at = self._take_effects()
        if is_first:
            self._go_on(at)
            self._transport.shut()
            self._serving.close()
            self.exported.clear()

    # What serving reports

    def finished(self, peer: Seat, number: int, answer: wire.CallResult | wire.CallFailure | None, parts: Any) -> None:
        """Answer a call whose function has ended."""
        self._tell(self._core.incoming.finished, peer, number, answer, parts)

    def yielded(self, peer: Seat, number: int, payload: wire.CallPayload, parts: Any) -> None:
        """Send an item of a stream."""
        self._tell(self._core.incoming.yielded, peer, number, payload, parts)

    # The core and its effects

    def _tell(self, report: Callable[..., None], *args: Any) -> None:
        """Pass something to the core, and perform what follows."""
        with self._lock:
            try:
                report(*args)
            finally:
                at = self._take_effects()
        self._go_on(at)

    def _take_effects(self) -> float:
        """Queue the effects of the core, with the lock; return its next deadline."""
        self._queue.extend(self._core.effects())
        return self._core.next_deadline()

    def _go_on(self, next_deadline: float) -> None:
        if next_deadline < self._timer_at:
            self._timer_at = next_deadline  # so that one thread sets the timer
            control.soon(self._set_timer)
        while self._queue and self._performing.acquire(blocking=False):
            try:
                while self._queue:
                    self._perform(self._queue.popleft())
            finally:
                self._performing.release()

    def _set_timer(self) -> None:
        """Call the core at its next deadline. On the control loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            self._timer_at = at = self._core.next_deadline()
        if at != math.inf:
            self._timer = control.control_loop().call_later(max(0.001, at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer_at = math.inf
        self._timer = None
        self._tell(self._core.tick, time.monotonic())

    def _perform(self, effect: done.CallEffect) -> None:
        match effect:
            case done.SendMessage(peer, message, parts):
                self._send(Seat(peer), message, parts)
            case done.Conclude(peer, number, outcome, parts):
                self._conclude(Seat(peer), self._made.pop((peer, number)), outcome, parts)
            case done.DeliverItem(peer, number, payload):
                self._deliver(Seat(peer), number, payload)
            case done.RunHandler():
                process.calls_served += 1
                self._serving.run(effect)
            case done.StepStream(peer, number):
                self._serving.step(Seat(peer), number)
            case done.StopHandler(peer, number, is_running):
                self._serving.stop(Seat(peer), number, is_running=is_running)
            case done.FetchParts(peer, number, sizes, is_answer):
                tag = wire.parts_tag(number, is_answer=is_answer)
                report = functools.partial(self._fetched, peer, number, is_answer)
                self._transport.fetch_parts(Seat(peer), tag, sizes, report)
            case done.RefuseParts(peer, number, sizes, is_answer):
                tag = wire.parts_tag(number, is_answer=is_answer)
                self._transport.refuse_parts(Seat(peer), tag, len(sizes))
            case done.ReleaseObject(peer, target, references):
                self._release(Seat(peer), target, references)

    def _send(self, peer: Seat, message: wire.CallMessage, parts: list[Any] | None) -> None:
        if parts is not None:
            assert isinstance(message, wire.CallRequest | wire.CallResult | wire.StreamItem)
            tag = wire.parts_tag(message.number, is_answer=not isinstance(message, wire.CallRequest))
            self._transport.send_parts(peer, tag, parts)
        self._transport.send(peer, wire.encode_call_message(message))

    def _fetched(self, peer: int, number: int, is_answer: bool, parts: list[Any] | None) -> None:
        report = functools.partial(self._core.fetched, is_answer=is_answer)
        self._tell(report, peer, number, parts, time.monotonic())

    def _conclude(
        self, peer: Seat, made: _Outgoing, outcome: wire.CallResult | wire.CallFailure | Ending, parts: list[Any] | None
    ) -> None:
        error: CoveyError | None = None
        if isinstance(outcome, Ending):
            error = self._ending_error(peer, made, outcome)
        elif isinstance(outcome, wire.CallFailure):
            error = failure_error(outcome, made.description, made.rank)
        elif outcome.payload.sizes and parts is None:
            size = outcome.payload.total_bytes
            error = CallRefusedError(f"{made.description}: there is no memory for its result of {size} bytes")
        process.calls_made += 1
        process.calls_failed += error is not None
        if made.state is not None:
            made.state.end(error)
        elif made.work is not None and error is not None:
            made.work.fail(error)
        elif made.work is not None:
            assert isinstance(outcome, wire.CallResult)
            made.work.answered(self._decode(peer, made, parts or outcome.payload.inline))

    def _decode(self, peer: Seat, made: _Outgoing, parts: Sequence[Any]) -> Callable[[], Any]:
        def decode() -> Any:
            try:
                return made.decoder.decode(parts[0] if parts else b"", parts, self._converter(peer))
            except (TypeError, RemoteProtocolError) as error:
                raise CallRefusedError(f"{made.description}: the result cannot be used: {error}") from error

        return decode

    def _deliver(self, peer: Seat, number: int, payload: wire.CallPayload) -> None:
        made = self._made[peer, number]
        state = made.state
        if state is None:  # an item of a call that is no stream: the core has checked its credit
            return
        slot = state.reserve()
        if not payload.sizes:
            state.arrived(slot, self._decode(peer, made, payload.inline))
            return

        def then(parts: list[Any] | None) -> None:
            if parts is not None:
                state.arrived(slot, self._decode(peer, made, parts))
            else:
                self.cancel(peer, number)

        self._transport.fetch_parts(peer, wire.parts_tag(number, is_answer=True), payload.sizes, then)

    def _ending_error(self, peer: Seat, made: _Outgoing, why: Ending) -> CoveyError:
        match why:
            case Ending.LATE:
                text = f"{made.description}: no answer within the timeout of {made.seconds:g} s"
                return DeadlineError(text, late=(made.rank,))
            case Ending.CANCELLED:
                return CallCancelledError(f"{made.description} was cancelled")
            case Ending.LOST:
                return self._transport.lost_error(peer, made.rank, made.description)
            case Ending.CLOSED:
                return ClosedError(f"{made.description}: this node left its run before the answer came")

    def _release(self, peer: Seat, target: int, references: int) -> None:
        try:
            self.exported.drop(target, peer, references)
        except RemoteProtocolError as error:
            self.broke_protocol(peer, error)

    def _converter(self, peer: Seat) -> ValueConverter:
        converter = self._converters.get(peer)
        if converter is None:
            converter = self._converters[peer] = ValueConverter(self, self.seat, peer, self.exported)
        return converter
