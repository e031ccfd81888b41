from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.wire import formation as wire
from covey.wire.decoding import CONTROL_LIMIT
from covey.wire.formation import Answer, FoundingMember, Here, Outcome, Phase, Propose, Row, Standing, Terms

TERMS = Terms("a run", "train.py", None, 2, 8, "1", "auto")
WIDE = "\N{GRINNING FACE}"  # four bytes
LARGEST = FoundingMember(b"i" * 32, b"l" * 16, WIDE * 80, WIDE * 64, b"c" * wire.CONTACT_BYTES)
MESSAGES: list[Any] = [
    Here(TERMS, LARGEST, (b"1" * 16, b"2" * 16), Phase.FORMED, ("north", "south")),
    Propose(b"p" * 16, (LARGEST, LARGEST)),
    Standing(b"p" * 16, (Row(Answer.ACCEPTED, 3, 2, True), Row(Answer.REFUSED, reason="no")), Outcome.ABORT, (1,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: Any) -> None:
    assert wire.decode_formation(wire.encode_formation(message)) == message


def test_every_message_has_a_number_of_its_own_that_never_changes() -> None:
    tags = {type(message).__name__: type(message).__struct_config__.tag for message in MESSAGES}
    assert tags == {"Here": 1, "Propose": 2, "Standing": 3}


def test_the_largest_messages_fit_into_a_frame() -> None:
    most = wire.MAX_MEMBERS
    row = Row(Answer.REFUSED, 1 << 30, 1 << 30, True, WIDE * 256)
    for message in (
        Here(TERMS, LARGEST, (b"l" * 16,) * wire.MAX_LINKS, Phase.FORMED, (WIDE * 80,) * most),
        Propose(b"p" * 16, (LARGEST,) * most),
        Standing(b"p" * 16, (row,) * most, Outcome.OPEN, tuple(range(most))),
    ):
        data = wire.encode_formation(message)
        assert len(data) <= CONTROL_LIMIT
        assert wire.decode_formation(data) == message


@pytest.mark.parametrize(
    "message",
    [
        Propose(b"p" * 15, (LARGEST,)),
        Propose(b"p" * 16, ()),
        Propose(b"p" * 16, (LARGEST,) * (wire.MAX_MEMBERS + 1)),
        Propose(b"p" * 16, (msgspec.structs.replace(LARGEST, id=b"i" * 31),)),
        Propose(b"p" * 16, (msgspec.structs.replace(LARGEST, contact=b"c" * (wire.CONTACT_BYTES + 1)),)),
        Standing(b"p" * 16, (Row(promised=-1),), Outcome.OPEN),
        Here(TERMS, LARGEST, (b"l" * 16,) * (wire.MAX_LINKS + 1), Phase.JOINING),
    ],
)
def test_a_message_out_of_bounds_is_a_protocol_error(message: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="not a message of a formation"):
        wire.decode_formation(wire.encode_formation(message))


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda tail: b"\x95\x03" + tail)))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        wire.decode_formation(data)


def test_deeply_nested_data_and_impossible_terms_are_protocol_errors() -> None:
    good = wire.encode_formation(Here(TERMS, LARGEST, (), Phase.JOINING))
    bad = good.replace(msgspec.msgpack.encode(TERMS), msgspec.msgpack.encode(["a run", "p", None, 9, 8, "1", "auto"]))
    assert bad != good
    for data in (b"\x91" * 100_000, bad):
        with pytest.raises(RemoteProtocolError):
            wire.decode_formation(data)


def test_terms_that_differ_in_a_setting_are_named_with_both_values() -> None:
    other = msgspec.structs.replace(TERMS, settings="segment_bytes=8192")
    assert wire.difference(TERMS, other) == "has segment_bytes 8192, this node 4194304; use the same on both"
    assert wire.difference(other, other) == ""


def test_differences_of_terms_are_said_in_words() -> None:
    other = Terms("a run", "eval.py", 4, 2, None, "1", "auto")
    assert wire.difference(TERMS, TERMS) == ""
    assert wire.difference(TERMS, other) == (
        "runs eval.py, this node train.py; was started with --size 4, this node --min 2 --max 8; use the same on both"
    )


@pytest.mark.parametrize(("size", "low", "high"), [(0, 2, None), (1025, 2, None), (None, 0, None), (None, 3, 2)])
def test_sizes_that_contradict_themselves_are_a_config_error(size: int | None, low: int, high: int | None) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        Terms("a run", "train.py", size, low, high, "1", "auto")


def test_limits_follow_from_the_terms() -> None:
    assert [(terms.smallest, terms.largest) for terms in (TERMS, Terms("r", "p", 5, 2, None, "1", ""))] == [
        (2, 8),
        (5, 5),
    ]
    assert Terms("r", "p", None, 1, None, "1", "").largest == wire.MAX_MEMBERS
