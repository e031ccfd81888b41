"""The answer about progress stays small, whatever a rank has to tell."""

from __future__ import annotations

import math

import msgspec
import pytest

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import REPORT_ROWS
from covey.wire.progress import (
    BYTES_LIMIT,
    NO_EVENTS,
    PROGRESS_EVENTS_LIMIT,
    ROWS_BYTES,
    Doubt,
    GroupProgress,
    PeerProgress,
    RankProgress,
    ReportRow,
    decode_progress,
    decode_reports,
    encode,
    encode_progress,
    encode_reports,
)
from covey.wire.reports import PastEvent

LARGE = (1 << 62) - 1
FULLEST = RankProgress(
    run="r" * 100, run_id=b"x" * 16, rank=255, generation=LARGE, view=LARGE, live=256, size=256, began=1e9,
    taken_ns=LARGE, spent_ns=LARGE, sent=LARGE, received=LARGE, coded=LARGE, plain=LARGE, pid=LARGE, host="h" * 100,
    version="v" * 20,
    groups=tuple(GroupProgress("g" * 100, n, 256, LARGE, 1, True, LARGE, LARGE, "f" * 160) for n in range(4)),
    codec="c" * 100, codec_reason="d" * 160, plan="p" * 160,
    report=ReportRow(1e9, LARGE, {f"{n:040d}": n / 3 for n in range(32)}, 1.0, 2.0), reported=LARGE,
    doubts=tuple(Doubt(n, "suspected", 1.0, "w" * 160) for n in range(8)),
    peers=tuple(PeerProgress(n, LARGE, LARGE, "secure", "wireless", 0.1, 1e9, True, LARGE, LARGE) for n in range(16)),
    program="q" * 160,
)  # fmt: skip


def event(number: int) -> PastEvent:
    return PastEvent("lost", float(number), 0, number, (number,), ("n" * 50,), {"detect": 0.0}, "t" * 300)


def test_the_fullest_answer_has_two_kilobytes() -> None:
    data = encode_progress(FULLEST, [event(n) for n in range(100)], 0)
    told = decode_progress(data)
    assert len(data) <= 2048
    assert (told.rank, told.groups[0].sequence) == (255, LARGE)
    assert told.report is not None
    assert len(told.report.values) >= 16


def test_all_that_a_program_can_report_fits_beside_counters_of_an_ordinary_run() -> None:
    usual = dict.fromkeys(("taken_ns", "spent_ns", "sent", "received", "coded", "plain", "pid", "reported"), 1 << 31)
    group = GroupProgress("train", 255, 256, 1 << 31, 1, True, 1 << 31, 1 << 31)
    told = msgspec.structs.replace(FULLEST, generation=3, view=2, groups=(group,), codec="int8", **usual)
    data = encode_progress(told, [], 0)
    assert len(data) <= 2048
    assert decode_progress(data).report == FULLEST.report


def test_events_are_told_from_a_number_on_as_many_as_fit() -> None:
    small = msgspec.structs.replace(FULLEST, groups=(), report=None, doubts=(), peers=(), plan="", codec_reason="")
    events = [event(n) for n in range(40)]
    told: list[PastEvent] = []
    at = rounds = 0
    while at < 40:
        data = encode_progress(small, events[at:], at)
        assert len(data) <= BYTES_LIMIT + 8
        answer = decode_progress(data)
        assert 0 < len(answer.events) <= PROGRESS_EVENTS_LIMIT
        told += answer.events
        at, rounds = answer.next_event, rounds + 1
    assert [each.view for each in told] == list(range(40))
    assert rounds > 2
    last = decode_progress(encode_progress(small, [event(1)], NO_EVENTS - 1))
    assert last.next_event == 0, "the number begins again, and is never that of no events"


def test_an_event_that_is_too_long_for_an_answer_is_cut_and_does_not_block_the_others() -> None:
    long = PastEvent("lost", 1.0, 0, 1, tuple(range(100)), tuple("n" * 100 for _ in range(100)), {}, "t" * 1000)
    small = msgspec.structs.replace(FULLEST, groups=(), report=None, doubts=(), peers=(), plan="", codec_reason="")
    told = decode_progress(encode_progress(small, [long, event(2)], 0))
    assert told.events[0].text == "t" * 200
    assert told.next_event >= 1


def test_numbers_that_are_not_finite_survive() -> None:
    row = ReportRow(1.0, 3, {"loss": math.nan, "norm": math.inf, "low": -math.inf})
    told = decode_reports(encode_reports([row])).rows[0]
    assert math.isnan(told.values["loss"])
    assert (told.values["norm"], told.values["low"]) == (math.inf, -math.inf)


def test_a_long_series_is_thinned_until_it_fits_and_keeps_both_ends() -> None:
    rows = [ReportRow(float(n), n, {f"name-{k}": n / 7 for k in range(32)}) for n in range(REPORT_ROWS)]
    data = encode_reports(rows)
    told = decode_reports(data).rows
    assert len(data) <= ROWS_BYTES
    assert (told[0].step, told[-1].step) == (0, REPORT_ROWS - 1)
    assert len(told) > 100


@pytest.mark.parametrize("name", ["", "x" * 41, "tab\t", "naïve", "\x1b[2J"])
def test_names_that_no_program_can_have_reported_are_refused(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_reports(encode([[[1.0, 3, {name: 1.0}, -1.0, -1.0]]]))


def test_texts_of_a_hostile_rank_are_printable_and_bounded() -> None:
    plain = msgspec.msgpack.decode(encode(FULLEST))
    plain[0] = "\x1b[31mrun\n" * 10
    told = decode_progress(encode(plain))
    assert told.run.isprintable()
    plain[0] = "x" * 5000
    with pytest.raises(RemoteProtocolError):
        decode_progress(encode(plain))
