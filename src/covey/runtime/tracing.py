"""Spans of calls and messages, while the program exports spans (`metrics.spans`), and W3C trace contexts with calls.

`active` is None while no spans are asked for: an operation looks at that, and no further. A span begins on the thread
of the program that starts the operation, or runs the function. When it ends, it is only noted, because messages end on
threads that receive for all: the thread that exports ends it for OpenTelemetry, whose processors are code of the
program.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

WAITING_SPANS: Final = 65536
"""Spans that have ended and wait for the thread that exports them once a second; beyond that the oldest are dropped."""
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z")

active: Tracer | None = None
"""What makes the spans: that of the last export which was begun and is not closed."""
_tracers: list[Tracer] = []
_is_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("covey_inside_span", default=False)
"""Whether an operation that has a span calls others of covey."""


class OpenSpan:
    """A span that has begun."""

    def __init__(self, tracer: Tracer, span: Any, trace: str) -> None:
        self._tracer, self._span = tracer, span
        self.trace = trace
        """The traceparent that a call carries, so that what it causes elsewhere has this span as its parent."""

    def end(self, error: BaseException | str | None = None) -> None:
        """Note that the operation has ended, with an error if there is one. On any thread; runs no other code."""
        self._tracer.ended.append((self._span, time.time_ns(), error))

    def enter(self, context: contextvars.Context | None = None) -> None:
        """Make this the current span of a context; None: of the one in which this is called."""
        if context is None:
            self._tracer.attach(self._span)
        else:
            context.run(self._tracer.attach, self._span)


class Tracer:
    """Begins spans with the API of OpenTelemetry."""

    def __init__(self, trace: Any, tracer: Any) -> None:
        """`trace` is the module `opentelemetry.trace`; `tracer` makes the spans."""
        from opentelemetry import context

        self._trace, self._tracer, self._context = trace, tracer, context
        self.ended: deque[tuple[Any, int, BaseException | str | None]] = deque(maxlen=WAITING_SPANS)
        """Spans that have ended, when, and with which error."""

    def call(self, name: str, rank: int, *, is_stream: bool) -> OpenSpan:
        """Begin the span of a call, as a child of the caller's current one."""
        attributes = {"covey.peer": rank, "rpc.system": "covey", "rpc.method": name, "covey.is_stream": is_stream}
        return self._begin(f"covey.call {name}", self._trace.SpanKind.CLIENT, attributes, None)

    def served(self, name: str, seat: int, trace: str) -> OpenSpan:
        """Begin the span of a function that another node has called, as a child of the call."""
        attributes = {"covey.caller_seat": seat, "rpc.system": "covey", "rpc.method": name}
        return self._begin(f"covey.serve {name}", self._trace.SpanKind.SERVER, attributes, self._remote(trace))

    def message(self, name: str, run: Callable[[], T], attributes: dict[str, Any]) -> T:
        """Return what `run` returns, an operation on a message; its span ends with it, or with the work it returns."""
        is_sent = name.startswith("send")
        kind = self._trace.SpanKind.PRODUCER if is_sent else self._trace.SpanKind.CONSUMER
        span = self._begin(f"covey.{name}", kind, attributes, None)
        was_inside = _is_inside.set(True)
        try:
            result = run()
        except BaseException as error:
            span.end(error)
            raise
        finally:
            _is_inside.reset(was_inside)
        if isinstance(result, Work):
            result.add_waker(lambda work: span.end(work.failure))
        else:
            span.end()
        return result

    def _begin(self, name: str, kind: Any, attributes: dict[str, Any], context: Any) -> OpenSpan:
        span = self._tracer.start_span(name, context=context, kind=kind, attributes=attributes)
        of = span.get_span_context()
        trace = f"00-{of.trace_id:032x}-{of.span_id:016x}-{int(of.trace_flags):02x}" if of.is_valid else ""
        return OpenSpan(self, span, trace)

    def _remote(self, trace: str) -> Any:
        """Return the context of a traceparent; an empty one if it is none, so that the span begins a trace."""
        found, context = _TRACEPARENT.match(trace), self._context.Context()
        if found is None:
            return context
        trace_id, span_id, flags = (int(each, 16) for each in found.groups())
        parent = self._trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=self._trace.TraceFlags(flags))
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent), context)

    def attach(self, span: Any) -> None:
        """Make a span the current one."""
        self._context.attach(self._trace.set_span_in_context(span))

    def finish(self) -> None:
        """End the spans that have ended, for OpenTelemetry. On the thread that exports them."""
        while self.ended:
            span, at, error = self.ended.popleft()
            if error is not None:
                text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text))
            span.end(end_time=at)


def is_wanted() -> bool:
    """Tell whether an operation that begins now has a span of its own: spans are asked for, and it is in none."""
    return active is not None and not _is_inside.get()


def opened(tracer: Tracer) -> None:
    """Let operations that begin from now on have spans of this tracer."""
    global active
    _tracers.append(tracer)
    active = tracer


def closed(tracer: Tracer) -> None:
    """Let it begin no more spans."""
    global active
    _tracers.remove(tracer)
    active = _tracers[-1] if _tracers else None
