"""Operations as spans of OpenTelemetry, made with its SDK."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import covey
import covey.metrics
from covey.base.errors import ConfigError
from covey.testing.threads import run_threads


def test_every_operation_becomes_a_span_with_its_peer_and_bytes() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))

    def work(group: covey.Group) -> None:
        group.all_reduce(np.ones(3))  # before spans were asked for
        if group.rank == 0:
            with covey.metrics.export_spans(provider):
                group.all_reduce(np.ones(1000, np.float32))
                group.barrier()
        else:
            group.all_reduce(np.ones(1000, np.float32))
            group.barrier()
        group.barrier()

    before = time.time_ns()
    run_threads(2, work)
    spans = {}
    for span in kept.get_finished_spans():
        facts = dict(span.attributes or {})
        if facts["covey.rank"] == 0:
            spans[facts["covey.sequence"]] = span, facts
    assert list(spans) == [2, 3]
    span, facts = spans[2]
    assert span.name == "covey.all_reduce"
    assert (facts["covey.sent_bytes"], facts["covey.received_bytes"], facts["covey.peers"]) == (4000, 4000, (1,))
    assert (facts["covey.outcome"], facts["covey.view"]) == ("returned", 0)
    assert span.start_time is not None
    assert span.end_time is not None
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    assert spans[3][0].name == "covey.barrier"


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"covey\[otel\]"):
        covey.metrics.export_spans()
