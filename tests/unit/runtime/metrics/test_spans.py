"""Operations as spans of OpenTelemetry, made with its SDK."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator  # noqa: TC003 - annotations of functions are evaluated

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import covey
import covey.metrics
from covey.base.errors import ConfigError
from covey.runtime import tracing
from covey.testing import LinkedNodes
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


def spans_of(kept: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    """Return spans by name, in the order of their beginnings."""
    found: dict[str, list[ReadableSpan]] = {}
    for span in sorted(kept.get_finished_spans(), key=lambda span: span.start_time or 0):
        found.setdefault(span.name, []).append(span)
    return found


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


@pytest.mark.parametrize("where", ["linked nodes", "a run"])
def test_a_call_and_the_function_that_it_runs_are_spans_of_one_trace(where: str) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("program")

    def register(node: covey.Node, rank: int) -> None:
        @node.rpc
        def relay(text: str) -> str:
            with tracer.start_as_current_span("own"):
                return str(node.call((rank + 1) % 3, "leaf", text))

        @node.rpc
        async def leaf(text: str) -> str:
            with tracer.start_as_current_span("in leaf"):
                await asyncio.sleep(0)
            return text.upper()

        node.register("quiet", lambda: None)

        @node.rpc
        def fail() -> None:
            raise KeyError("what")

        @node.rpc
        def count(to: int) -> Iterator[int]:
            for number in range(to):
                with tracer.start_as_current_span("item"):
                    yield number

    def use(node: covey.Node) -> None:
        node.call(1, "quiet")
        with covey.metrics.export_spans(provider), tracer.start_as_current_span("root"):
            assert node.call(1, "relay", "text") == "TEXT"
            with pytest.raises(covey.RemoteCallError):
                node.call(1, "fail")
            assert list(node.stream(1, "count", 3)) == [0, 1, 2]
        node.call(1, "quiet")

    if where == "a run":

        def body(group: covey.Group) -> None:
            register(group.node, group.rank)
            group.barrier()
            if group.rank == 0:
                use(group.node)
            group.barrier()

        run_threads(3, body, lanes="unix")
    else:
        with LinkedNodes(3) as nodes:
            for rank, node in enumerate(nodes):
                register(node, rank)
            use(nodes[0])
    spans = spans_of(kept)
    spans.pop("covey.barrier", None)
    chain = ["root", "covey.call relay", "covey.serve relay", "own", "covey.call leaf", "covey.serve leaf", "in leaf"]
    others = ["covey.call fail", "covey.serve fail", "covey.call count", "covey.serve count", "item"]
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys((*chain, *others), 1) | {"item": 3}
    for parent, child in itertools.pairwise(chain):
        assert parent_of(spans[child][0]) == spans[parent][0].context.span_id, child
    assert all(parent_of(item) == spans["covey.serve count"][0].context.span_id for item in spans["item"])
    assert len({span.context.trace_id for found in spans.values() for span in found}) == 1
    for name, status in (("covey.call fail", "KeyError"), ("covey.serve fail", "KeyError"), ("covey.call leaf", "")):
        assert status in (spans[name][0].status.description or ""), name
        assert spans[name][0].status.is_ok is not bool(status)
    assert spans["covey.call relay"][0].kind is SpanKind.CLIENT
    assert dict(spans["covey.call relay"][0].attributes or {})["covey.peer"] == 1


def test_messages_have_spans_with_their_ends_and_errors_while_spans_are_asked_for() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))

    def body(group: covey.Group) -> None:
        x, other = np.arange(3.0) + group.rank, 1 - group.rank
        group.sendrecv(x, other, other, 1)
        group.barrier()
        with contextlib.ExitStack() as stack:
            if group.rank == 0:
                stack.enter_context(covey.metrics.export_spans(provider))
            group.barrier()
            if group.rank == 0:
                group.send(x, 1, 2)
                assert group.recv(1, 3, async_op=True).wait(60.0)[0] == 1.0
                group.send_object({"a": 1}, 1, 4, async_op=True).wait(60.0)
                assert group.recv_object(1, 5) == [5]
                with pytest.raises(covey.DeadlineError):
                    group.recv(1, 9, timeout=0.01)
            else:
                assert group.recv(0, 2)[1] == 1.0
                group.send(x, 0, 3)
                assert group.recv_object(0, 4) == {"a": 1}
                group.send_object([5], 0, 5)
            assert group.sendrecv(x, other, other, 6)[0] == float(other)
            group.barrier()
        group.sendrecv(x, other, other, 7)

    run_threads(2, body, lanes="unix")
    seen = {}
    for name, found in spans_of(kept).items():
        for span in found:
            facts = dict(span.attributes or {})
            if name != "covey.barrier" and facts["covey.rank"] == 0:
                seen[name, facts["covey.tag"]] = span.status.is_ok, facts["covey.peer"], span.kind
    assert seen == {
        ("covey.send", 2): (True, 1, SpanKind.PRODUCER),
        ("covey.recv", 3): (True, 1, SpanKind.CONSUMER),
        ("covey.send_object", 4): (True, 1, SpanKind.PRODUCER),
        ("covey.recv_object", 5): (True, 1, SpanKind.CONSUMER),
        ("covey.recv", 9): (False, 1, SpanKind.CONSUMER),
        ("covey.sendrecv", 6): (True, 1, SpanKind.PRODUCER),
    }


def test_a_traceparent_that_is_none_begins_a_trace() -> None:
    provider = TracerProvider()
    with covey.metrics.export_spans(provider):
        assert tracing.active is not None
        for text in (
            "",
            "00-xyz",
            "01-" + "a" * 32 + "-" + "b" * 16 + "-01",
            "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
        ):
            span = tracing.active.served("name", 1, text)
            assert span.trace
            assert not span.trace.startswith(f"00-{'0' * 32}")
            span.end()
    assert tracing.active is None
