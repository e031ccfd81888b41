from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.errors import RemoteProtocolError
from covey.wire import membership as wire
from covey.wire.decoding import CONTROL_LIMIT
from covey.wire.formation import MAX_MEMBERS
from covey.wire.membership import Bound, Fate, MemberKey, Promise, Record, State, Verdict, View

RUN = b"l" * 16
VIEW = View(RUN, 3, (0, 2, 5), 2, (Verdict(7, 41, Fate.COMMIT, True), Verdict(1 << 63, 1, Fate.REVOKE)))
STATE = State(7, (0, 2, 5), 40, 41, 2, True, 5, False, True)
MESSAGES: list[Any] = [
    wire.Prepare(RUN, 3, 17),
    Promise(RUN, 3, 17, (0, 5), (STATE,), 11, VIEW),
    wire.Accept(17, VIEW),
    wire.Accepted(RUN, 3, 17),
    wire.Refuse(RUN, 3, 19),
    wire.Decided(VIEW),
    wire.Pulse(RUN, 2, 17, True, 12.5),
    wire.Trouble(RUN, 2, True),
    wire.Fork(RUN, 2, VIEW),
    wire.Seated(RUN, wire.Successor(4, RUN, (MemberKey(b"i" * 32, b"l" * 16),), 0)),
]


@in_turn(message=MESSAGES)
def test_messages_come_back_as_they_were(message: Any) -> None:
    assert wire.decode_membership(wire.encode_membership(message)) == message


def test_every_message_has_a_number_of_its_own_that_never_changes() -> None:
    tags = {type(message).__name__: type(message).__struct_config__.tag for message in MESSAGES}
    names = ["Prepare", "Promise", "Accept", "Accepted", "Refuse", "Decided", "Pulse", "Trouble", "Fork", "Seated"]
    assert tags == {name: number for number, name in enumerate(names, 1)}


def test_the_largest_messages_fit_into_a_frame() -> None:
    all_ranks, large = tuple(range(MAX_MEMBERS)), (1 << 62) - 1
    most = MAX_MEMBERS - 1
    few = wire.MAX_STATE_RANKS // MAX_MEMBERS

    def states(groups: int) -> tuple[State, ...]:
        ranks = all_ranks[-(wire.MAX_STATE_RANKS // groups) :]
        return tuple(
            State((1 << 63) + key, ranks, large, large, (1 << 32) - 1, True, most, True, True) for key in range(groups)
        )

    verdicts = tuple(Verdict((1 << 63) + key, large, Fate.REVOKE, True) for key in range(wire.MAX_VERDICTS))
    seats = tuple(MemberKey(bytes([rank % 256]) * 32, bytes([rank % 256]) * 16) for rank in all_ranks)
    view = View(RUN, (1 << 32) - 1, all_ranks, most, verdicts, wire.Successor((1 << 31) - 1, RUN, seats, most))
    promises = [Promise(RUN, 1, large, all_ranks, states(groups), large, view) for groups in (few, wire.MAX_GROUPS)]
    largest: list[wire.Membership] = [*promises, wire.Accept(large, view)]
    for message in largest:
        data = wire.encode_membership(message)
        assert len(data) <= CONTROL_LIMIT
        assert wire.decode_membership(data) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Prepare(RUN[1:], 3, 17),
        wire.Prepare(RUN, -1, 17),
        wire.Prepare(RUN, 1 << 32, 17),
        wire.Accept(17, msgspec.structs.replace(VIEW, ranks=(MAX_MEMBERS,))),
        wire.Accept(17, msgspec.structs.replace(VIEW, tie_breaker=-1)),
        Promise(RUN, 3, 17, (), (msgspec.structs.replace(STATE, root=-2),)),
        Promise(RUN, 3, 17, (), (STATE,) * (wire.MAX_GROUPS + 1)),
        Promise(RUN, 3, 17, (), (msgspec.structs.replace(STATE, group=-1),)),
        wire.Decided(msgspec.structs.replace(VIEW, verdicts=(Verdict(7, 41, 4),))),  # type: ignore[arg-type]
    ],
)
def test_a_message_out_of_bounds_is_a_protocol_error(message: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="not a message between members"):
        wire.decode_membership(wire.encode_membership(message))


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=60).map(lambda tail: b"\x94\x02" + tail)))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        wire.decode_membership(data)


def test_deeply_nested_data_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_membership(b"\x91" * 100_000)


def test_a_record_comes_back_as_it_was_and_a_damaged_one_is_refused() -> None:
    record = Record((MemberKey(b"i" * 32, b"l" * 16), MemberKey(b"j" * 32, b"m" * 16)), VIEW, 17, 11, VIEW)
    data = wire.encode_bound(Bound(3, record, RUN, 1))
    assert wire.decode_bound(data) == Bound(3, record, RUN, 1)
    for damaged in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="not a record of a member"):
            wire.decode_bound(damaged)
