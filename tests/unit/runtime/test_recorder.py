"""The two recorders do the same: the compiled one and the one in Python."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.base.native import native
from covey.lab.bench.metrics import recording_seconds
from covey.runtime.counters import GroupCounters, ProcessCounters
from covey.runtime.recorder import (
    BUCKETS,
    FAILED,
    FIRST_BITS,
    RECORDS,
    RETURNED,
    RUNNING,
    PythonRecorder,
    bucket_begin_ns,
    bucket_of,
    clock_ns,
    make_recorder,
    quantile,
)
from covey.wire.reports import RECORDS_LIMIT

if TYPE_CHECKING:
    from covey.base.numbers import Seat

ALL_REDUCE, BARRIER = 0, 10


@pytest.fixture(params=[True, False], ids=["native", "python"])
def recorder(request: pytest.FixtureRequest) -> Any:
    if request.param and native().module is None:
        pytest.skip("the extension is not built")
    return make_recorder(3, is_native=request.param)


def test_an_operation_has_a_record_while_it_runs_and_after(recorder: Any) -> None:
    before = clock_ns()
    assert recorder.running() == 0
    recorder.begin(1, BARRIER)
    ((sequence, operation, outcome, begun, ended, *_),) = recorder.records(0)
    assert (sequence, operation, outcome, ended) == (1, BARRIER, RUNNING, 0)
    assert recorder.running() == begun
    assert before <= begun <= clock_ns()
    recorder.end(7, False)
    ((_, _, outcome, again, ended, _, _, _, _, view),) = recorder.records(0)
    assert (outcome, again, view) == (RETURNED, begun, 7)
    assert begun <= ended <= clock_ns()
    assert recorder.running() == 0
    recorder.begin(2, ALL_REDUCE)
    recorder.end(7, True)
    assert [record[2] for record in recorder.records(0)] == [RETURNED, FAILED]
    assert [record[0] for record in recorder.records(1)] == [2]
    assert recorder.records(2) == []


def test_totals_count_calls_failures_and_time_by_operation(recorder: Any) -> None:
    for sequence in range(1, 11):
        recorder.begin(sequence, ALL_REDUCE if sequence % 3 else BARRIER)
        recorder.end(0, sequence == 5)
    lasted = {operation: 0 for operation in (ALL_REDUCE, BARRIER)}
    for record in recorder.records(0):
        lasted[record[1]] += record[4] - record[3]
    totals = {each.operation: each for each in recorder.totals()}
    assert {operation: (each.calls, each.failures) for operation, each in totals.items()} == {
        ALL_REDUCE: (7, 1),
        BARRIER: (3, 0),
    }
    assert {operation: each.ns for operation, each in totals.items()} == lasted
    assert all(sum(each.buckets) == each.calls and len(each.buckets) == BUCKETS for each in totals.values())


def test_the_ring_keeps_the_last_operations(recorder: Any) -> None:
    assert RECORDS == RECORDS_LIMIT  # what another process accepts
    for sequence in range(1, RECORDS + 11):
        recorder.begin(sequence, ALL_REDUCE)
        recorder.end(0, False)
    assert [record[0] for record in recorder.records(0)] == list(range(11, RECORDS + 11))
    (totals,) = recorder.totals()
    assert totals.calls == RECORDS + 10


def test_an_end_without_a_begin_counts_nothing(recorder: Any) -> None:
    recorder.end(0, True)
    recorder.begin(1, BARRIER)
    recorder.end(0, False)
    recorder.end(0, True)
    assert [(each.operation, each.calls, each.failures) for each in recorder.totals()] == [(BARRIER, 1, 0)]


def test_busy_time_is_that_of_operations_after_a_moment(recorder: Any) -> None:
    assert recorder.busy(0) == (0, 0)
    for sequence in (1, 2, 3):
        recorder.begin(sequence, BARRIER)
        recorder.end(0, False)
    records = recorder.records(0)
    busy, first = recorder.busy(0)
    assert (busy, first) == (sum(record[4] - record[3] for record in records), records[0][3])
    middle = records[1][3]  # the second began then
    assert recorder.busy(middle) == (sum(record[4] - record[3] for record in records[1:]), middle)
    recorder.begin(4, BARRIER)
    assert recorder.busy(records[-1][4])[0] > 0, "an operation in progress counts"


def test_a_lane_of_another_kind_gets_only_what_moves_over_it() -> None:
    group = GroupCounters("g", 0, seats(5, 6, 7), is_native=False)
    recorder: PythonRecorder = group.recorder
    group.lane_opened(1, "shm")
    recorder.sent(1, 100)
    recorder.received(1, 30)
    group.lane_opened(1, "tcp")
    recorder.sent(1, 7)
    assert {key: tuple(each) for key, each in group.traffic().items()} == {
        (6, "shm"): (100, 1, 30, 1),
        (6, "tcp"): (7, 1, 0, 0),
    }


def test_the_numbers_of_a_closed_group_stay_in_those_of_the_process() -> None:
    process = ProcessCounters()
    first, second = (GroupCounters(name, 0, seats(0, 1), is_native=False) for name in ("a", "b"))
    process.register(first)
    for sequence in (1, 2, 3):
        first.recorder.begin(sequence, ALL_REDUCE)
        first.recorder.sent(1, 10 * sequence)
        first.recorder.end(0, False)
    first.compressed("int8", 10, 40)
    first.is_over = True
    process.register(second)
    second.compressed("int8", 1, 4)
    second.recorder.begin(1, ALL_REDUCE)
    second.recorder.end(0, False)
    assert process.groups() == [second]
    totals = process.totals()
    assert (totals.operations[ALL_REDUCE].calls, totals.operations[ALL_REDUCE].sent) == (4, 60)
    assert totals.codecs["int8"] == (2, 11, 44)
    assert process.totals().operations == totals.operations, "reading adds nothing"


def test_the_number_of_codecs_is_bounded() -> None:
    group = GroupCounters("g", 0, seats(0), is_native=False)
    for number in range(100):
        group.compressed(f"topk(0.{number})", 1, 2)
    assert len(group.codecs) == 33
    assert group.codecs["other"] == (68, 68, 136)


@pytest.mark.alone
def test_an_operation_is_counted_and_recorded_in_less_than_a_microsecond(recorder: Any) -> None:
    taken = recording_seconds(recorder)
    assert taken < (1e-6 if isinstance(recorder, PythonRecorder) else 200e-9), f"{1e9 * taken:.0f} ns"


def seats(*numbers: int) -> tuple[Seat, ...]:
    return numbers  # type: ignore[return-value]


def test_a_bucket_ends_at_most_half_a_begin_after_it_begins_and_holds_what_is_between() -> None:
    assert bucket_of(0) == bucket_of((1 << FIRST_BITS) - 1) == 0
    for bucket in range(1, BUCKETS - 1):
        begin, end = bucket_begin_ns(bucket), bucket_begin_ns(bucket + 1)
        assert begin < end <= 1.5 * begin
        assert [bucket_of(ns) for ns in (begin - 1, begin, end - 1, end)] == [bucket - 1, bucket, bucket, bucket + 1]
    assert bucket_of(1 << 62) == BUCKETS - 1


def test_both_recorders_count_durations_alike(recorder: Any) -> None:
    """The clock of the compiled one cannot be set, so what it measured decides what is right."""
    for sequence in range(1, 50):
        recorder.begin(sequence, ALL_REDUCE)
        if sequence % 5 == 0:
            sum(range(sequence * 200))
        recorder.end(0, False)
    wanted = [0] * BUCKETS
    for _, _, _, begun, ended, *_ in recorder.records(0):
        wanted[bucket_of(ended - begun)] += 1
    assert list(recorder.totals()[0].buckets) == wanted


@in_turn(seed=seeds(20))
def test_quantiles_are_in_the_bucket_of_the_operation_that_they_are_about(seed: int) -> None:
    chance = random.Random(seed)
    durations = sorted(int(2 ** chance.uniform(5, 36)) for _ in range(chance.randrange(1, 300)))
    buckets = [0] * BUCKETS
    for each in durations:
        buckets[bucket_of(each)] += 1
    for share in (0.5, 0.9, 0.99, 1.0):
        exact = durations[max(0, math.ceil(share * len(durations)) - 1)]
        bucket = bucket_of(exact)
        assert bucket_begin_ns(bucket) / 1e9 <= quantile(buckets, share) <= bucket_begin_ns(bucket + 1) / 1e9
    assert quantile([0] * BUCKETS, 0.5) == 0.0
