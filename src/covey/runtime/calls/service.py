"""The calls of one node: the core (`proto.calling`), and what performs its effects.

Any thread may call any method. One lock guards the core. Effects are performed in order by one thread at a time: the
one that caused them, or another one that performs effects already. None of them blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import check_timeout
from covey.base.errors import (
    CallRefusedError,
    ClosedError,
    CoveyError,
    RemoteProtocolError,
)
from covey.base.numbers import Rank, Seat
from covey.base.text import printable
from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import Ending
from covey.proto.calling.tags import parts_tag
from covey.runtime import loop as control
from covey.runtime.calls.functions import FunctionRegistry
from covey.runtime.calls.made import MadeCall, MadeCalls
from covey.runtime.calls.objects import ExportedObjects, Handle
from covey.runtime.calls.outcomes import too_large
from covey.runtime.calls.serving import Serving
from covey.runtime.calls.transport import Loopback
from covey.runtime.calls.values import ValueConverter
from covey.runtime.calls.work import STREAM_CREDIT, CallStream, CallWork, StreamState
from covey.runtime.counters import process
from covey.runtime.held_signals import HeldSignals
from covey.wire import calls as wire
from covey.wire.call_values import ANYTHING, ValueDecoder, pack

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.runtime.calls.transport import CallListener, CallTransport
    from covey.runtime.fault import Fault
    from covey.runtime.work import Work

logger = logging.getLogger("covey")

PERFORM_SECONDS: Final = 5.0
"""How long a node that leaves waits for a thread that sends an answer."""


@functools.lru_cache(maxsize=1024)
def _description(kind: str, name: str, rank: int) -> str:
    return f"{kind} of {printable(name, 100)!r} on rank {rank}"


class CallService:
    """Makes and serves the calls of one node."""

    def __init__(
        self,
        connect: Callable[[CallListener], CallTransport | None],
        config: GroupConfig,
        name: str,
        functions: FunctionRegistry | None = None,
    ) -> None:
        """`connect` returns the transport that reports to this service, None for a node that is alone.

        `name` is that of the run. `functions` were registered by an earlier service of this process.
        """
        self._config, self._name = config, name
        self._core = Calling(handlers=config.call_handlers, message_bytes=config.call_bytes)
        self._lock = threading.Lock()
        self._queue: deque[done.CallEffect] = deque()
        self._performing = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_closed = False
        self._fault: Fault | None = None
        """Why the other nodes have nothing to do with this one any more, if they do not."""
        self.functions = FunctionRegistry() if functions is None else functions
        self._converters: dict[Seat, ValueConverter] = {}
        self._transport = Loopback(self, connect(self))
        self.seat = self._transport.seat
        self.exported = ExportedObjects(self.seat)
        self.made = MadeCalls(self, self._transport, self._converter)
        self._serving = Serving(
            self,
            self.functions,
            self.exported,
            self._converter,
            run_soon=self._transport.run_soon,
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
        is_awaited: bool = False,
    ) -> CallWork[Any]:
        """Start a call; see `Node.call_async`. `rank` is what errors call the peer.

        `is_awaited` says that the calling thread waits for it at once.
        """
        what = _description("call", name, rank)
        work: CallWork[Any] = CallWork(what, self)
        made = MadeCall(what, rank, self._seconds(timeout), decoder)
        made.work = work
        self._start(peer, name, args, named, made, target=target, credit=0)
        if not is_awaited:
            self._transport.attend()
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
        made = MadeCall(_description("stream", name, rank), rank, self._seconds(timeout), decoder)
        state = made.state = StreamState()
        number = self._start(peer, name, args, named, made, target=0, credit=STREAM_CREDIT)
        self._transport.attend()
        return CallStream(self, peer, number, state)

    def _seconds(self, timeout: float | None) -> float:
        return self._config.timeout if timeout is None else check_timeout(timeout)

    def _start(
        self,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        made: MadeCall,
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
        if not 0 < len(name) <= wire.NAME_LIMIT or not name.isprintable():
            raise CallRefusedError(
                f"{made.description}: a name has 1 to {wire.NAME_LIMIT} printable characters, and no lone surrogates"
            )
        payload, now = wire.payload_of(parts), time.monotonic()
        apart = parts if payload.sizes else None
        if apart is None:
            self._transport.note_small_call()
        with HeldSignals():  # Ctrl-C must not leave a message half sent
            with self._lock:
                if self._is_closed:
                    raise ClosedError(f"{made.description}: this node has left its run; join again")
                if self._fault is not None and peer != self.seat:
                    raise self.ending_error(made.description)
                number = self._core.outgoing.call(
                    peer, name, payload, now + made.seconds, now, parts=apart, target=target, credit=credit
                )
                self.made.add(peer, number, made)
                if made.work is not None:
                    made.work.began(peer, number)
                at = self._take_effects()
            self._go_on(at)
        return number

    def cancel(self, peer: Seat, number: int) -> bool:
        """Cancel a call; return False if it had ended already."""
        with HeldSignals():
            with self._lock:
                is_cancelled = self._core.outgoing.cancel(peer, number, Ending.CANCELLED)
                at = self._take_effects()
            self._go_on(at)
        return is_cancelled

    def taken(self, peer: Seat, number: int, items: int) -> None:
        """Ask for more items of a stream."""
        with HeldSignals():
            self._tell(self._core.outgoing.give_credit, peer, number, items)

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, and receive messages meanwhile."""
        self._transport.drive(work, deadline)

    def work_ended(self) -> None:
        """Wake the thread that waits for a call which has ended."""
        self._transport.work_ended()

    def aside(self, job: Callable[[], None]) -> None:
        """Run a callback of the program where it holds nothing up."""
        self._serving.aside(job)

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
            self._serving.let_go(self.exported.drop(target, owner))
        else:
            self._transport.send(owner, wire.encode_call_message(wire.ReferenceRelease(target, 1)))
            self._transport.flush()

    # What the transport reports

    def heard(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Take messages of other nodes."""
        broken: dict[Seat, CoveyError] = {}
        now, are_answers = time.monotonic(), True
        with self._lock:
            for peer, data in messages:
                try:
                    if peer not in broken:
                        message = wire.decode_call_message(data)
                        are_answers = are_answers and isinstance(message, wire.CallResult | wire.CallFailure)
                        self._core.received(peer, message, now)
                except CoveyError as error:
                    broken[peer] = error
            at = self._take_effects()
        self._go_on(at)
        if not are_answers:
            self._transport.attend()
        for peer, reason in broken.items():
            self.broke_protocol(peer, reason)

    def lost(self, peer: Seat) -> None:
        """End all calls with a node that is gone."""
        self._serving.let_go(self.exported.lost(peer))
        self._tell(self._core.lost, peer, time.monotonic())

    def ended(self, fault: Fault) -> None:
        """End all calls to other nodes, now and later: a view has excluded this node, or the run is over."""
        with self._lock:
            self._fault = self._fault or fault
            self._core.outgoing.close(but=self.seat)
            at = self._take_effects()
        self._go_on(at)

    def ending_error(self, what: str) -> CoveyError:
        """Return the error of a call that ended because this node is not in the run any more."""
        if self._fault is None:
            return ClosedError(f"{what}: this node left its run before the answer came")
        fault = dataclasses.replace(self._fault, text=f"{what}: {self._fault.text}")
        return fault.error(rank=Rank(self.seat), host="", operation=what, sequence=0, group=self._name)

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a node that broke the protocol."""
        logger.warning("the node in seat %d sent nonsense about calls and is cut off: %s", peer, printable(str(error)))
        self.lost(peer)
        self._transport.cut_off(peer, error)

    def deliver_answers(self) -> None:
        """Wait until the answers of functions that have ended are delivered; see `CallTransport.deliver_answers`."""
        # What another thread performs may be such an answer; if it is this thread, it is in a callback of the program.
        if self._performing.acquire(timeout=PERFORM_SECONDS):
            try:
                self._perform_all()
            finally:
                self._performing.release()
        self._transport.deliver_answers()

    def drain(self) -> None:
        """Refuse calls of other nodes from now on; those that have come are served."""
        self._tell(self._core.incoming.drain)

    @property
    def is_busy(self) -> bool:
        """Whether calls of other nodes have no answer yet."""
        return self._core.incoming.unanswered > 0

    def close(self) -> None:
        """End all calls, because this node leaves its run. Closing twice is fine."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first:
                self._core.close()
                at = self._take_effects()
        if is_first:
            self._go_on(at)
            control.soon(self._set_timer)  # it refers to the node, which is to be freed before the last deadline
            self._transport.shut()
            self._serving.let_go(self.exported.clear())
            self._serving.close()

    def forked(self) -> None:
        """Make the calls unusable: this process is a fork of the one that joined. Threads of it may have held locks."""
        self._lock, self._performing = threading.Lock(), threading.Lock()
        self._is_closed = True
        self._queue.clear()
        self.made.forked()

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
                self._perform_all()
            finally:
                self._performing.release()

    def _perform_all(self) -> None:
        while self._queue:
            self._perform_safely(self._queue.popleft())
        self._transport.flush()

    def _set_timer(self) -> None:
        """Call the core at its next deadline, until the calls are closed. On the control loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            self._timer_at = at = self._core.next_deadline()
        if at != math.inf and not self._is_closed:
            self._timer = control.control_loop().call_later(max(0.001, at - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer_at = math.inf
        self._timer = None
        self._tell(self._core.tick, time.monotonic())

    def _perform_safely(self, effect: done.CallEffect) -> None:
        try:
            self._perform(effect)
        except BaseException:  # a fault of covey must not end the thread that performs the effects of all calls
            logger.exception("%s: an effect of a call failed: %s", self._name, type(effect).__name__)

    def _perform(self, effect: done.CallEffect) -> None:
        match effect:
            case done.SendMessage(peer, message, parts):
                self._send(Seat(peer), message, parts)
            case done.Conclude():
                self.made.conclude(effect)
            case done.DeliverItem():
                self.made.deliver(effect)
            case done.RunHandler():
                process.calls_served += 1
                if effect.parts is None:
                    self._transport.note_small_call()
                self._serving.run(effect)
            case done.StepStream(peer, number):
                self._serving.step(Seat(peer), number)
            case done.StopHandler(peer, number):
                self._serving.stop(Seat(peer), number)
            case done.CloseStream(peer, number):
                self._serving.close_stream(Seat(peer), number)
            case done.FetchParts(peer, number, sizes, is_answer):
                tag = parts_tag(number, is_answer=is_answer)
                report = functools.partial(self._fetched, peer, number, is_answer)
                self._transport.fetch_parts(Seat(peer), tag, sizes, report)
            case done.RefuseParts(peer, number, sizes, is_answer):
                tag = parts_tag(number, is_answer=is_answer)
                self._transport.refuse_parts(Seat(peer), tag, len(sizes))
            case done.ReleaseObject(peer, target, references):
                self._release(Seat(peer), target, references)

    def _send(self, peer: Seat, message: wire.CallMessage, parts: list[Any] | None) -> None:
        if parts is not None:
            assert isinstance(message, wire.CallRequest | wire.CallResult | wire.StreamItem)
            tag = parts_tag(message.number, is_answer=not isinstance(message, wire.CallRequest))
            self._transport.send_parts(peer, tag, parts)
        self._transport.send(peer, wire.encode_call_message(message))

    def _fetched(self, peer: int, number: int, is_answer: bool, parts: list[Any] | BaseException | None) -> None:
        if isinstance(parts, BaseException):
            if is_answer:
                return  # the loss of the peer ends the call, and is its error
            parts = None
        report = functools.partial(self._core.fetched, is_answer=is_answer)
        self._tell(report, peer, number, parts, time.monotonic())

    def _release(self, peer: Seat, target: int, references: int) -> None:
        try:
            self._serving.let_go(self.exported.drop(target, peer, references))
        except RemoteProtocolError as error:
            self.broke_protocol(peer, error)

    def _converter(self, peer: Seat) -> ValueConverter:
        converter = self._converters.get(peer)
        if converter is None:
            converter = self._converters[peer] = ValueConverter(self, self.seat, peer, self.exported)
        return converter
