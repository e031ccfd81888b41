"""Serves the calls of other nodes: finds the function, decodes its arguments, runs it, and reports its end to the core.

Each call under way is a `_Serving`. Functions run on handler threads or on the loop of asynchronous functions. Those
that were short so far run on the thread that has received the call (`functions.CallPace`). A stream is advanced one
item at a time, so that it holds no thread between two items.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from covey.base.errors import CallRefusedError, ConfigError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.runtime.calls.caller import Caller, current_caller
from covey.runtime.calls.handlers import HandlerLoop, HandlerThreads
from covey.runtime.calls.outcomes import raised, too_large
from covey.wire import calls as wire
from covey.wire.call_values import pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.errors import CoveyError
    from covey.proto.calling.effects import RunHandler
    from covey.runtime.calls.functions import CallableFunction, FunctionRegistry
    from covey.runtime.calls.objects import ExportedObjects
    from covey.runtime.calls.values import ValueConverter

logger = logging.getLogger("covey")


class ServedCalls(Protocol):
    """Where the ends of functions are reported; on any thread."""

    def finished(self, peer: Seat, number: int, answer: wire.CallResult | wire.CallFailure | None, parts: Any) -> None:
        """Answer a call whose function has ended."""

    def yielded(self, peer: Seat, number: int, payload: wire.CallPayload, parts: Any) -> None:
        """Send an item of a stream."""

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a peer."""


class _Serving:
    """A call under way: its function, its caller, and the generator of a stream."""

    def __init__(self, peer: Seat, number: int, caller: Caller, converter: ValueConverter) -> None:
        self.peer, self.number, self.caller, self.converter = peer, number, caller, converter
        self.function: CallableFunction | None = None
        self.generator: Any = None
        self.context = contextvars.Context()
        """That of the function's own code; the next item of a stream may run on another thread."""
        self.context.run(current_caller.set, caller)
        self.is_closed = False
        """Whether its generator must not be advanced any more."""

    @property
    def key(self) -> tuple[Seat, int]:
        return self.peer, self.number


