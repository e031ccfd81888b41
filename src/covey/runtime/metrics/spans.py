"""Spans for OpenTelemetry. Those of collectives are made of the recorded operations, on a thread of its own, so that
operations stay fast; those of calls and messages begin with them, and end on that thread (`tracing`).
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

from covey.base.errors import ConfigError
from covey.base.numbers import operation_name
from covey.runtime import tracing
from covey.runtime.counters import process
from covey.runtime.recorder import FAILED, OUTCOMES, RUNNING, clock_ns

if TYPE_CHECKING:
    from covey.runtime.counters import GroupCounters
    from covey.runtime.recorder import Record

EVERY_SECONDS: Final = 1.0
SPANS_JOIN_SECONDS: Final = 5.0


class SpanExport:
    """Makes a span of each collective that ends from now on, and of messages and calls that begin, until it ends."""

    def __init__(self, provider: Any = None) -> None:
        """`provider` is a tracer provider of OpenTelemetry; default: the one that the program has set.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigError("spans need OpenTelemetry; install covey[otel] and opentelemetry-sdk") from error
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._tracer = trace.get_tracer("covey", tracer_provider=provider)
        self._calls = tracing.Tracer(trace, self._tracer)
        self._seen: weakref.WeakKeyDictionary[GroupCounters, int] = weakref.WeakKeyDictionary()
        """By group: the last operation that has a span, or that had ended before this was made."""
        for group in process.groups():
            self._seen[group] = max((record[0] for record in _ended(group, 0)), default=0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="covey-spans", daemon=True)
        self._thread.start()
        tracing.opened(self._calls)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(EVERY_SECONDS)
            self._export()

    def _export(self) -> None:
        self._calls.finish()
        clock = time.time_ns() - clock_ns()
        for group in process.groups():
            for record in _ended(group, self._seen.get(group, 0)):
                self._make(group, record, clock)
                self._seen[group] = record[0]

    def _make(self, group: GroupCounters, record: Record, clock: int) -> None:
        sequence, operation, outcome, begun, ended, sent, received, peers, phases, view = record
        attributes: dict[str, Any] = {
            "covey.group": group.name,
            "covey.rank": group.rank,
            "covey.sequence": sequence,
            "covey.outcome": OUTCOMES[outcome],
            "covey.sent_bytes": sent,
            "covey.received_bytes": received,
            "covey.peers": [rank for rank in range(len(group.seats)) if peers >> rank & 1],
            "covey.phases": phases,
            "covey.view": view,
        }
        name = f"covey.{operation_name(operation)}"
        span = self._tracer.start_span(name, attributes=attributes, start_time=begun + clock)
        if outcome == FAILED:
            span.set_status(self._error)
        span.end(end_time=ended + clock)

    def close(self) -> None:
        """Make the spans of the operations that have ended, and make no more. Closing twice is fine."""
        if not self._closing.is_set():
            tracing.closed(self._calls)
        self._closing.set()
        self._thread.join(SPANS_JOIN_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ended(group: GroupCounters, after: int) -> list[Record]:
    return [record for record in group.recorder.records(after) if record[2] != RUNNING]
