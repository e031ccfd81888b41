"""What Prometheus is shown, against a group that has worked."""

from __future__ import annotations

import itertools
import re
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.compiled import use_executors
from tests.support.waiting import DEADLINE

import covey
import covey.metrics
from covey.base.errors import ConfigError
from covey.runtime.group.internals import engine_of
from covey.runtime.keeper.pages import parse_address, serve_ranks
from covey.runtime.metrics.samples import BOUNDS, TABLE, samples
from covey.testing.threads import run_threads
from covey.wire import messages, reports


def work(group: covey.Group) -> Any:
    other = 1 - group.rank
    for length in (1, 1, 1, 50_000):
        group.all_reduce(np.full(length, group.rank + 1.0, np.float32))
    group.send(np.arange(10.0 + group.rank), other)
    group.recv(other, out=np.empty(10 + other))
    group.all_reduce(np.ones(1000, np.float32), compress="int8")
    group.barrier()
    return group.metrics()


@pytest.mark.parametrize("executors", ["python", "native", "mixed"])
def test_a_group_knows_what_it_has_done(executors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_executors(monkeypatch, executors)
    for rank, found in enumerate(run_threads(2, work)):
        reduced = found.operations["all_reduce"]
        assert (reduced.calls, reduced.failures) == (5, 0)
        # Two ranks swap whole small arrays, and divide a large one: each sends half, and then the other half's sum.
        compressed = found.compression.sent_bytes
        assert reduced.sent_bytes == 3 * 4 + 200_000 + compressed
        assert reduced.received_bytes == reduced.sent_bytes
        assert 0 < compressed < 4000
        assert found.operations["barrier"].calls == 1
        assert 0 < reduced.p50 <= reduced.p90 <= reduced.p99 <= 1.5 * reduced.seconds
        (peer,) = found.peers
        assert (peer.rank, peer.lane) == (1 - rank, "memory")
        assert peer.sent_bytes == reduced.sent_bytes
        assert peer.sends >= 6
        assert (found.messages.sent, found.messages.received) == (1, 1)
        assert (found.messages.sent_bytes, found.messages.received_bytes) == (8 * (10 + rank), 8 * (11 - rank))
        assert 0 < found.communication_share <= 1


@pytest.mark.parametrize("executors", ["python", "native"])
def test_repeated_small_calls_are_all_counted_and_recorded(executors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them take the shortcut of the compiled executor."""
    use_executors(monkeypatch, executors)

    def work(group: covey.Group) -> tuple[dict[str, int], list[Any]]:
        x, parts = np.arange(8.0), np.empty((2, 8))
        for _ in range(20):
            group.all_reduce(x)
            group.broadcast(x, 1)
            group.reduce(x)
            group.barrier()
            group.all_gather(x, out=parts)
            group.reduce_scatter(x, out=np.empty(4))
            group.all_to_all(parts, out=np.empty((2, 8)))
        calls = {name: each.calls for name, each in group.metrics().operations.items()}
        return calls, engine_of(group).counters.recorder.records(0)

    names = ("all_reduce", "broadcast", "reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all")
    for rank, (calls, records) in enumerate(run_threads(2, work)):
        assert calls == dict.fromkeys(names, 20)
        assert [record[0] for record in records] == list(range(1, 141))
        assert all(record[3] <= record[4] for record in records)
        assert all(before[4] <= after[3] for before, after in itertools.pairwise(records))
        assert {record[7] for record in records if record[5] or record[6]} == {1 << (1 - rank)}


def test_every_sample_is_in_the_table_with_its_labels() -> None:
    run_threads(2, work)
    labels = {row.name: set(row.labels) for row in TABLE}
    for row in TABLE:
        if row.kind == "histogram":
            labels |= {f"{row.name}_bucket": {*row.labels, "le"}}
            labels |= {f"{row.name}{end}": set(row.labels) for end in ("_sum", "_count")}
    found = samples()
    assert {name for name, *_ in map(tuple_of, found)} <= set(labels)
    for name, given, _ in map(tuple_of, found):
        assert set(given) == labels[name], name
    shown = {name for name, *_ in map(tuple_of, found)}
    absent = {"covey_up", "covey_members", "covey_generation", "covey_view"}  # of a keeper, and of an open node
    absent |= {"covey_step", "covey_report", "covey_step_seconds"}  # of a program that reports
    assert {row.name for row in TABLE if row.kind != "histogram"} - absent <= shown


def tuple_of(sample: reports.Sample) -> tuple[str, dict[str, str], float]:
    return sample.name, dict(sample.labels), sample.value


def test_buckets_grow_and_the_last_one_holds_all() -> None:
    run_threads(2, work)
    found = [tuple_of(sample) for sample in samples() if dict(sample.labels).get("op") == "all_reduce"]
    values = [value for name, _, value in found if name == "covey_operation_seconds_bucket"]
    (count,) = [value for name, _, value in found if name == "covey_operation_seconds_count"]
    assert values == sorted(values)
    assert values[-1] == count
    bounds = [float(bound) for bound, _ in BOUNDS]
    assert bounds == sorted(bounds)
    assert len(values) == len(bounds)


def test_a_registry_of_prometheus_can_hold_them() -> None:
    run_threads(2, work)
    registry = CollectorRegistry()
    covey.metrics.register(registry)
    page = generate_latest(registry).decode()
    assert re.search(r'^covey_operations_total\{op="all_reduce"\} [0-9.]+$', page, re.MULTILINE)
    assert "# TYPE covey_operation_seconds histogram" in page


def test_the_page_is_served_until_it_is_closed() -> None:
    with covey.serve_http(0) as server:
        page = urllib.request.urlopen(server.url + "/metrics", timeout=DEADLINE).read().decode()
        with pytest.raises(ConfigError, match="cannot be served"):
            covey.serve_http(server.port)
    assert "covey_heartbeats_sent_total" in page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url + "/metrics", timeout=DEADLINE)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_only_answers_questions(method: str) -> None:
    with covey.serve_http(0) as server:
        before = {sample.name for sample in samples()}
        asked = urllib.request.Request(server.url + "/metrics", data=b"covey_groups 7", method=method)
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(asked, timeout=DEADLINE)
        assert {sample.name for sample in samples()} == before


def test_the_page_of_a_keeper_has_the_ranks_that_answer() -> None:
    told = reports.Sample("covey_groups", (), 2.0), reports.Sample("covey_unknown_total", (), 1.0)
    body = reports.encode(reports.Samples(told))
    answers = {
        0: messages.Inspected("metrics", 0, 1, body),
        1: None,
        2: messages.Inspected("metrics", 0, 1, b"nonsense"),
        3: messages.Inspected("metrics", 0, 0, b""),
    }
    with serve_ranks(lambda _question, _within: answers, "127.0.0.1", 0) as server:
        page = urllib.request.urlopen(server.url + "/metrics", timeout=DEADLINE).read().decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert lines == [
        'covey_up{rank="0"} 1.0',
        *(f'covey_up{{rank="{rank}"}} 0.0' for rank in (1, 2, 3)),
        'covey_groups{rank="0"} 2.0',
    ]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9100", ("127.0.0.1", 9100)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::]:9100", ("::", 9100)),
        ("0", ("127.0.0.1", 0)),
    ],
)
def test_an_address_is_a_port_or_has_one(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", "65536", ":9100", "host:", "-1", "host:port"])
def test_another_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a port"):
        parse_address(text)


def test_what_the_program_reports_is_a_gauge_for_each_name() -> None:
    def report(group: covey.Group) -> None:
        if group.rank == 0:
            group.report(step=4)
            group.report(step=5, loss=0.5, samples=32)
            found = [tuple_of(each) for each in samples() if each.name.startswith(("covey_step", "covey_report"))]
            values = {(name, *labels.values()): value for name, labels, value in found}
            assert values["covey_step",] == 5.0
            assert (values["covey_report", "loss"], values["covey_report", "samples"]) == (0.5, 32.0)
            assert {key[1:] for key in values if key[0] == "covey_step_seconds"} == {("compute",), ("sync",)}
        group.barrier()

    run_threads(1, report)
