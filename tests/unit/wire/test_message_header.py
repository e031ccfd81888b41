from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn

from covey.base.arithmetic import DTYPES
from covey.base.errors import RemoteProtocolError
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""


@st.composite
def headers(draw: st.DrawFn) -> MessageHeader:
    kind = draw(st.integers(wire.EAGER, wire.END))
    message_id, length = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**63 - 1))
    if kind > wire.RTS:
        return MessageHeader(kind, message_id, length)
    tag = draw(st.integers(0, 2**63 - 1))
    if draw(st.booleans()):
        return MessageHeader(kind, message_id, length, tag, is_object=True)
    code = draw(st.integers(0, len(DTYPES) - 1))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=wire.MAX_MESSAGE_NDIM)))
    return MessageHeader(kind, message_id, math.prod(shape) * DTYPES[code].itemsize, tag, False, code, shape)


@unhurried
@given(headers(), st.binary(max_size=40), st.binary(max_size=40))
def test_a_header_comes_back_from_anywhere_in_a_buffer(header: MessageHeader, before: bytes, after: bytes) -> None:
    encoded = wire.encode(header)
    data = before + encoded + after
    assert wire.decode(data, len(before), len(data)) == (header, len(before) + len(encoded))
    assert wire.decode(data, len(before), len(before) + len(encoded) - 1) is None


@unhurried
@given(headers(), st.data())
def test_a_damaged_header_is_a_header_or_a_protocol_error(header: MessageHeader, data: st.DataObject) -> None:
    encoded = bytearray(wire.encode(header))
    for at in data.draw(st.lists(st.integers(0, len(encoded) - 1), min_size=1, max_size=4)):
        encoded[at] = data.draw(st.integers(0, 255))
    try:
        parsed = wire.decode(encoded, 0, len(encoded))
    except RemoteProtocolError:
        return
    if parsed is not None:  # the byte after ndim is padding, so it may differ
        assert wire.encode(parsed[0])[8:] == bytes(encoded[8 : parsed[1]])


@in_turn(
    header=[
        MessageHeader(wire.EAGER, payload_bytes=9, dtype_code=4, shape=(1,)),
        MessageHeader(wire.RTS, payload_bytes=0, dtype_code=4, shape=(2**62, 0)),
        MessageHeader(wire.RTS, payload_bytes=2**64 - 8, dtype_code=4, shape=(2**61 - 1, 1)),
        MessageHeader(wire.RTS, payload_bytes=0, dtype_code=0, shape=(2**32, 2**32)),
        MessageHeader(wire.EAGER, payload_bytes=8, is_object=True, shape=(8,)),
        MessageHeader(wire.EAGER, payload_bytes=8, is_object=True, tag=-1),
        MessageHeader(wire.CTS, payload_bytes=8, tag=3),
        MessageHeader(0),
        MessageHeader(9),
        MessageHeader(wire.EAGER, dtype_code=len(DTYPES), shape=(0,)),
    ]
)
def test_headers_that_contradict_themselves_are_refused(header: MessageHeader) -> None:
    encoded = wire.encode(header)
    with pytest.raises(RemoteProtocolError):
        wire.decode(encoded, 0, len(encoded))
