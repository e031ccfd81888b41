"""Operations of several ranks on one time line."""

from __future__ import annotations

import json
import os

import msgspec
import pytest

from covey.base.numbers import OPERATIONS
from covey.cli.trace.command import latest_of, read_latest, report
from covey.cli.trace.merge import chrome_trace, clock_offsets, merge
from covey.runtime.keeper.pages import collect
from covey.runtime.metrics import flight as files
from covey.runtime.recorder import FAILED, RETURNED, RUNNING
from covey.wire import messages
from covey.wire.reports import Flight, FlownGroup, FlownOperation, decode_flight, encode

ALL_REDUCE, BARRIER = OPERATIONS.index("all_reduce"), OPERATIONS.index("barrier")
MS = 10**6


def operation(sequence: int, begun: int, ended: int, kind: int = ALL_REDUCE, outcome: int = RETURNED) -> FlownOperation:
    """Return an operation that began and ended so many ms after the start of its host."""
    return FlownOperation(sequence, kind, outcome, begun * MS, ended * MS, 100 + sequence, 200, 0b110, 1, 0)


def flight(
    rank: int,
    *operations: FlownOperation,
    host: str = "a",
    clock: int = 0,
    offsets: tuple[tuple[int, float], ...] = (),
    fault: str = "",
    size: int = 3,
) -> Flight:
    """Return the operations of a rank whose host was started `clock` ms after 1970, by its own clock."""
    group = FlownGroup("train", rank, size, fault, operations)
    return Flight(
        "train", f"node-{rank}", host, f"{host}.example", 100 + rank, rank, clock * MS, 900 * MS, offsets, (group,)
    )


