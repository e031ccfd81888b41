"""What of the packets on a network is looked at at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.net.discovery.sieve import (
    ALL_PACKETS_BURST,
    ALL_PACKETS_RATE,
    MOST_BYTES,
    MOST_RECORDS,
    PACKET_BURST,
    Sieve,
    is_response,
)

NAME = b"\x06_covey\x04_tcp\x05local\0"


def packet(*, flags: int = 0x84, records: tuple[int, int, int, int] = (0, 1, 0, 0), padding: int = 0) -> bytes:
    counts = b"".join(count.to_bytes(2, "big") for count in records)
    return b"\0\0" + bytes((flags, 0)) + counts + NAME + bytes(padding)


def test_what_is_about_covey_and_of_usual_size_passes() -> None:
    sieve = Sieve()
    assert sieve.passes(packet(), "10.0.0.1", 0.0)
    assert sieve.passes(packet(flags=0, records=(1, 1, 0, 0)), "10.0.0.1", 0.0)
    assert sieve.dropped == 0


def test_what_is_about_other_things_is_neither_looked_at_nor_counted() -> None:
    sieve = Sieve()
    for _ in range(10_000):
        assert not sieve.passes(packet().replace(b"_covey", b"_other"), "10.0.0.1", 0.0)
    assert sieve.dropped == 0
    assert sieve.passes(packet(), "10.0.0.1", 0.0)


@pytest.mark.parametrize(
    "odd",
    [
        packet(padding=MOST_BYTES),
        packet(records=(0, MOST_RECORDS + 1, 0, 0)),
        packet(records=(MOST_RECORDS, 0, 1, 0)),
        packet(records=(0, 0, 0, 65535)),
        packet(flags=0x02),
        NAME,
    ],
    ids=["long", "answers", "questions", "additional", "truncated", "headless"],
)
def test_what_no_node_sends_is_counted_and_dropped(odd: bytes) -> None:
    sieve = Sieve()
    assert not sieve.passes(odd, "10.0.0.1", 0.0)
    assert sieve.dropped == 1


def test_one_source_may_say_so_much_and_all_together_so_much() -> None:
    sieve = Sieve()
    loud = sum(sieve.passes(packet(), "10.0.0.1", 0.0) for _ in range(1000))
    assert loud == PACKET_BURST
    assert sieve.passes(packet(), "10.0.0.2", 0.0)
    rest = sum(sieve.passes(packet(), f"10.1.{n >> 8}.{n & 255}", 0.0) for n in range(5000))
    assert loud + 1 + rest == ALL_PACKETS_BURST
    later = sum(sieve.passes(packet(), f"10.2.{n >> 8}.{n & 255}", 1.0) for n in range(5000))
    assert later == ALL_PACKETS_RATE
    assert sieve.dropped == 11_001 - ALL_PACKETS_BURST - ALL_PACKETS_RATE


@given(st.binary(max_size=60))
def test_any_bytes_are_decided_on(data: bytes) -> None:
    assert Sieve().passes(data + NAME, "10.0.0.1", 0.0) in (True, False)
    assert is_response(data) in (True, False)
