"""Carriers of QUIC on a network in memory: all bytes arrive, in order, once; and what is not read is bounded."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("qh3")

from tests.support.in_turn import in_turn
from tests.unit.net.quic.lossy import HORIZON, KEY, Faults, Pair

from covey.net.quic.carrier import (
    CONNECTION_IDLE_SECONDS,
    CORE_UNSENT_BYTES,
    QUIC_WINDOW_BYTES,
    STRANGER_BYTES,
    Carrier,
)
from covey.net.quic.pump import PROVE_SECONDS, UNPROVED_AT_ONCE
from covey.wire import quic

FAULTS = {
    "none": Faults(),
    "loss": Faults(loss=0.05),
    "order": Faults(jitter=0.03),
    "twice": Faults(repeats=0.3),
    "altered": Faults(alters=0.05),
    "all": Faults(loss=0.03, repeats=0.1, alters=0.03, jitter=0.02),
}


def opened(pair: Pair, *, is_proved: bool = True) -> tuple[Carrier, Carrier]:
    """Return both ends, once both have shaken hands."""
    until = pair.now + HORIZON
    while pair.acceptor is None or not (pair.acceptor.is_open and pair.dialler.is_open):
        pair.turn()
        assert pair.now < until
        assert not pair.dialler.is_over, pair.dialler.error
    if is_proved:
        pair.acceptor.proved()
    return pair.dialler, pair.acceptor


class Story:
    """Sends bytes both ways, reads at random moments, and ends both directions."""

    def __init__(self, pair: Pair, sizes: tuple[int, int]) -> None:
        self.pair, chance = pair, pair.random
        ends = opened(pair)
        self.sources = [chance.randbytes(size) for size in sizes]
        self.got = [bytearray(), bytearray()]
        at = [0, 0]
        until = pair.now + HORIZON
        while not all(end.is_delivered and end.has_heard_end for end in ends):
            assert pair.now < until, (self.got[0][:9], [end.error for end in ends])
            for index, end in enumerate(ends):
                self._write(end, index, at)
                self._read(end, index)
            pair.turn()
            assert not any(end.is_over for end in ends), [end.error for end in ends]
        for index, end in enumerate(ends):
            self._read(end, index, always=True)

    def _write(self, end: Carrier, index: int, at: list[int]) -> None:
        source = self.sources[index]
        while at[index] < len(source) and (room := end.room()):
            size = min(room, self.pair.random.choice((1, 100, 5000, CORE_UNSENT_BYTES)))
            end.write(source[at[index] : at[index] + size])
            at[index] += min(size, len(source) - at[index])
        if at[index] == len(source):
            end.end()

    def _read(self, end: Carrier, index: int, *, always: bool = False) -> None:
        while (always or self.pair.random.random() < 0.7) and (data := end.read()) is not None:
            self.got[1 - index] += data
            end.consumed(len(data))


@in_turn(seed=range(2))
@in_turn(faults=FAULTS)
def test_all_bytes_arrive_once_and_in_order(faults: str, seed: int) -> None:
    story = Story(Pair(seed, FAULTS[faults]), (150_000 + seed, 70_001))
    assert [bytes(each) for each in story.got] == story.sources


def test_what_is_not_read_is_bounded_and_arrives_when_it_is() -> None:
    pair = Pair(7, Faults())
    dialler, acceptor = opened(pair)
    written = 0
    until = pair.now + 30
    while pair.now < until:
        if room := dialler.room():
            dialler.write(bytes(room))
            written += room
        pair.turn()
    assert written == QUIC_WINDOW_BYTES
    read = 0
    while (data := acceptor.read()) is not None:
        read += len(data)
        acceptor.consumed(len(data))
    assert read == QUIC_WINDOW_BYTES
    for _ in range(20):
        pair.turn()
    assert dialler.room() > 0


def test_an_end_without_proof_may_send_little() -> None:
    pair = Pair(8, Faults())
    dialler, acceptor = opened(pair, is_proved=False)
    for _ in range(20):
        pair.turn()
    assert dialler.room() == STRANGER_BYTES
    acceptor.proved()
    for _ in range(20):
        pair.turn()
    assert dialler.room() == CORE_UNSENT_BYTES


def test_the_limits_for_strangers_are_as_documented() -> None:
    assert (UNPROVED_AT_ONCE, PROVE_SECONDS, STRANGER_BYTES) == (32, 6.0, 4096)


def test_an_end_that_sends_more_than_it_may_is_cut_off() -> None:
    pair = Pair(9, Faults())
    dialler, acceptor = opened(pair, is_proved=False)
    dialler.write(bytes(STRANGER_BYTES + 1))
    for _ in range(40):
        pair.turn()
    assert (acceptor.is_over, acceptor.error) == (True, "the other end sent more than it may")
    assert dialler.is_over


@pytest.mark.parametrize("stream", [0, 10, quic.DIALLER_LIMITS])
def test_an_end_that_opens_other_streams_or_takes_limits_back_is_cut_off(stream: int) -> None:
    pair = Pair(10, Faults())
    dialler, acceptor = opened(pair)
    dialler._connection.send_stream_data(stream, quic.limit_bytes(0))  # as no covey would
    for _ in range(40):
        pair.turn()
    assert acceptor.is_over
    assert "no covey opens" in acceptor.error or "taken back" in acceptor.error


def test_a_dialler_without_the_key_gets_no_answer() -> None:
    pair = Pair(11, Faults(), keys=(random.Random(1).randbytes(32),))
    until = pair.now + 2 * CONNECTION_IDLE_SECONDS
    while pair.now < until and not pair.dialler.is_over:
        pair.turn()
    assert pair.acceptor is None
    assert pair.sent[False] == 0


def test_an_acceptor_with_another_certificate_is_refused() -> None:
    from tests.unit.net.quic import lossy

    from covey.net.quic.carrier import QuicCredentials

    other = QuicCredentials(bytes(32))
    before, lossy.CREDENTIALS = lossy.CREDENTIALS, QuicCredentials(KEY)
    try:
        lossy.CREDENTIALS.accepting = other.accepting
        pair = Pair(12, Faults())
        while not pair.dialler.is_over:
            pair.turn()
            assert pair.now < 100 + HORIZON
    finally:
        lossy.CREDENTIALS = before
    assert not pair.dialler.is_open
    assert pair.dialler.error


def test_an_end_that_is_never_heard_again_is_given_up() -> None:
    pair = Pair(13, Faults())
    dialler, _ = opened(pair)
    pair.faults = Faults(loss=1.0)
    began = pair.now
    while not dialler.is_over:
        pair.turn()
        assert pair.now < began + 4 * CONNECTION_IDLE_SECONDS
    assert dialler.error


def test_a_dialler_that_gets_another_address_goes_on() -> None:
    pair = Pair(14, Faults())
    dialler, acceptor = opened(pair)
    source = pair.random.randbytes(400_000)
    at, got = 0, b""
    while len(got) < len(source):
        if len(got) > 100_000:
            pair.dialler_address = ("10.0.9.9", 777)
        if room := dialler.room():
            piece = source[at : at + min(room, 50_000)]
            dialler.write(piece)
            at += len(piece)
        pair.turn()
        assert pair.now < 100 + HORIZON
        while (data := acceptor.read()) is not None:
            got += data
            acceptor.consumed(len(data))
    assert got == source


def test_silent_connections_stay_open() -> None:
    pair = Pair(15, Faults())
    ends = opened(pair)
    until = pair.now + 3 * CONNECTION_IDLE_SECONDS
    while pair.now < until:
        pair.turn()
    assert not any(end.is_over for end in ends)
