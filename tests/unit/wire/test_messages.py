from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.base.errors import RemoteProtocolError
from covey.wire import messages
from covey.wire.frame import CONTROL_LIMIT, GREETING_LIMIT

HELLO = messages.Hello(
    version=1, nonce=b"n" * 32, run="a run", rank=3, size=4, life=b"l" * 16, purpose="control", host="boot:net:0",
    host_name="north", pid=12, lanes="auto", address=("127.0.0.1", 5), socket="/run/3", group=1 << 63, lane="shm",
    capacity=1 << 21,
)  # fmt: skip
GREETINGS: list[Any] = [
    HELLO,
    messages.Welcome(0, b"l" * 16, "boot:net:0", "north", 1, None, ""),
    messages.Refusal("no", retry=True),
]
CONTROLS: list[Any] = [
    messages.Roster((messages.Contact("h", ("::1", 9), ""), messages.Contact("h", None, "/run/1"))),
    messages.Ready(),
    messages.Goodbye(),
    messages.Dial((1 << 64) - 1, "collectives"),
    messages.Announce(1, 2, (1 << 64) - 1, "barrier()"),
    messages.Position(1, 5, 2, 3, ""),
    messages.Revoke(1, "PeerLostError", "rank 2 is gone", (2,)),
]


@pytest.mark.parametrize("message", GREETINGS, ids=lambda message: type(message).__name__)
def test_greetings_come_back_as_they_were(message: Any) -> None:
    assert messages.decode_greeting(messages.encode(message)) == message


@pytest.mark.parametrize("message", CONTROLS, ids=lambda message: type(message).__name__)
def test_control_messages_come_back_as_they_were(message: Any) -> None:
    assert messages.decode_control(messages.encode(message)) == message


def test_every_message_has_a_number_of_its_own_that_never_changes() -> None:
    names = {type(message).__name__: type(message).__struct_config__.tag for message in GREETINGS + CONTROLS}
    assert names == {"Hello": 1, "Welcome": 2, "Refusal": 3, "Roster": 4, "Ready": 5, "Goodbye": 6, "Dial": 7,
                     "Announce": 8, "Position": 9, "Revoke": 10}  # fmt: skip


def test_a_stranger_cannot_say_what_only_members_may_and_the_other_way_round() -> None:
    for message in CONTROLS:
        with pytest.raises(RemoteProtocolError):
            messages.decode_greeting(messages.encode(message))
    for message in GREETINGS:
        with pytest.raises(RemoteProtocolError):
            messages.decode_control(messages.encode(message))


@given(st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(lambda tail: b"\x95\x01" + tail)))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    for decode in (messages.decode_greeting, messages.decode_control):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.integers(-5, (1 << 64) - 1) | st.binary(max_size=5) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=8,
    )
)
def test_well_formed_data_that_is_no_message_is_a_protocol_error(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    for decode in (messages.decode_greeting, messages.decode_control):
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
    assert len(messages.encode(msgspec.structs.replace(HELLO, socket=path, run="r" * 256))) <= GREETING_LIMIT
    contact = messages.Contact("boot-id:4026531840:1000" * 2, ("127.0.0.1", 65535), path)
    assert len(messages.encode(messages.Roster((contact,) * 1024))) <= CONTROL_LIMIT
    assert len(messages.encode(messages.Revoke(1, "PeerLostError", "é" * 8000, tuple(range(1024))))) <= CONTROL_LIMIT
