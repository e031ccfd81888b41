"""Metrics of this process for Prometheus or for a function that pushes them, and spans for OpenTelemetry.

    import covey.metrics

    covey.metrics.register()           # add covey's metrics to those of the program

`covey.serve_http` serves them from a program that has no page of its own. `covey run --http PORT` serves those of all
ranks of a machine, and needs no change to the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.runtime.group.explanation import GroupMetrics, MessageMetrics, OperationMetrics, PeerMetrics
from covey.runtime.metrics.pages import SAMPLES_PUSH_SECONDS, SampleCollector, SamplePush
from covey.runtime.metrics.samples import samples
from covey.runtime.metrics.spans import SpanExport
from covey.wire.reports import Sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

__all__ = [
    "GroupMetrics",
    "MessageMetrics",
    "OperationMetrics",
    "PeerMetrics",
    "Sample",
    "SampleCollector",
    "SamplePush",
    "SpanExport",
    "collector",
    "export_spans",
    "push",
    "register",
]


def collector() -> SampleCollector:
    """Return a collector for a registry of prometheus_client: it reads the counters of all groups of this process."""
    return SampleCollector(lambda: [({}, samples())])


def register(registry: CollectorRegistry | None = None) -> SampleCollector:
    """Add covey's metrics to a registry of prometheus_client: by default, to the one that programs use by default."""
    from prometheus_client import REGISTRY

    made = collector()
    (REGISTRY if registry is None else registry).register(made)
    return made


def push(function: Callable[[list[Sample]], object], every: float = SAMPLES_PUSH_SECONDS) -> SamplePush:
    """Call `function(samples)` every so many seconds, on a thread of covey's, until the result is closed.

    Each `Sample` has the `name` of a metric, `labels` as pairs of texts, and a `value`. The first call comes after the
    first pause. One call runs at a time; while it does, no samples are kept for later. Exceptions are logged once.

    Raises:
        ConfigError: `function` cannot be called, or `every` is less than 0.1.
    """
    return SamplePush(function, every)


def export_spans(provider: Any = None) -> SpanExport:
    """Make a span of every operation, message and call from now on, until the result is closed.

    Calls carry the trace context, so the spans of functions that they run on other nodes which export spans, too, and
    of what those functions do, belong to the trace of the caller.

    `provider` is a tracer provider of OpenTelemetry; default: the one that the program has set.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    return SpanExport(provider)
