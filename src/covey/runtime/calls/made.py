"""The calls that this node has made and that have not ended: gives each caller its outcome, and its items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.errors import (
    CallCancelledError,
    CallRefusedError,
    ClosedError,
    CoveyError,
    DeadlineError,
    RemoteProtocolError,
)
from covey.base.numbers import Seat
from covey.proto.calling.effects import Conclude, DeliverItem, Ending
from covey.proto.calling.tags import parts_tag
from covey.runtime.calls.outcomes import failure_error
from covey.runtime.counters import process
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.calls.transport import CallTransport
    from covey.runtime.calls.values import ValueConverter
    from covey.runtime.calls.work import CallMaker, CallWork, StreamState
    from covey.wire.call_values import ValueDecoder


class MadeCall:
    """A call of this node that has not ended: what waits for it, and how errors describe it."""

    __slots__ = ("decoder", "description", "rank", "seconds", "state", "work")

    def __init__(self, description: str, rank: int, seconds: float, decoder: ValueDecoder) -> None:
        self.description, self.rank, self.seconds, self.decoder = description, rank, seconds, decoder
        self.work: CallWork[Any] | None = None
        self.state: StreamState | None = None


class MadeCalls:
    """The calls of this node, by peer and number. One thread at a time performs effects on them."""

    def __init__(
        self, maker: CallMaker, transport: CallTransport, converter_for: Callable[[Seat], ValueConverter]
    ) -> None:
        self._maker, self._transport, self._converter_for = maker, transport, converter_for
        self._calls: dict[tuple[int, int], MadeCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, peer: Seat, number: int, made: MadeCall) -> None:
        """Note a call, before its first effect is performed."""
        self._calls[peer, number] = made

    def conclude(self, effect: Conclude) -> None:
        """Give a caller its outcome."""
        peer, outcome, error = Seat(effect.peer), effect.outcome, None
        made = self._calls.pop((peer, effect.number))
        if isinstance(outcome, Ending):
            error = self._ending_error(peer, made, outcome)
        elif isinstance(outcome, wire.CallFailure):
            error = failure_error(outcome, made.description, made.rank)
        elif outcome.payload.sizes and effect.parts is None:
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
            made.work.answered(self._decode(peer, made, effect.parts or outcome.payload.inline))

    def deliver(self, effect: DeliverItem) -> None:
        """Give the reader of a stream its next item; fetch the parts of a large one."""
        peer, number, payload = Seat(effect.peer), effect.number, effect.payload
        made = self._calls[peer, number]
        state = made.state
        assert state is not None, "the core has checked that it is a stream"
        slot = state.reserve()
        if not payload.sizes:
            state.arrived(slot, self._decode(peer, made, payload.inline))
            return

        def then(parts: list[Any] | BaseException | None) -> None:
            if isinstance(parts, list):
                state.arrived(slot, self._decode(peer, made, parts))
                return
            if parts is None:
                size = payload.total_bytes
                state.end(CallRefusedError(f"{made.description}: there is no memory for an item of {size} bytes"))
            else:
                state.end(self._transport.lost_error(peer, made.rank, made.description))
            self._maker.cancel(peer, number)  # unless the last message of the stream has come

        self._transport.fetch_parts(peer, parts_tag(number, is_answer=True), payload.sizes, then)

    def forked(self) -> None:
        """End all calls in a process that is a fork of the one that made them."""
        calls, self._calls = self._calls, {}
        for made in calls.values():
            error = ClosedError(f"{made.description} belongs to the process that joined, of which this one is a fork")
            if made.state is not None:
                made.state.forked(error)
            elif made.work is not None and not made.work.done():
                made.work.forked(error)

    def _decode(self, peer: Seat, made: MadeCall, parts: Sequence[Any]) -> Callable[[], Any]:
        """Return what decodes a result or an item, on the thread that asks for it.

        It does not refer to the call: a stream keeps it, and the call keeps the stream.
        """
        decoder, description = made.decoder, made.description

        def decode() -> Any:
            try:
                return decoder.decode(parts[0] if parts else b"", parts, self._converter_for(peer))
            except (TypeError, RemoteProtocolError) as error:
                raise CallRefusedError(f"{description}: the result cannot be used: {error}") from error

        return decode

    def _ending_error(self, peer: Seat, made: MadeCall, why: Ending) -> CoveyError:
        match why:
            case Ending.LATE:
                text = f"{made.description}: no answer within the timeout of {made.seconds:g} s"
                return DeadlineError(text, late=(made.rank,))
            case Ending.CANCELLED:
                return CallCancelledError(f"{made.description} was cancelled")
            case Ending.LOST:
                return self._transport.lost_error(peer, made.rank, made.description)
            case Ending.CLOSED:
                return self._maker.ending_error(made.description)