def test_ranks_wait_for_the_one_that_begins_last() -> None:
    timeline = merge(
        [
            flight(0, operation(1, 10, 31), operation(2, 40, 51)),
            flight(1, operation(1, 30, 32), operation(2, 35, 52)),
            flight(2, operation(1, 20, 33), operation(2, 50, 53)),
        ]
    )
    waits = {(wait.sequence, wait.waiting.rank): (wait.late, wait.ns // MS) for wait in timeline.waits()}
    assert waits == {(1, 0): (1, 20), (1, 2): (1, 10), (2, 0): (2, 10), (2, 1): (2, 15)}
    assert timeline.stuck() == []
    lines = report(timeline, None).splitlines()
    assert lines[0] == "6 operations of 3 ranks in 0.043 s"
    assert lines[1].split() == ["RANK", "WAITED", "FOR", "IN", "ALL", "LONGEST", "OPERATIONS"]
    assert lines[2].split() == ["0", "1", "20.000", "ms", "20.000", "ms", "1"]


def test_a_rank_that_has_returned_did_not_wait_for_one_that_began_later() -> None:
    """A root that only sends may return before the others begin."""
    timeline = merge([flight(0, operation(1, 10, 12)), flight(1, operation(1, 30, 40))])
    assert [(wait.waiting.rank, wait.ns // MS) for wait in timeline.waits()] == [(0, 2)]


def test_an_operation_that_not_all_have_begun_is_named() -> None:
    timeline = merge(
        [
            flight(0, operation(7, 100, 0, BARRIER, RUNNING), fault="PeerLostError: rank 1 is lost"),
            flight(2, operation(7, 120, 0, BARRIER, RUNNING)),
        ]
    )
    (stuck,) = timeline.stuck()
    assert (stuck.name, stuck.sequence, stuck.inside, stuck.missing) == ("barrier", 7, (0, 2), (1,))
    text = report(timeline, None)
    assert "operation 7 of group 'train', barrier: ranks 0 and 2 are in it, rank 1 is not" in text
    assert "rank 0: PeerLostError: rank 1 is lost" in text


def test_clocks_of_hosts_are_compared_by_what_any_rank_measured() -> None:
    """Host b is 5 s ahead of a, and c 2 s behind b; no rank of a has measured c."""
    flights = [
        flight(0, operation(1, 10, 20), host="a", offsets=((1, 5.0),)),
        flight(1, operation(1, 10, 20), host="b", clock=5000, offsets=((2, -2.0),)),
        flight(2, operation(1, 15, 20), host="c", clock=3000),
    ]
    assert clock_offsets(flights) == {"a": 0.0, "b": 5.0, "c": 3.0}
    timeline = merge(flights)
    assert {(wait.waiting.rank, wait.late, wait.ns // MS) for wait in timeline.waits()} == {(0, 2, 5), (1, 2, 5)}
    assert timeline.unmeasured == ()


def test_a_host_that_was_not_measured_is_named() -> None:
    timeline = merge([flight(0, host="a"), flight(1, host="b", clock=60_000)])
    assert timeline.unmeasured == ("b.example",)
    assert "no clock was compared with that of b.example" in report(timeline, None)


def test_offsets_that_a_visitor_measured_are_used_instead() -> None:
    flights = [flight(0, operation(1, 10, 20)), flight(1, operation(1, 10, 20), host="b", clock=7000)]
    (wait,) = merge(flights, {"a": 0.0, "b": 6.996}).waits()
    assert (wait.waiting.rank, wait.late) == (0, 1)
    assert wait.ns == pytest.approx(4 * MS, abs=1000)


def test_the_trace_has_a_slice_for_each_operation_and_each_wait() -> None:
    timeline = merge([flight(0, operation(1, 10, 31)), flight(1, operation(1, 30, 32, ALL_REDUCE, FAILED))])
    made = json.loads(json.dumps(chrome_trace(timeline)))
    slices = [event for event in made["traceEvents"] if event["ph"] == "X"]
    assert [(each["pid"], each["name"], each["ts"], each["dur"]) for each in slices] == [
        (0, "all_reduce", 0.0, 21_000.0),
        (1, "all_reduce", 20_000.0, 2_000.0),
        (0, "waits for rank 1", 0.0, 20_000.0),
    ]
    assert slices[1]["args"] == {
        "operation": 1, "outcome": "failed", "sent": 101, "received": 200, "peers": [1, 2], "phases": 1, "view": 0,
    }  # fmt: skip
    names = {event["args"]["name"] for event in made["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0 (a.example, 100)", "rank 1 (a.example, 101)", "train"}


def test_files_come_back_as_they_were_and_the_oldest_are_removed(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_HOME", f"{tmp_path}/home")
    monkeypatch.setattr(files, "FLIGHT_FILES_LIMIT", 4)
    for number in range(6):
        made = flight(number % 3, operation(number, 10, 20))
        path = files.path_for(made)
        files.store(made, path)
        assert decode_flight(path.read_bytes()) == made
        assert path.stat().st_mode & 0o777 == 0o600
    assert len(list(files.folder().iterdir())) == 4
    latest = read_latest(files.folder())
    assert [each.seat for each in latest] == [0, 1, 2, 2]
    assert {call.operation.sequence for calls in merge(latest).calls.values() for call in calls} == {2, 3, 4, 5}


def test_files_of_an_earlier_run_of_the_same_name_are_not_mixed_in(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_HOME", f"{tmp_path}/home")
    runs = (("train", b"one", (0, 1, 2)), ("train", b"two", (0, 1)), ("other", b"three", (0,)))
    for at, (run, run_id, seats) in enumerate(runs, 1_000_000):
        for seat in seats:
            made = msgspec.structs.replace(flight(seat, operation(1, 10, 20)), run=run, run_id=run_id)
            path = files.path_for(made)
            files.store(made, path)
            os.utime(path, (at, at))
    place = files.folder()
    assert [(each.run, each.seat) for each in read_latest(place)] == [("other", 0)]
    assert [(each.run_id, each.seat) for each in latest_of(place, "train")] == [(b"two", 0), (b"two", 1)]
    assert latest_of(place, "absent") == []


def test_a_rank_that_wrote_two_files_counts_once() -> None:
    newer, older = flight(0, operation(1, 10, 20)), flight(0, operation(1, 10, 0, ALL_REDUCE, RUNNING))
    (calls,) = merge([newer, older]).calls.values()
    assert [call.operation.outcome for call in calls] == [RETURNED]


def test_the_largest_flight_fits_into_a_frame() -> None:
    from covey.wire.decoding import CONTROL_LIMIT
    from covey.wire.reports import RECORDS_LIMIT

    most = (1 << 62) - 1
    record = FlownOperation(most, 255, 2, most, most, most, most, (1 << 64) - 1, 65535, (1 << 32) - 1)
    offsets = tuple((seat, -1e11) for seat in range(4096))
    group = FlownGroup("n" * 1000, 127, 128, "x" * 8000, (record,) * RECORDS_LIMIT)
    whole = Flight("r" * 1000, "n" * 100, "h" * 100, "h" * 100, most, most, most, most, offsets, (group,))
    answer = messages.encode(messages.Inspected("operations", 0, 1, encode(whole)))
    assert len(answer) <= CONTROL_LIMIT


def test_a_rank_that_told_its_operations_earlier_is_not_missing() -> None:
    early = Flight("train", "n", "a", "a.example", 101, 1, 0, 80 * MS, (), (FlownGroup("train", 1, 2, "", ()),))
    late = flight(0, operation(7, 100, 0, BARRIER, RUNNING), size=2)
    assert merge([late, early]).stuck() == []


def test_a_rank_that_tells_nonsense_is_left_out() -> None:
    first = flight(0, operation(1, 10, 20))
    answers = {
        0: messages.Inspected("operations", 0, 1, encode(first)),
        1: messages.Inspected("operations", 0, 9, b"nonsense"),
        2: None,
        3: messages.Inspected("operations", 0, 0, b""),
    }
    assert collect(lambda question, _: answers if question.page == 0 else {}) == [first]
