"""Events that a process tells another: within limits, whatever the other one sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from covey.base.errors import RemoteProtocolError
from covey.runtime.events import KEPT, Event, Events, decode_last, encode_last
from covey.wire.reports import EVENTS_BYTES_LIMIT, REPORTED_EVENTS_LIMIT, decode_past

LOSS = Event("lost", 12.5, 3, 2, (1, 4), ("rank 1 (otter)", "rank 4 (lynx)"), {"detect": 0.0, "agree": 31.25}, "why")


def known(*events: Event) -> Events:
    log = Events()
    for event in events:
        log.add(event)
    return log


def test_the_last_events_come_back_as_they_were_and_are_marked_as_earlier() -> None:
    log, new = (
        known(*(replace(LOSS, view=view) for view in range(REPORTED_EVENTS_LIMIT + 5))),
        known(Event("generation", 20, 4, 0)),
    )
    told: list[Event] = []
    new.listen(told.append)
    new.put_before(decode_last(encode_last(log)))
    *earlier, own = new.all()
    assert earlier == [replace(event, is_earlier=True) for event in log.all()[-REPORTED_EVENTS_LIMIT:]]
    assert (own.kind, own.is_earlier) == ("generation", False)
    new.close()
    assert told == [], "what happened before is no news"
    assert [event.is_earlier for event in decode_last(encode_last(new))] == [False] * REPORTED_EVENTS_LIMIT


def test_earlier_events_take_no_room_from_those_that_this_process_has_seen() -> None:
    log = known(*(replace(LOSS, view=view, kind="leader") for view in range(KEPT - 2)))
    log.put_before([replace(LOSS, view=10_000 + number) for number in range(5)])
    assert len(log.all()) == KEPT
    assert [event.view for event in log.all()][:3] == [10_003, 10_004, 0]


def test_long_events_are_told_up_to_so_many_bytes_the_latest_of_them() -> None:
    long = replace(LOSS, kind="refused", text="x" * 1000)
    log = known(*(replace(long, view=view) for view in range(REPORTED_EVENTS_LIMIT)))
    body = encode_last(log)
    assert EVENTS_BYTES_LIMIT - 2000 < len(body) < EVENTS_BYTES_LIMIT + 100
    assert decode_last(body)[-1].view == REPORTED_EVENTS_LIMIT - 1
    assert len(decode_last(encode_last(known(replace(LOSS, names=("n" * 9000,) * 128))))) == 0


RAW: list[Any] = ["lost", 1.0, 0, 0, [1], ["rank 1"], {"detect": 0.0}, "text"]


def test_a_peer_that_tells_too_much_or_something_else_is_refused() -> None:
    assert decode_past(msgspec.msgpack.encode([[RAW]])).events[0].ranks == (1,)
    for at, wrong in (
        (0, "x" * 101), (1, float("inf")), (2, -1), (3, 1 << 40), (4, [1 << 20]), (4, [0] * 1025), (5, ["n"] * 1025),
        (5, ["n" * 1001]), (6, {str(number): 0.0 for number in range(17)}), (6, {"detect": "now"}), (7, "x" * 1001),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            decode_past(msgspec.msgpack.encode([[[*RAW[:at], wrong, *RAW[at + 1 :]]]]))
    with pytest.raises(RemoteProtocolError):
        decode_past(msgspec.msgpack.encode([[RAW] * (REPORTED_EVENTS_LIMIT + 1)]))
    with pytest.raises(RemoteProtocolError):
        decode_past(b"\xc1")
