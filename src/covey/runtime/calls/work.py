"""The calls that this node has made: what each caller holds of its call, a work or a stream of items, and what becomes
of it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from covey.base.errors import (
    CallCancelledError,
    CallRefusedError,
    ClosedError,
    DeadlineError,
    RemoteCallError,
    RemoteProtocolError,
)
from covey.base.numbers import Seat
from covey.proto.calling.effects import CallEnding, Conclude, DeliverItem
from covey.proto.calling.tags import parts_tag
from covey.runtime import loop as control
from covey.runtime.counters import process
from covey.runtime.work import Work
from covey.wire import calls as wire
from covey.wire.call_values import decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from covey.base.errors import CoveyError
    from covey.runtime.calls.objects import Handle, ValueConverter
    from covey.runtime.calls.transport import CallTransport
    from covey.runtime.tracing import OpenSpan
    from covey.wire.call_values import ValueDecoder

T = TypeVar("T")

STREAM_CREDIT: Final = 16
"""Items of a stream that may be under way or wait for their reader."""


class CallMaker(Protocol):
    """What works and streams need of the calls of their node."""

    def cancel(self, peer: Seat, number: int) -> bool:
        """Cancel a call; return False if it had ended already. On any thread."""

    def taken(self, peer: Seat, number: int, items: int) -> None:
        """Ask for more items of a stream. On any thread."""

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, and receive messages meanwhile."""

    def aside(self, job: Callable[[], None]) -> None:
        """Run a callback of the program where it holds nothing up. On any thread."""

    def ending_error(self, what: str) -> CoveyError:
        """Return the error of a call that ended because this node is not in the run any more."""


class MadeCall(NamedTuple):
    """How a call was made: what decodes its result or its items, and what errors say of it."""

    description: str
    rank: int
    """What errors call the node that was called."""
    seconds: float
    """Its timeout."""
    decoder: ValueDecoder
    converter: ValueConverter
    span: OpenSpan | None = None
    """Its span, if the program exports spans."""

    def decode(self, parts: Sequence[Any], handles: Sequence[Handle | None]) -> Any:
        """Return the result, or an item; CallRefusedError if it is not of the type that the caller wants.

        `handles` are those that the payload listed.
        """
        try:
            converter = self.converter.over(handles) if handles else self.converter
            return decoded(self.decoder.decode_raw, parts[0] if parts else b"", parts, converter)
        except (TypeError, RemoteProtocolError) as error:
            raise CallRefusedError(f"{self.description}: the result cannot be used: {error}") from error


class CallWork(Work[T]):
    """A call that was started with `call_async`: wait for it, await it, or cancel it.

    A cancelled `await` cancels the call. Its own `timeout=` ends it, whether or not a thread waits for it.
    """

    def __init__(self, made: MadeCall, maker: CallMaker) -> None:
        super().__init__(made.description, drive=maker.drive)
        self.made, self._maker = made, maker
        self.key: tuple[Seat, int] | None = None
        """Which call this is, once it was started."""
        self._parts: Sequence[Any] | None = None
        """The result as it came, until a thread asks for it."""
        self._handles: Sequence[Handle | None] = ()
        self._decoding = threading.Lock()

    def cancel(self) -> bool:
        """Cancel the call, and its function on the other node; return whether it had not ended yet."""
        return self.key is not None and self._maker.cancel(*self.key)

    def call_back(self, callbacks: list[Callable[[Work[T]], None]]) -> None:
        """Have callbacks of the program called on a thread that meanwhile receives nothing for other calls."""
        if self._drive is not None:
            self._maker.aside(lambda: super(CallWork, self).call_back(callbacks))

    def answered(self, parts: Sequence[Any], handles: Sequence[Handle | None]) -> None:
        """End with a result, which is decoded on the thread that first asks for it."""
        self._parts, self._handles = parts, handles
        self.conclude(None, None)
        if self._wakers or self._callbacks:
            self.notify()

    def forked(self, error: BaseException) -> None:
        """End the call in a forked process; other threads of the parent may have held the locks."""
        self._decoding, self._drive = threading.Lock(), None
        super().forked(error)

    def _complete(self) -> None:
        with self._decoding:
            if self._parts is not None:
                try:
                    self._result = self.made.decode(self._parts, self._handles)
                except Exception as error:
                    self._error = error
                self._parts, self._handles = None, ()

    def wait_or_cancel(self) -> T:
        """Wait for the end of a call that only its caller has; cancel it if the wait is interrupted (Ctrl-C)."""
        try:
            return self.take()
        except BaseException:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from super().__await__())
        except BaseException:
            self.cancel()
            raise
        finally:
            del self  # as in `Work.wait`


