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
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import check_timeout
from covey.base.errors import (
    CallRefusedError,
    ClosedError,
    CoveyError,
)
from covey.base.numbers import REALTIME, Rank, Seat
from covey.base.text import printable
from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import CallEnding
from covey.proto.calling.outgoing import arguments_share
from covey.proto.calling.tags import parts_tag
from covey.runtime import loop as control
from covey.runtime import tracing
from covey.runtime.calls.functions import FunctionRegistry, too_large
from covey.runtime.calls.handlers import current_caller
from covey.runtime.calls.objects import Converters, ExportedObjects, Handle
from covey.runtime.calls.passing import HandlePassing
from covey.runtime.calls.serving import Serving
from covey.runtime.calls.transport import Loopback
from covey.runtime.calls.work import STREAM_CREDIT, CallStream, CallWork, MadeCall, MadeCalls, StreamState
from covey.runtime.pool import UnaskedMemory, pool
from covey.runtime.signals import HeldSignals
from covey.wire import calls as wire
from covey.wire.call_values import ANY_VALUE, ValueDecoder, pack

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.runtime.calls.transport import CallListener, CallTransport
    from covey.runtime.fault import Fault
    from covey.runtime.work import Work

logger = logging.getLogger("covey")

_ANSWERS: Final = (wire.CallResult, wire.CallFailure)

