from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.seeds import examples

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import Seat
from covey.wire import messages, reports
from covey.wire.decoding import CONTROL_LIMIT, HANDSHAKE_LIMIT

ADDRESSES = (messages.Address("10.0.0.7", 47700, "eth0"), messages.Address("fe80::7", 47700, "eth0"))
CONTACT = messages.Contact("boot:net:0", ADDRESSES, "/run/3")
CARD = messages.Card(b"i" * 32, b"l" * 16, "north-abcd", "north.local", 12, CONTACT, "0.1")
HELLO = messages.Hello(
    version=1, nonce=b"n" * 32, purpose="candidate", run="a run", rank=-1, size=4, lanes="auto", card=CARD
)
STATE = messages.PeerReport(CARD, 3, "secure", "10.0.0.1", "10.0.0.7:47700", "eth0", 0.0002, -1.5)
CHARTER = messages.Charter(3, "otter-aaaa", (b"d" * 32,), (b"a" * 32, b"b" * 32), b"s" * 64)
GREETINGS: list[Any] = [
    HELLO,
    msgspec.structs.replace(HELLO, charter=CHARTER),
    messages.Welcome(0, CARD, "visitor"),
    messages.Welcome(0, CARD, "visitor", CHARTER),
    messages.Refusal("no", retry=True),
]
CONTROLS: list[Any] = [
    messages.Roster((CONTACT, messages.Contact("h", (), "/run/1"))),
    messages.Ready(),
    messages.Goodbye(),
    messages.Dial((1 << 64) - 1, "collectives"),
    messages.Announce(1, 2, (1 << 64) - 1, "barrier()"),
    messages.Position(1, 5, 2, 3, ""),
    messages.Revoke(1, "PeerLostError", "rank 2 is gone", (2,)),
    messages.NoLane(1, "messages", "the group is closed"),
    messages.Offer(b"a" * 16, b"s" * 32, 1, "collectives", "secure", 0, 4),
    messages.Expect(b"a" * 16),
    messages.Known((CARD,)),
    messages.Ping(7),
    messages.Pong(7, 1.8e9),
    messages.Forming(b"anything"),
    messages.Ask(),
    messages.Tell("a run", "running", b"i" * 32, b"i" * 32, 12.5, (STATE,)),
    messages.Reach(ADDRESSES),
    messages.Reached((0.001, -1.0), ("", "no answer in time")),
    messages.NewSecret(b"k" * 32, 1, 600, b"s" * 64),
    messages.SecretKept("the disk is full"),
    messages.Agreeing(3, b"anything"),
    messages.Vouch(((b"l" * 16, 2), (b"m" * 16, 3))),
    messages.Founded(3, b"n" * 16, True, (messages.SeatedMember(Seat(7), CARD),), "continue", 12.5, b"o" * 16, 5),
    messages.Ended("train", b"o" * 16, True),
    CHARTER,
    messages.Charter(4, "otter-aaaa", (), None, b"s" * 64),
    messages.Posting(1, 2, b"body"),
    messages.Calls(5, (messages.CallRun(1, 3, 99, "barrier()"),)),
    messages.Failing("ValueError: cannot divide the cake"),
    messages.Inspect("operations", 2),
    messages.Inspected("operations", 2, 3, b"what was asked for"),
    messages.Past(b"events"),
    messages.CheckpointNews((3 << 32) + 1, b"body"),
    messages.AgentCall(7, 1, b"a message about a call"),
    messages.AgentRefusal(7, "south may not use north"),
    messages.RequestCheckpoint("monday", "/backup", True),
    messages.CheckpointProgress("monday", "over", "rank 1: disk full"),
    messages.MoveLane(7, 2, "refuse", 41, 44),
    messages.RelayTrips((messages.RelayTrip(b"R" * 16, 0.025),)),
    messages.Rest(is_agreed=True),
    messages.Departures((messages.Departure(Seat(3), True, "ValueError: no"),)),
    messages.Allowance(2_375_000),
    messages.StreamNews(b"L" * 16, 3, "received", 1 << 40),
]


@pytest.mark.parametrize("message", GREETINGS, ids=lambda message: type(message).__name__)
def test_greetings_come_back_as_they_were(message: Any) -> None:
    assert messages.decode_handshake(messages.encode(message)) == message


@in_turn(message=CONTROLS)
def test_control_messages_come_back_as_they_were(message: Any) -> None:
    assert messages.decode_control(messages.encode(message)) == message


