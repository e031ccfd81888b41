"""Serves the calls of other nodes: finds the function, decodes its arguments, runs it, and reports its end to the core.

Each call under way is a `_Serving`. Its code runs piece by piece: the whole function, or one item of a stream, so that
a stream holds no thread between two items. A piece runs on a handler thread, on the loop of asynchronous functions, or,
if the function was short so far (`functions.CallPace`), on the thread that has received the call, after it has left the
receiving to another one.

Invariant: the core hears of every piece exactly once, in the `finally` of `_do` or `_do_async`. All code of the program
runs inside: decoding of arguments, lookup of methods, functions, packing of results, closing of streams.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from covey.base.errors import CallRefusedError, ConfigError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.base.text import spell_error
from covey.runtime import tracing
from covey.runtime.calls.functions import UnservedError, failure_of, too_large
from covey.runtime.calls.handlers import Caller, HandlerLoop, HandlerThreads, current_caller
from covey.runtime.counters import process
from covey.wire import calls as wire
from covey.wire.call_values import decoded, pack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from covey.base.errors import CoveyError
    from covey.proto.calling.effects import CloseStream, RunHandler, StepStream, StopHandler
    from covey.runtime.calls.functions import CallableFunction, FunctionRegistry
    from covey.runtime.calls.objects import ExportedObjects, ValueConverter
    from covey.runtime.calls.passing import HandlePassing
    from covey.runtime.calls.transport import CallTransport
    from covey.runtime.tracing import OpenSpan

logger = logging.getLogger("covey")

ASIDE_THREADS: Final = 16
"""Threads for callbacks of the program, and for the destructors of its objects."""


class ServedCalls(Protocol):
    """Where the ends of functions are reported; on any thread."""

    def finished(self, peer: Seat, number: int, answer: wire.CallResult | wire.CallFailure | None, parts: Any) -> None:
        """Answer a call whose function has ended."""

    def yielded(self, peer: Seat, number: int, payload: wire.CallPayload, parts: Any) -> None:
        """Send an item of a stream."""

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a peer."""


_Outcome: TypeAlias = "tuple[wire.CallResult | wire.CallFailure | wire.StreamItem | None, Any] | None"
"""What a piece has come to: an answer or an item, and its parts if they travel apart; no answer, because the call was
stopped, or its stream is closed. None: another piece goes on, and reports."""
_STOPPED: Final = (None, None)
_UNENDED: Final = (None, "unended")
"""What a piece has come to if there is not even memory for a failure."""


class _Serving:
    """A call under way: its function, its caller, and the generator of a stream."""

    def __init__(self, peer: Seat, request: wire.CallRequest, deadline: float, converter: ValueConverter) -> None:
        self.peer, self.number, self.converter = peer, request.number, converter
        self.key = peer, request.number
        self.caller = Caller(peer, request.name, deadline, request.depth)
        self.wants_stream, self.is_large = bool(request.credit), bool(request.payload.sizes)
        self.function: CallableFunction | None = None
        self.generator: Any = None
        self.context = contextvars.Context()
        """That of the function's own code; the next item of a stream may run on another thread."""
        self.context.run(current_caller.set, self.caller)
        self.trace = request.trace
        self.span: OpenSpan | None = None
        """Its span, once it runs, if the program exports spans."""
        self.breach: RemoteProtocolError | None = None
        """What no correct node sends, if the arguments were that."""

    def begin_span(self) -> None:
        """Begin the span of the function, if spans are asked for. Where its code runs, before that."""
        if (tracer := tracing.active) is not None and self.span is None:
            self.span = tracer.served(self.caller.name, self.peer, self.trace)
            self.span.enter(self.context)

    def unended(self) -> wire.CallFailure:
        """Return the answer if no other one could be made."""
        return wire.CallFailure(self.number, wire.NO_RESULT, "", "the function ended, and its end was lost")


