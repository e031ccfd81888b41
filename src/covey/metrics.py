"""Metrics of this process for Prometheus, and spans for OpenTelemetry.

    import covey.metrics

    covey.metrics.register()           # add covey's metrics to those of the program

`covey.serve_http` serves them from a program that has no page of its own. `covey run --http PORT` serves those of all
ranks of a machine, and needs no change to the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.runtime.group.explanation import GroupMetrics, MessageMetrics, OperationMetrics, PeerMetrics
from covey.runtime.metrics.pages import SampleCollector
from covey.runtime.metrics.samples import samples
from covey.runtime.metrics.spans import SpanExport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = [
    "GroupMetrics",
    "MessageMetrics",
    "OperationMetrics",
    "PeerMetrics",
    "SampleCollector",
    "SpanExport",
    "collector",
    "export_spans",
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


def export_spans(provider: Any = None) -> SpanExport:
    """Make a span of every operation that ends from now on, until the result is closed.

    `provider` is a tracer provider of OpenTelemetry; default: the one that the program has set.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    return SpanExport(provider)