class Serving:
    """The functions of this node that run for other nodes."""

    def __init__(
        self,
        calls: ServedCalls,
        functions: FunctionRegistry,
        exported: ExportedObjects,
        converter_for: Callable[[Seat], ValueConverter],
        *,
        run_soon: Callable[[Callable[[], None]], bool],
        name: str,
        message_bytes: int,
    ) -> None:
        """`run_soon` runs a short job on the calling thread after it has handled messages; False if it cannot."""
        self._run_soon = run_soon
        self._calls, self._functions, self._exported = calls, functions, exported
        self._converter_for, self._message_bytes = converter_for, message_bytes
        self._threads, self._loop = HandlerThreads(name), HandlerLoop(name)
        self._under_way: dict[tuple[Seat, int], _Serving] = {}

    # What the core wants; none of these blocks

    def run(self, effect: RunHandler) -> None:
        """Run the function of a call."""
        peer, request = Seat(effect.peer), effect.request
        parts = list(effect.parts or request.payload.inline)
        caller = Caller(peer, request.name, effect.deadline)
        serving = _Serving(peer, effect.number, caller, self._converter_for(peer))
        self._under_way[serving.key] = serving
        try:
            function = serving.function = self._find(serving, request)
        except CallRefusedError as error:
            self._refuse(serving, wire.UNKNOWN, str(error))
            return
        except ConfigError as error:
            self._refuse(serving, wire.ARGUMENTS, str(error))
            return
        if request.payload.sizes and not parts:
            size = request.payload.total_bytes
            self._refuse(serving, wire.TOO_LARGE, f"there is no memory for arguments of {size} bytes")
        elif function.is_stream != bool(request.credit):
            use = "stream, which makes items: use node.stream" if function.is_stream else "function: use node.call"
            self._refuse(serving, wire.ARGUMENTS, f"{request.name!r} is a {use}")
        elif function.is_async:
            self._loop.run(serving.key, self._run_async(serving, parts), lambda: self._never_ran(serving))
        else:
            is_short = function.pace.is_short and not request.payload.sizes
            if not is_short or function.is_stream or not self._run_soon(lambda: self._run(serving, parts)):
                self._on_thread(serving, lambda: self._run(serving, parts))

    def step(self, peer: Seat, number: int) -> None:
        """Make the next item of a stream."""
        serving = self._under_way[peer, number]
        assert serving.function is not None
        if serving.function.is_async:
            self._loop.run(serving.key, self._step_async(serving), lambda: self._never_ran(serving))
        else:
            self._on_thread(serving, lambda: self._step(serving))

    def stop(self, peer: Seat, number: int, *, is_running: bool) -> None:
        """Cancel a function, or close a stream that is between two items."""
        serving = self._under_way.get((peer, number))
        if serving is None:
            return
        serving.caller.cancelled()
        assert serving.function is not None
        if is_running:
            if serving.function.is_async:
                self._loop.cancel(serving.key)
            return
        serving.is_closed = True
        del self._under_way[peer, number]
        if serving.generator is not None and serving.function.is_async:
            self._loop.run(serving.key, _close_async(serving.generator))
        elif serving.generator is not None:
            self._threads.run(lambda: serving.context.run(_close, serving.generator))

    def close(self) -> None:
        """Cancel asynchronous functions, and end the threads, each after the function that it runs."""
        self._loop.close()
        self._threads.close()

    def _on_thread(self, serving: _Serving, job: Callable[[], None]) -> None:
        try:
            self._threads.run(job)
        except RuntimeError as error:
            self._refuse(serving, wire.NO_RESULT, f"no thread could be started for the function: {error}")

    # On handler threads; short functions on the thread that receives messages

    def _find(self, serving: _Serving, request: wire.CallRequest) -> CallableFunction:
        if request.target:
            return self._exported.method(request.target, request.name, serving.peer)
        function = self._functions.get(request.name)
        if function is None:
            raise CallRefusedError(self._functions.unknown(request.name))
        return function

    def _arguments(self, serving: _Serving, parts: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments; None if the call is over because they do not fit."""
        assert serving.function is not None
        try:
            return serving.function.signature.arguments(parts[0] if parts else b"", parts, serving.converter)
        except RemoteProtocolError as error:
            self._refuse(serving, wire.ARGUMENTS, str(error))
            self._calls.broke_protocol(serving.peer, error)
        except (TypeError, CallRefusedError) as error:
            self._refuse(serving, wire.ARGUMENTS, str(error))
        return None

    def _run(self, serving: _Serving, parts: list[Any]) -> None:
        found = self._arguments(serving, parts)
        if found is None:
            return
        assert serving.function is not None
        args, named = found
        del found, parts
        began = time.monotonic()
        try:
            result = serving.context.run(serving.function.function, *args, **named)
        except BaseException as error:  # SystemExit, too: it must not end the thread
            self._raised(serving, error)
            return
        finally:
            serving.function.pace.took(time.monotonic() - began)
        if serving.function.is_stream:
            serving.generator = result
            self._step(serving)
        else:
            self._finish(serving, result)

    def _step(self, serving: _Serving) -> None:
        try:
            item = serving.context.run(next, serving.generator)
        except StopIteration:
            self._finish(serving, None)
        except BaseException as error:
            self._raised(serving, error)
        else:
            self._yield(serving, item)

    # On the loop of asynchronous functions

    async def _run_async(self, serving: _Serving, parts: list[Any]) -> None:
        current_caller.set(serving.caller)
        found = self._arguments(serving, parts)
        if found is None:
            return
        assert serving.function is not None
        args, named = found
        del found, parts
        try:
            result = serving.function.function(*args, **named)
            if not serving.function.is_stream:
                result = await result
        except asyncio.CancelledError:
            self._stopped(serving)
        except BaseException as error:
            self._raised(serving, error)
        else:
            if serving.function.is_stream:
                serving.generator = result
                await self._step_async(serving)
            else:
                self._finish(serving, result)

    async def _step_async(self, serving: _Serving) -> None:
        current_caller.set(serving.caller)
        try:
            item = await anext(serving.generator)
        except StopAsyncIteration:
            self._finish(serving, None)
        except asyncio.CancelledError:
            self._stopped(serving)
        except BaseException as error:
            self._raised(serving, error)
        else:
            self._yield(serving, item)

    def _never_ran(self, serving: _Serving) -> None:
        """Note that a function was cancelled before it began, or a stream before it made its next item."""
        if serving.generator is not None:
            self._loop.run(serving.key, _close_async(serving.generator))
        self._stopped(serving)

    # Ends

    def _finish(self, serving: _Serving, result: Any) -> None:
        payload, parts, failure = self._packed(serving, result, "the result")
        self._under_way.pop(serving.key, None)
        answer = failure or wire.CallResult(serving.number, payload)
        self._calls.finished(serving.peer, serving.number, answer, parts)

    def _yield(self, serving: _Serving, item: Any) -> None:
        payload, parts, failure = self._packed(serving, item, "an item")
        if failure is None:
            self._calls.yielded(serving.peer, serving.number, payload, parts)
            return
        with contextlib.suppress(BaseException):
            if not inspect.isasyncgen(serving.generator):
                serving.generator.close()
        self._under_way.pop(serving.key, None)
        self._calls.finished(serving.peer, serving.number, failure, None)

    def _packed(
        self, serving: _Serving, value: Any, what: str
    ) -> tuple[wire.CallPayload, Any, wire.CallFailure | None]:
        """Return the payload of a value and its parts if they travel apart, or why it cannot be sent."""
        nothing = wire.CallPayload()
        try:
            parts = pack(value, serving.converter)
        except (TypeError, CallRefusedError) as error:
            return nothing, None, wire.CallFailure(serving.number, wire.NO_RESULT, "", f"{what}: {error}")
        size = sum(map(len, parts))
        if size > self._message_bytes:
            return nothing, None, too_large(serving.number, what, size, self._message_bytes)
        payload = wire.payload_of(parts)
        return payload, parts if payload.sizes else None, None

    def _raised(self, serving: _Serving, error: BaseException) -> None:
        self._under_way.pop(serving.key, None)
        self._calls.finished(serving.peer, serving.number, raised(serving.number, error), None)

    def _stopped(self, serving: _Serving) -> None:
        self._under_way.pop(serving.key, None)
        self._calls.finished(serving.peer, serving.number, None, None)

    def _refuse(self, serving: _Serving, kind: int, text: str) -> None:
        self._under_way.pop(serving.key, None)
        self._calls.finished(serving.peer, serving.number, wire.CallFailure(serving.number, kind, "", text), None)


def _close(generator: Any) -> None:
    try:
        generator.close()
    except BaseException:
        logger.exception("a stream raised when it was closed")


async def _close_async(generator: Any) -> None:
    try:
        await generator.aclose()
    except BaseException:
        logger.exception("a stream raised when it was closed")