class _Slot:
    """An item in the order of the stream; its parts may still be on the way."""

    __slots__ = ("handles", "parts")

    def __init__(self) -> None:
        self.parts: Sequence[Any] | None = None
        self.handles: Sequence[Handle | None] = ()


class StreamState:
    """The items of one stream that have come and are not taken. Any thread may call any method."""

    def __init__(self, made: MadeCall) -> None:
        self.made = made
        self._changed = threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._error: BaseException | None = None
        self._is_over = False
        self.listeners: list[Callable[[], None]] = []
        """Called when `take` may have something else to say; with no lock held."""

    def reserve(self) -> _Slot:
        """Keep a place for the next item."""
        with self._changed:
            self._slots.append(slot := _Slot())
            return slot

    def arrived(self, slot: _Slot, parts: Sequence[Any], handles: Sequence[Handle | None]) -> None:
        """Fill a place."""
        with self._changed:
            slot.parts, slot.handles = parts, handles
            self._changed.notify_all()
        self._tell()

    def end(self, error: BaseException | None) -> None:
        """End the stream after the items that have come; with an error (the first one), after those that are whole."""
        with self._changed:
            self._is_over, self._error = True, self._error or error
            self._changed.notify_all()
        self._tell()

    def forked(self, error: BaseException) -> None:
        """End the stream in a forked process; other threads of the parent may have held the lock."""
        self._changed = threading.Condition()
        self.end(error)

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def take(self) -> _Slot | None:
        """Return the next item; None if it has not come; raise StopIteration or the error at the end."""
        with self._changed:
            return self._take()

    def _take(self) -> _Slot | None:
        if self._slots and self._slots[0].parts is not None:
            return self._slots.popleft()
        if self._is_over and (self._error is not None or not self._slots):
            if self._error is not None:
                raise self._error
            raise StopIteration
        return None

    def wait(self) -> _Slot:
        """Return the next item, once it has come; the stream's own timeout ends the wait."""
        with self._changed:
            while (found := self._take()) is None:
                self._changed.wait()
            return found


