"""Requests to a router are as the RFCs say, and only their answers are read."""

from __future__ import annotations

import struct

import pytest

from covey.base.errors import RemoteProtocolError
from covey.wire.port_mapping import (
    PCP_DATAGRAM_BYTES,
    PcpMapping,
    PmpAddress,
    PmpMapping,
    PmpRefusal,
    ask_pcp,
    ask_pmp,
    ask_pmp_address,
    read_answer,
)

NONCE = bytes(range(12))
FOUR = bytes(10) + b"\xff\xff" + bytes((203, 0, 113, 5))
ANSWER = bytes((2, 0x81, 0, 0)) + struct.pack(">II", 3600, 7) + bytes(12) + NONCE + b"\x06\0\0\0\xb9\xf0\x23\x28" + FOUR


def test_a_request_of_pcp_is_as_in_rfc_6887() -> None:
    data = ask_pcp("192.168.1.7", NONCE, 47600, 47601, 7200)
    assert len(data) == 60
    assert data[:8] == b"\x02\x01\0\0" + (7200).to_bytes(4)
    assert data[8:24] == bytes(10) + b"\xff\xff" + bytes((192, 168, 1, 7))
    assert data[24:36] == NONCE
    assert data[36:44] == b"\x06\0\0\0" + struct.pack(">HH", 47600, 47601)
    assert data[44:] == bytes(10) + b"\xff\xff" + bytes(4)
    assert ask_pcp("fd00::7", NONCE, 1, 1, 0)[8:24] == b"\xfd" + bytes(14) + b"\x07"


def test_requests_of_nat_pmp_are_as_in_rfc_6886() -> None:
    assert ask_pmp_address() == b"\0\0"
    assert ask_pmp(47600, 47601, 7200) == b"\0\x02\0\0" + struct.pack(">HHI", 47600, 47601, 7200)


def test_answers_are_read() -> None:
    assert read_answer(ANSWER) == PcpMapping(0, 3600, NONCE, 47600, 9000, "203.0.113.5")
    six = ANSWER[:44] + b"\xfd" + bytes(14) + b"\x07"
    assert read_answer(six) == PcpMapping(0, 3600, NONCE, 47600, 9000, "fd00::7")
    assert read_answer(b"\0\x80\0\0\0\0\0\x07\xcb\0\x71\x05") == PmpAddress(0, "203.0.113.5")
    assert read_answer(b"\0\x82\0\x02" + struct.pack(">IHHI", 7, 1, 2, 3)) == PmpMapping(2, 1, 2, 3)
    assert read_answer(b"\0\x81\0\x01\0\0\0\x07") == PmpRefusal(1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02",
        b"\x01" + ANSWER[1:],
        ANSWER[:-1],
        ANSWER + bytes(PCP_DATAGRAM_BYTES),
        b"\x02\x01" + ANSWER[2:],
        ANSWER[:36] + b"\x11" + ANSWER[37:],
        b"\0\x80\0\0\0\0\0\x07",
        b"\0\x02\0\x01" + bytes(12),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_answer(data)