def test_every_message_has_a_number_of_its_own_that_never_changes() -> None:
    names = {type(message).__name__: type(message).__struct_config__.tag for message in GREETINGS + CONTROLS}
    assert names == {"Hello": 1, "Welcome": 2, "Refusal": 3, "Roster": 4, "Ready": 5, "Goodbye": 6, "Dial": 7,
                     "Announce": 8, "Position": 9, "Revoke": 10, "NoLane": 11, "Offer": 12, "Expect": 13, "Known": 14,
                     "Ping": 15, "Pong": 16, "Forming": 17, "Ask": 18, "Tell": 19, "Reach": 20, "Reached": 21,
                     "NewSecret": 22, "SecretKept": 23, "Agreeing": 24, "Vouch": 25, "Founded": 26,
                     "Posting": 27, "Ended": 28, "Calls": 29, "Charter": 30, "Failing": 31,
                     "Inspect": 32, "Inspected": 33, "CheckpointNews": 34, "Past": 35, "AgentCall": 36,
                     "AgentRefusal": 37, "RequestCheckpoint": 38, "CheckpointProgress": 39,
                     "MoveLane": 40, "RelayTrips": 41, "Rest": 42, "Departures": 43, "Allowance": 44,
                     "StreamNews": 45}  # fmt: skip
    assert set(names) == {
        kind.__name__ for union in (messages.HandshakeMessage, messages.Control) for kind in get_args(union)
    }


def test_a_node_that_moved_is_the_same_at_other_addresses() -> None:
    there = (messages.Address("192.168.1.5", 47701, "wlan0"),)
    card = messages.moved(CARD, there)
    assert card.contact == messages.Contact("boot:net:0", there, "/run/3")
    assert messages.moved(card, ADDRESSES) == CARD


def test_a_message_of_a_later_version_with_more_fields_is_still_understood() -> None:
    raw = msgspec.msgpack.decode(messages.encode(HELLO))
    assert messages.decode_handshake(msgspec.msgpack.encode([*raw, "new"])) == HELLO
    *start, card, on_loss, charter, settings, papers, versions = raw
    longer = [*start, [*card, "new"], on_loss, charter, settings, papers, versions]
    assert messages.decode_handshake(msgspec.msgpack.encode(longer)) == HELLO
    older = msgspec.structs.replace(HELLO, card=msgspec.structs.replace(HELLO.card, version=""))
    assert messages.decode_handshake(msgspec.msgpack.encode([*start, card[:6]])) == older


def test_a_stranger_cannot_say_what_only_members_may_and_the_other_way_round() -> None:
    for message in CONTROLS:
        with pytest.raises(RemoteProtocolError):
            messages.decode_handshake(messages.encode(message))
    for message in GREETINGS:
        with pytest.raises(RemoteProtocolError):
            messages.decode_control(messages.encode(message))


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(lambda tail: b"\x95\x01" + tail)))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (messages.decode_handshake, messages.decode_control):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@settings(max_examples=examples(60))
@given(
    st.recursive(
        st.none() | st.integers(-5, (1 << 64) - 1) | st.binary(max_size=5) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=8,
    )
)
def test_well_formed_data_that_is_no_message_is_a_protocol_error(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    for decode in (messages.decode_handshake, messages.decode_control):
        try:
            message = decode(data)
        except RemoteProtocolError:
            continue
        assert value[0] == type(message).__struct_config__.tag


def test_deeply_nested_data_is_a_protocol_error_and_no_crash() -> None:
    with pytest.raises(RemoteProtocolError):
        messages.decode_control(b"\x91" * 100_000)


def test_messages_fit_into_their_frames() -> None:
    path = "/tmp/" + "x" * 103
    addresses = tuple(messages.Address(f"2001:db8:85a3:8d3:1319:8a2e:370:{i:04x}", 65535, "e" * 15) for i in range(20))
    contact = messages.Contact("boot-id:4026531840:1000" * 2, addresses, path)
    card = msgspec.structs.replace(CARD, contact=contact, name="n" * 45, host_name="h" * 64, version="1.2.3.dev4")
    assert len(messages.encode(msgspec.structs.replace(HELLO, card=card, run="r" * 256))) <= HANDSHAKE_LIMIT
    one, two = (messages.Contact(contact.host, addresses[:count], path) for count in (1, 2))
    assert len(messages.encode(messages.Roster((one,) * 1024))) <= CONTROL_LIMIT
    assert len(messages.encode(messages.Known((msgspec.structs.replace(card, contact=two),) * 400))) <= CONTROL_LIMIT
    seated = messages.SeatedMember(Seat((1 << 31) - 1), msgspec.structs.replace(card, contact=contact))
    founded = messages.Founded((1 << 31) - 1, b"l" * 16, True, (seated,) * messages.MAX_MEMBERS)
    assert len(messages.encode(founded)) <= CONTROL_LIMIT
    measured = reports.NetworkMember(b"i" * 32, "n" * 45, "h" * 64, 255, 255, 1e9, 1e9, (1e9,) * 256, (1e-3,) * 256)
    told = reports.MeasuredNetwork((measured,) * 256, ((1e9,) * 256,) * 256, 1.0, "n" * 45, "wired", "p" * 1000)
    assert len(data := reports.encode_network(told, 1.0, "wired")) <= CONTROL_LIMIT
    assert reports.decode_network(data) == told
    assert len(messages.encode(messages.Revoke(1, "PeerLostError", "é" * 8000, tuple(range(1024))))) <= CONTROL_LIMIT