class CallStream(Generic[T]):
    """The items that a generator on another node makes: iterate over it with `for` or `async for`.

    The generator runs only a few items ahead of the reader. Leaving the loop early, `close`, or dropping the stream
    closes the generator.
    """

    def __init__(self, maker: CallMaker, peer: Seat, number: int, state: StreamState) -> None:
        self._maker, self._peer, self._number, self._state = maker, peer, number, state
        self._taken = 0
        self._dropped = weakref.finalize(self, control.soon, maker.cancel, peer, number)
        self._dropped.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._decoded(self._state.wait())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        import asyncio

        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)

        self._state.listeners.append(tell)
        try:
            while True:
                try:
                    slot = self._state.take()
                except StopIteration:
                    raise StopAsyncIteration from None
                if slot is not None:
                    return self._decoded(slot)
                await changed.wait()
                changed.clear()
        finally:
            self._state.listeners.remove(tell)

    def _decoded(self, slot: _Slot) -> T:
        self._taken += 1
        if self._taken >= STREAM_CREDIT // 2:
            self._maker.taken(self._peer, self._number, self._taken)
            self._taken = 0
        return self._state.made.decode(slot.parts or (), slot.handles)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the stream, and its generator on the other node. Closing twice is fine."""
        self._dropped.detach()
        self._maker.cancel(self._peer, self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def failure_error(failure: wire.CallFailure, what: str, rank: int) -> CoveyError:
    """Return the error that a failure of the other node becomes; `what` describes the call."""
    match failure.kind:
        case wire.RAISED:
            text = (
                f"{what} raised {failure.error}: {failure.text}" if failure.text else f"{what} raised {failure.error}"
            )
            trace = "\n".join(failure.traceback)
            error = RemoteCallError(text, type=failure.error, text=failure.text, traceback=trace, peer=rank)
            if trace:
                error.add_note(f"The traceback on rank {rank}:\n{trace}")
            return error
        case wire.DEADLINE_PASSED:
            return DeadlineError(f"{what} reached its timeout there: {failure.text}", late=(rank,))
        case wire.CANCELLED:
            return CallCancelledError(f"{what}: {failure.text}")
        case wire.CLOSING:
            return ClosedError(f"{what}: {failure.text}")
    return CallRefusedError(f"{what}: {failure.text}")


class MadeCalls:
    """The calls of this node that have not ended, by peer and number. One thread at a time performs effects on them."""

    def __init__(
        self,
        maker: CallMaker,
        transport_to: Callable[[Seat], CallTransport],
        work_ended: Callable[[], None],
        handles_of: Callable[[wire.CallPayload], Sequence[Handle | None]],
    ) -> None:
        """`transport_to` returns what carries calls to a node; `work_ended` is that of `CallTransport`.

        `handles_of` is `HandlePassing.taken`.
        """
        self._handles_of = handles_of
        self._maker, self._transport_to, self._work_ended = maker, transport_to, work_ended
        self.calls: dict[tuple[int, int], CallWork[Any] | StreamState] = {}

    def __len__(self) -> int:
        return len(self.calls)

    def conclude(self, effect: Conclude) -> None:
        """Give a caller its outcome."""
        call, outcome, error = self.calls.pop((effect.peer, effect.number)), effect.outcome, None
        made = call.made
        if isinstance(outcome, CallEnding):
            error = self._ending_error(Seat(effect.peer), made, outcome)
        elif isinstance(outcome, wire.CallFailure):
            error = failure_error(outcome, made.description, made.rank)
        elif outcome.payload.sizes and effect.parts is None:
            size = outcome.payload.total_bytes
            error = CallRefusedError(f"{made.description}: there is no memory for its result of {size} bytes")
        if made.span is not None:
            made.span.end(error)
        process.calls_made += 1
        process.calls_failed += error is not None
        if isinstance(call, StreamState):
            call.end(error)
        elif error is not None:
            call.fail(error)
        elif isinstance(outcome, wire.CallResult):
            handles = self._handles_of(outcome.payload) if outcome.payload.handles else ()
            call.answered(effect.parts or outcome.payload.inline, handles)
        self._work_ended()

    def deliver(self, effect: DeliverItem) -> None:
        """Give the reader of a stream its next item; fetch the parts of a large one."""
        peer, number, payload = Seat(effect.peer), effect.number, effect.payload
        state = self.calls[peer, number]
        assert isinstance(state, StreamState), "the core has checked that it is a stream"
        slot, handles = state.reserve(), self._handles_of(payload) if payload.handles else ()
        if not payload.sizes:
            state.arrived(slot, payload.inline, handles)
            return

        def then(parts: list[Any] | BaseException | None) -> None:
            made = state.made
            if isinstance(parts, list):
                state.arrived(slot, parts, handles)
                return
            if parts is None:
                size = payload.total_bytes
                state.end(CallRefusedError(f"{made.description}: there is no memory for an item of {size} bytes"))
            else:
                state.end(self._transport_to(peer).lost_error(peer, made.rank, made.description))
            self._maker.cancel(peer, number)  # unless the last message of the stream has come

        self._transport_to(peer).fetch_parts(peer, parts_tag(number, is_answer=True), payload.sizes, then)

    def forked(self) -> None:
        """End all calls in a process that is a fork of the one that made them."""
        calls, self.calls = self.calls, {}
        for call in calls.values():
            text = f"{call.made.description} belongs to the process that joined, of which this one is a fork"
            if isinstance(call, StreamState) or not call.done():
                call.forked(ClosedError(text))

    def _ending_error(self, peer: Seat, made: MadeCall, why: CallEnding) -> CoveyError:
        match why:
            case CallEnding.LATE:
                text = f"{made.description}: no answer within the timeout of {made.seconds:g} s"
                return DeadlineError(text, late=(made.rank,))
            case CallEnding.CANCELLED:
                return CallCancelledError(f"{made.description} was cancelled")
            case CallEnding.LOST:
                return self._transport_to(peer).lost_error(peer, made.rank, made.description)
            case CallEnding.CLOSED:
                return self._maker.ending_error(made.description)