class Serving:
    """The functions of this node that run for other nodes, and other code of the program that messages cause to run."""

    def __init__(
        self,
        calls: ServedCalls,
        functions: FunctionRegistry,
        exported: ExportedObjects,
        converters: Mapping[Seat, ValueConverter],
        *,
        transport: CallTransport,
        name: str,
        passing: HandlePassing,
        message_bytes: int,
    ) -> None:
        """`converters` has one for each peer that is asked for; `transport` runs short functions."""
        self._passing = passing
        self._run_soon, self._note_small_call = transport.run_soon, transport.note_small_call
        self._converters = converters
        self._calls, self._functions, self._exported = calls, functions, exported
        self._message_bytes = message_bytes
        self._threads, self._loop = HandlerThreads(f"{name} handler"), HandlerLoop(name)
        self._aside = HandlerThreads(f"{name} callbacks", ASIDE_THREADS)
        self._under_way: dict[tuple[Seat, int], _Serving] = {}

    # What the core wants; none of these blocks, or runs code of the program

    def run(self, effect: RunHandler) -> None:
        """Run the function of a call."""
        peer, request = Seat(effect.peer), effect.request
        process.calls_served += 1
        if effect.parts is None:
            self._note_small_call()
        converter = self._converters[peer]
        if request.payload.handles:
            converter = converter.over(self._passing.taken(request.payload))
        serving = _Serving(peer, request, effect.deadline, converter)
        self._under_way[serving.key] = serving
        parts = list(effect.parts or request.payload.inline)
        try:
            if serving.is_large and not parts:
                size = request.payload.total_bytes
                raise UnservedError(wire.TOO_LARGE, f"there is no memory for arguments of {size} bytes")
            if request.target:
                self._begin_method(serving, request, parts)
                return
            function = self._functions.by_name.get(request.name)
            if function is None:
                raise UnservedError(wire.UNKNOWN_FUNCTION, self._functions.unknown(request.name))
            self._begin(serving, function, parts)
        except BaseException as error:  # nothing runs, and the call is over
            self._report(serving, (failure_of(serving.number, error), None))

    def step(self, effect: StepStream) -> None:
        """Make the next item of a stream."""
        self._advance(self._under_way[Seat(effect.peer), effect.number], self._next, self._next_async)

    def close_stream(self, effect: CloseStream) -> None:
        """Close the generator of a stream that is between two items."""
        serving = self._under_way[Seat(effect.peer), effect.number]
        serving.caller.cancelled()
        self._advance(serving, _close, _close_async)

    def _advance(
        self,
        serving: _Serving,
        piece: Callable[[_Serving], _Outcome],
        async_piece: Callable[[_Serving], Awaitable[_Outcome]],
    ) -> None:
        """Go on with a stream that has made its first item."""
        assert serving.function is not None
        try:
            if serving.function.is_async:
                self._on_loop(serving, lambda: async_piece(serving))
            else:
                self._on_thread(functools.partial(self._do, serving, piece))
        except BaseException as error:
            self._report(serving, (failure_of(serving.number, error), None))

    def stop(self, effect: StopHandler) -> None:
        """Cancel a function that runs."""
        serving = self._under_way.get((Seat(effect.peer), effect.number))
        if serving is not None:
            serving.caller.cancelled()
            if serving.function is not None and serving.function.is_async:
                self._loop.cancel(serving.key)

    def aside(self, job: Callable[[], None]) -> None:
        """Run code of the program that no call waits for: callbacks, destructors of objects."""
        if not self._run_soon(job, lambda: self._aside.run(job)):
            self._aside.run(job)

    def let_go(self, objects: list[Any]) -> None:
        """Drop objects of the program, whose destructors may run then."""
        if objects:
            self._aside.run(objects.clear)

    def close(self) -> None:
        """Cancel asynchronous functions, and end the threads, each after the function that it runs."""
        self._loop.close()
        self._threads.close()
        self._aside.close()

    # From the core to a thread

    def _begin_method(self, serving: _Serving, request: wire.CallRequest, parts: list[Any]) -> None:
        """Have a method run; one that was not called yet is looked up on a handler thread."""
        try:
            known = self._exported.known_method(request.target, request.name, serving.peer)
        except CallRefusedError as error:
            raise UnservedError(wire.UNKNOWN_FUNCTION, str(error)) from None
        if known is not None:
            self._begin(serving, known, parts)
        else:
            self._on_thread(functools.partial(self._do, serving, self._look_up, request, parts))

    def _begin(self, serving: _Serving, function: CallableFunction, parts: list[Any]) -> None:
        """Have the function run."""
        serving.function = function
        if function.is_stream != serving.wants_stream:
            use = "stream, which makes items: use node.stream" if function.is_stream else "function: use node.call"
            raise UnservedError(wire.ARGUMENTS, f"{function.name!r} is a {use}")
        if function.is_async:
            self._on_loop(serving, lambda: self._call_async(serving, parts))
            return
        job = functools.partial(self._do, serving, self._call, parts)
        is_short = function.pace.is_short and not serving.is_large and not function.is_stream
        if not is_short or not self._run_soon(job, functools.partial(self._run_elsewhere, serving, job)):
            self._on_thread(job)

    def _run_elsewhere(self, serving: _Serving, job: Callable[[], None]) -> None:
        """Run a job that was to run soon on the thread that has received the call, and cannot."""
        try:
            self._on_thread(job)
        except BaseException as error:
            self._report(serving, (failure_of(serving.number, error), None))

    def _on_thread(self, job: Callable[[], None]) -> None:
        try:
            self._threads.run(job)
        except RuntimeError as error:
            raise UnservedError(wire.NO_RESULT, f"no thread could be started for the function: {error}") from None

    def _on_loop(self, serving: _Serving, piece: Callable[[], Awaitable[_Outcome]]) -> None:
        self._loop.run(serving.key, self._do_async(serving, piece), lambda: self._never_ran(serving))
        if serving.caller.is_cancelled and serving.generator is None:  # `stop` may have come before there was a task
            self._loop.cancel(serving.key)

    def _never_ran(self, serving: _Serving) -> None:
        """Note that a function was cancelled before it began, or a stream before it made its next item."""
        if serving.generator is None:
            self._report(serving, _STOPPED)
        else:
            self._loop.run(
                serving.key,
                self._do_async(serving, lambda: _close_async(serving)),
                lambda: self._report(serving, _STOPPED),
            )

    # Where every piece ends

    def _do(self, serving: _Serving, piece: Callable[..., _Outcome], *args: Any) -> None:
        """Run a piece, and report what it has come to, whatever it raises."""
        outcome: _Outcome = _UNENDED
        try:
            outcome = piece(serving, *args)
        except BaseException as error:  # SystemExit, too: it must not end the thread
            outcome = failure_of(serving.number, error), None
        finally:
            self._report(serving, outcome)

    async def _do_async(self, serving: _Serving, piece: Callable[[], Awaitable[_Outcome]]) -> None:
        """Do the same on the loop of asynchronous functions."""
        current_caller.set(serving.caller)
        outcome: _Outcome = _UNENDED
        try:
            outcome = await piece()
        except asyncio.CancelledError:
            outcome = _STOPPED
        except BaseException as error:
            outcome = failure_of(serving.number, error), None
        finally:
            self._report(serving, outcome)

    def _report(self, serving: _Serving, outcome: _Outcome) -> None:
        if outcome is not None:
            message, parts = (serving.unended(), None) if outcome is _UNENDED else outcome
            if isinstance(message, wire.StreamItem):
                self._calls.yielded(serving.peer, serving.number, message.payload, parts)
            else:
                self._under_way.pop(serving.key, None)
                if serving.span is not None:
                    serving.span.end(
                        f"{message.error}: {message.text}" if isinstance(message, wire.CallFailure) else None
                    )
                self._calls.finished(serving.peer, serving.number, message, parts)
        if serving.breach is not None:
            self._calls.broke_protocol(serving.peer, serving.breach)

    # Pieces: they run code of the program

    def _look_up(self, serving: _Serving, request: wire.CallRequest, parts: list[Any]) -> _Outcome:
        try:
            function = self._exported.find_method(request.target, request.name, serving.peer)
        except CallRefusedError as error:
            raise UnservedError(wire.UNKNOWN_FUNCTION, str(error)) from None
        except ConfigError as error:
            raise UnservedError(wire.ARGUMENTS, str(error)) from None
        self._begin(serving, function, parts)
        return None

    def _arguments(self, serving: _Serving, parts: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert serving.function is not None
        try:
            read = serving.function.signature.arguments
            return decoded(read, parts[0] if parts else b"", parts, serving.converter)  # type: ignore[no-any-return]
        except RemoteProtocolError as error:
            serving.breach = error
            raise UnservedError(wire.ARGUMENTS, str(error)) from None
        except (TypeError, CallRefusedError) as error:
            raise UnservedError(wire.ARGUMENTS, str(error)) from None
        finally:
            parts.clear()

    def _call(self, serving: _Serving, parts: list[Any]) -> _Outcome:
        function = serving.function
        assert function is not None
        if tracing.active is not None:
            serving.begin_span()
        args, named = self._arguments(serving, parts)
        began = time.monotonic()
        try:
            result = serving.context.run(function.function, *args, **named)
        finally:
            function.pace.took(time.monotonic() - began)
        if not function.is_stream:
            payload, apart = self._packed(serving, result, "the result")
            return wire.CallResult(serving.number, payload), apart
        serving.generator = result
        return self._next(serving)

    def _next(self, serving: _Serving) -> _Outcome:
        try:
            item = serving.context.run(next, serving.generator)
        except StopIteration:
            return self._result(serving, None)
        try:
            payload, apart = self._packed(serving, item, "an item")
            return wire.StreamItem(serving.number, payload), apart
        except UnservedError:
            _close(serving)
            raise

    async def _call_async(self, serving: _Serving, parts: list[Any]) -> _Outcome:
        function = serving.function
        assert function is not None
        if tracing.active is not None:
            serving.begin_span()
        if serving.span is not None:
            serving.span.enter()
        args, named = self._arguments(serving, parts)
        result = function.function(*args, **named)
        if not function.is_stream:
            return self._result(serving, await result)
        serving.generator = result
        return await self._next_async(serving)

    async def _next_async(self, serving: _Serving) -> _Outcome:
        if serving.span is not None:
            serving.span.enter()
        try:
            item = await anext(serving.generator)
        except StopAsyncIteration:
            return self._result(serving, None)
        try:
            payload, apart = self._packed(serving, item, "an item")
            return wire.StreamItem(serving.number, payload), apart
        except UnservedError:
            await _close_async(serving)
            raise

    def _result(self, serving: _Serving, result: Any) -> _Outcome:
        payload, apart = self._packed(serving, result, "the result")
        return wire.CallResult(serving.number, payload), apart

    def _packed(self, serving: _Serving, value: Any, what: str) -> tuple[wire.CallPayload, Any]:
        """Return the payload of a value, and its parts if they travel apart; UnservedError if it cannot be sent."""
        handles: list[wire.PassedHandle] = []
        try:
            parts = pack(value, serving.converter, handles)
        except (TypeError, CallRefusedError) as error:
            raise UnservedError(wire.NO_RESULT, f"{what}: {error}") from None
        except BaseException as error:  # code of the program, such as a property of what it returned
            raise UnservedError(wire.NO_RESULT, f"{what}: {spell_error(error)}") from None
        size = sum(map(len, parts))
        if size > self._message_bytes:
            failure = too_large(serving.number, what, size, self._message_bytes)
            raise UnservedError(failure.kind, failure.text)
        try:
            if handles:
                self._passing.share(serving.peer, handles)
        except CallRefusedError as error:
            raise UnservedError(wire.NO_RESULT, f"{what}: {error}") from None
        payload = wire.payload_of(parts, handles)
        return payload, parts if payload.sizes else None


def _close(serving: _Serving) -> _Outcome:
    try:
        serving.context.run(serving.generator.close)
    except BaseException:
        logger.exception("a stream raised when it was closed")
    return _STOPPED


async def _close_async(serving: _Serving) -> _Outcome:
    try:
        await serving.generator.aclose()
    except BaseException:
        logger.exception("a stream raised when it was closed")
    return _STOPPED