ATTEND_EVERY: Final = 0.1
"""While calls of other nodes come, the transport hears of it every so many seconds."""
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
        self._memory = UnaskedMemory(pool, config.pool_bytes, self._memory_came)
        self._awaits_memory = False
        """Whether the pool tells when memory comes back."""
        self._core = Calling(handlers=config.call_handlers, message_bytes=config.call_bytes, memory=self._memory)
        self._lock = threading.Lock()
        self._performing = threading.Lock()
        """Held by the thread that performs effects, which the core keeps until then."""
        self._outbox: list[tuple[Seat, bytes]] = []
        """What that thread sends with its next system call."""
        self._attend_at = 0.0
        """When the transport is to hear again that calls of other nodes come."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_closed = False
        self._fault: Fault | None = None
        """Why the other nodes have nothing to do with this one any more, if they do not."""
        self.functions = FunctionRegistry() if functions is None else functions
        others = connect(self)
        self._loopback = Loopback(self, Seat(0) if others is None else others.seat)
        self._transport: CallTransport = self._loopback if others is None else others
        self.seat = self._loopback.seat
        self.exported = ExportedObjects(self.seat, self._transport.may_be_member)
        self._converters = Converters(self, self.seat, self.exported, self._transport.lists_handles)
        self._passing = HandlePassing(self, self.seat, self.exported, self._transport.is_member)
        self.made = MadeCalls(self, self._transport_to, self._transport.work_ended, self._passing.taken)
        self._serving = Serving(
            self,
            self.functions,
            self.exported,
            self._converters,
            transport=self._transport,
            name=f"{name} calls",
            passing=self._passing,
            message_bytes=config.call_bytes,
        )
        self._performers: dict[type[Any], Callable[[Any], None]] = {
            done.SendMessage: self._send,
            done.Conclude: self.made.conclude,
            done.DeliverItem: self.made.deliver,
            done.RunHandler: self._serving.run,
            done.StepStream: self._serving.step,
            done.StopHandler: self._serving.stop,
            done.CloseStream: self._serving.close_stream,
            done.FetchParts: self._fetch,
            done.RefuseParts: self._refuse,
            done.CountReference: self._passing.count,
            done.TakeHandles: self._passing.take,
            done.GiveUpHandles: self._passing.give_up,
        }
        """By effect of the core: what performs it."""

    def _transport_to(self, peer: Seat) -> CallTransport:
        return self._loopback if peer == self.seat else self._transport

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
        decoder: ValueDecoder = ANY_VALUE,
        priority: int = REALTIME,
    ) -> Any:
        """Call a function and return its result; see `Node.call`. `rank` is what errors call the peer."""
        made, payload, apart = self._prepared("call", peer, name, args, named, rank, timeout, decoder)
        work: CallWork[Any] = CallWork(made, self)
        try:
            with HeldSignals(self._transport.wake_poll) as held:  # Ctrl-C must not leave a message half sent
                self._start(peer, name, payload, apart, work, target=target, credit=0, priority=priority)
                self._transport.drive_once(work, held)
            return work.wait()
        except BaseException:  # the call has failed, or the wait was interrupted
            work.cancel()
            work.forget_error()
            raise

    def call_async(
        self,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        *,
        rank: int,
        timeout: float | None = None,
        target: int = 0,
        decoder: ValueDecoder = ANY_VALUE,
        priority: int = REALTIME,
    ) -> CallWork[Any]:
        """Start a call; see `Node.call_async`."""
        made, payload, apart = self._prepared("call", peer, name, args, named, rank, timeout, decoder)
        work: CallWork[Any] = CallWork(made, self)
        with HeldSignals():
            self._start(peer, name, payload, apart, work, target=target, credit=0, priority=priority)
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
        decoder: ValueDecoder = ANY_VALUE,
        priority: int = REALTIME,
    ) -> CallStream[Any]:
        """Start a stream; see `Node.stream`."""
        made, payload, apart = self._prepared("stream", peer, name, args, named, rank, timeout, decoder)
        state = StreamState(made)
        with HeldSignals():
            number = self._start(peer, name, payload, apart, state, target=0, credit=STREAM_CREDIT, priority=priority)
        self._transport.attend()
        return CallStream(self, peer, number, state)

    def _prepared(
        self,
        kind: str,
        peer: Seat,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        rank: int,
        timeout: float | None,
        decoder: ValueDecoder,
    ) -> tuple[MadeCall, wire.CallPayload, list[Any] | None]:
        """Return how a call is made, its payload, and its parts if they travel apart.

        Raises:
            CallRefusedError: it cannot be made.
        """
        converter = self._converters[peer]
        seconds = self._config.timeout if timeout is None else check_timeout(timeout)
        made = MadeCall(_description(kind, name, rank), rank, seconds, decoder, converter)
        handles: list[wire.PassedHandle] = []
        parts = pack((args, named), converter, handles)
        size = sum(map(len, parts))
        if size > self._config.call_bytes:
            text = too_large(1, "the list of arguments", size, self._config.call_bytes).text
            raise CallRefusedError(f"{made.description}: {text}")
        if not 0 < len(name) <= wire.FUNCTION_NAME_LIMIT or not name.isprintable():
            raise CallRefusedError(
                f"{made.description}: a name has 1 to {wire.FUNCTION_NAME_LIMIT} printable characters, "
                "and no lone surrogates"
            )
        if handles:
            self._passing.share(peer, handles)
        if (tracer := tracing.active) is not None:
            made = made._replace(span=tracer.call(name, rank, is_stream=kind == "stream"))
        payload = wire.payload_of(parts, handles)
        return made, payload, parts if payload.sizes else None

    def _start(
        self,
        peer: Seat,
        name: str,
        payload: wire.CallPayload,
        apart: list[Any] | None,
        call: CallWork[Any] | StreamState,
        *,
        target: int,
        credit: int,
        priority: int,
    ) -> int:
        """Make a call; return its number. `apart` are the parts of a large payload. Signals are held."""
        made, now = call.made, time.monotonic()
        if apart is None:
            self._transport.note_small_call()
        served = current_caller.get()  # the call that waits for this one, if a function makes it
        depth = 0 if served is None else min(served.depth + 1, wire.DEPTH_LIMIT - 1)
        with self._lock:
            if (refusal := self._refusal(made, peer)) is not None:
                if made.span is not None:
                    made.span.end(refusal)
                raise refusal
            number = self._core.outgoing.call(
                peer, name, payload, now + made.seconds, now, parts=apart, target=target, credit=credit,
                priority=priority, trace="" if made.span is None else made.span.trace, depth=depth,
            )  # fmt: skip
            self.made.calls[peer, number] = call
            if isinstance(call, CallWork):
                call.key = peer, number
        self._perform()
        return number

    def _refusal(self, made: MadeCall, peer: Seat) -> CoveyError | None:
        """Return why no call can be made any more, if so."""
        if self._is_closed:
            return ClosedError(f"{made.description}: this node has left its run; join again")
        return self.ending_error(made.description) if self._fault is not None and peer != self.seat else None

    def cancel(self, peer: Seat, number: int) -> bool:
        """Cancel a call; return False if it had ended already."""
        with HeldSignals():
            with self._lock:
                is_cancelled = self._core.outgoing.cancel(peer, number, CallEnding.CANCELLED)
            self._perform()
        return is_cancelled

    def taken(self, peer: Seat, number: int, items: int) -> None:
        """Ask for more items of a stream."""
        with HeldSignals():
            self._tell(self._core.outgoing.give_credit, peer, number, items)

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, and receive messages meanwhile."""
        self._transport.drive(work, deadline)

    def aside(self, job: Callable[[], None]) -> None:
        """Run a callback of the program where it holds nothing up."""
        self._serving.aside(job)

    # Exported objects

    def export(self, value: Any) -> Handle:
        """Return a handle of an object."""
        number, key = self.exported.export(value)
        return Handle(self, self.seat, number, type(value).__qualname__, key)

    def call_object(
        self, owner: Seat, target: int, method: str, args: tuple[Any, ...], named: dict[str, Any], timeout: float | None
    ) -> CallWork[Any]:
        """Start to call a method of an exported object."""
        return self.call_async(owner, method, args, named, rank=owner, timeout=timeout, target=target)

    def drop_handle(self, owner: Seat, target: int, key: bytes) -> None:
        """Note that a handle is gone. On the control loop."""
        if self._is_closed:
            return
        if owner == self.seat:
            self.let_go(self.exported.drop(target, owner))
        else:
            self.tell_owner(done.SendMessage(owner, wire.ReferenceRelease(target, 1, key)))
            self._perform()

    def tell_owner(self, effect: done.SendMessage) -> None:
        """Send a message about a handle with the next effects, after those that wait."""
        self._core.waiting.append(effect)

    def let_go(self, objects: list[Any]) -> None:
        """Drop objects of the program, whose destructors may run then."""
        self._serving.let_go(objects)

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
                        are_answers = are_answers and isinstance(message, _ANSWERS)
                        self._core.received(peer, message, now)
                except CoveyError as error:
                    broken[peer] = error
        self._perform()
        if not are_answers and now >= self._attend_at:
            self._attend_at = now + ATTEND_EVERY
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
        self._perform()

    def ending_error(self, what: str) -> CoveyError:
        """Return the error of a call that ended because this node is not in the run any more."""
        if self._fault is None:
            return ClosedError(f"{what}: this node left its run before the answer came")
        fault = self._fault._replace(text=f"{what}: {self._fault.text}")
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
            self._performing.release()
            self._perform()
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
        if is_first:
            self._perform()
            control.soon(self._set_timer)  # it refers to the node, which is to be freed before the last deadline
            self._transport.shut()
            self._serving.let_go(self.exported.clear())
            self._serving.close()

    def forked(self) -> None:
        """Make the calls unusable: this process is a fork of the one that joined. Threads of it may have held locks."""
        self._lock, self._performing = threading.Lock(), threading.Lock()
        self._is_closed = True
        self._core.waiting.clear()
        self.made.forked()

    # What serving reports

    def finished(self, peer: Seat, number: int, answer: wire.CallResult | wire.CallFailure | None, parts: Any) -> None:
        """Answer a call whose function has ended."""
        with self._lock:
            self._core.incoming.finished(peer, number, answer, parts)
        self._perform()

    def yielded(self, peer: Seat, number: int, payload: wire.CallPayload, parts: Any) -> None:
        """Send an item of a stream."""
        self._tell(self._core.incoming.yielded, peer, number, payload, parts)

    # The core and its effects

    def _tell(self, report: Callable[..., None], *args: Any) -> None:
        """Pass something to the core, and perform what follows."""
        try:
            with self._lock:
                report(*args)
        finally:
            self._perform()

    def _perform(self) -> None:
        """Perform the effects of the core in order, unless another thread does; set the timer if it has to be earlier.

        None of them blocks. What they send travels together, after the last one.
        """
        core = self._core
        at = min(core.outgoing.deadlines.not_before, core.incoming.deadlines.not_before)
        if at < self._timer_at:
            self._timer_at = at  # so that one thread sets the timer
            control.soon(self._set_timer)
        while core.waiting and self._performing.acquire(blocking=False):
            try:
                while core.waiting:
                    effect = core.waiting.popleft()
                    try:
                        self._performers[type(effect)](effect)
                    except BaseException:  # a fault of covey must not end the thread that performs those of all calls
                        logger.exception("%s: an effect of a call failed: %s", self._name, type(effect).__name__)
                if self._outbox:
                    outbox, self._outbox = self._outbox, []
                    self._transport.send(outbox)
            finally:
                self._performing.release()
        if core.incoming.waiting_for_memory and not self._awaits_memory:
            self._awaits_memory = True
            self._memory.watch()
            control.soon(self._look_for_memory)  # it may have come back just before

    def _memory_came(self) -> None:
        """Look for memory soon: this is called anywhere, in the middle of this class, too."""
        self._awaits_memory = False
        control.soon(self._look_for_memory)

    def _look_for_memory(self) -> None:
        """Fetch the arguments for which there is memory now. On the control loop."""
        if not self._is_closed:
            self._tell(self._core.incoming.memory_came)

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

    def _send(self, effect: done.SendMessage) -> None:
        peer, message = Seat(effect.peer), effect.message
        if effect.parts is not None:
            assert isinstance(message, wire.CallRequest | wire.CallResult | wire.StreamItem)
            tag = parts_tag(message.number, is_answer=not isinstance(message, wire.CallRequest))
            share = arguments_share(message.depth, effect.priority) if isinstance(message, wire.CallRequest) else 1.0
            self._transport_to(peer).send_parts(peer, tag, effect.parts, effect.priority, share)
        if peer == self.seat:
            self._loopback.send([(peer, wire.encode_call_message(message))])
        else:
            self._outbox.append((peer, wire.encode_call_message(message)))

    def _fetch(self, effect: done.FetchParts) -> None:
        peer, number, sizes, is_answer = effect
        then = functools.partial(self._fetched, peer, number, is_answer)
        tag = parts_tag(number, is_answer=is_answer)
        try:
            self._transport_to(Seat(peer)).fetch_parts(Seat(peer), tag, sizes, then)
        finally:
            if not is_answer:
                self._memory.taken(sum(sizes))

    def _refuse(self, effect: done.RefuseParts) -> None:
        peer, tag = Seat(effect.peer), parts_tag(effect.number, is_answer=effect.is_answer)
        self._transport_to(peer).refuse_parts(peer, tag, len(effect.sizes))

    def _fetched(self, peer: int, number: int, is_answer: bool, parts: list[Any] | BaseException | None) -> None:
        if isinstance(parts, BaseException):
            if is_answer:
                return  # the loss of the peer ends the call, and is its error
            parts = None
        report = functools.partial(self._core.fetched, is_answer=is_answer)
        self._tell(report, peer, number, parts, time.monotonic())
