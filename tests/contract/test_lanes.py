"""What every lane promises, held by every kind of lane."""

from __future__ import annotations

import random
import select
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.lane_pairs import open_pair, usable_kinds
from tests.support.seeds import examples
from tests.support.waiting import DEADLINE

from covey.net.lanes.lane import PIECE_BYTES, Incoming, Lane, LaneClosedError, Outgoing
from covey.net.lanes.ring import RingLane, memory_bytes
from covey.net.lanes.stream import SEND_BYTES, StreamLane
from covey.wire.header import TRANSFER_HEADER_BYTES, TransferHeader
from covey.wire.seal import SEALED_RECORD_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Array = np.ndarray[Any, np.dtype[Any]]

KIB, MIB = 1 << 10, 1 << 20
EDGES = [0, 1, 63, 64, 65, 2047, 2048, 2049, 4096, 4097, 64 * KIB, 64 * KIB + 1,
         SEALED_RECORD_LIMIT - 1, SEALED_RECORD_LIMIT, SEALED_RECORD_LIMIT + 1,
         PIECE_BYTES - 64, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, SEND_BYTES,
         3 * MIB + 5]  # fmt: skip

Pair = tuple[Lane, Lane]


def _rings(capacity: int) -> Pair:
    memory = bytearray(memory_bytes(capacity))
    one, other = socket.socketpair()
    return (
        RingLane(memory, capacity, one, first=True, kind="memory"),
        RingLane(memory, capacity, other, first=False, kind="memory"),
    )


def large_memory() -> Pair:
    return _rings(2 * MIB)


def opened(name: str) -> Callable[[], Pair]:
    """Return what makes a lane of a kind as a run does."""

    def make() -> Pair:
        return open_pair(name)

    make.__name__ = name
    return make


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


MAKERS: list[Callable[[], Pair]] = [*(opened(kind.name) for kind in usable_kinds(is_native=False)), large_memory]
every_lane = pytest.mark.parametrize("pair", MAKERS, ids=lambda make: make.__name__, indirect=True)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    lanes = request.param()
    try:
        yield lanes
    finally:
        for lane in lanes:
            lane.close()


class Transfer(NamedTuple):
    """One transfer."""

    header: bytes
    payload: Array
    dtype: np.dtype[Any] | None = None
    """As what the compiled executor combines it with zeros; None if it stores it, as the one in Python always does."""


def transfer(number: int, nbytes: int) -> Transfer:
    return Transfer(TransferHeader(0, 0, 0, 0, 0, 7, number, 0xFEED, number, nbytes).pack(), noise(nbytes, number))


def outgoing(each: Transfer) -> Outgoing:
    return Outgoing(each.header, memoryview(each.payload))


def noise(nbytes: int, *seed: int) -> Array:
    """Return random bytes; many repeat after a prime number of them, which no piece or record has."""
    return np.resize(np.random.default_rng([*seed, nbytes]).integers(0, 256, min(nbytes, 1_000_003), np.uint8), nbytes)


def whole_elements(nbytes: int, dtype: np.dtype[Any] | None) -> int:
    """Return the most bytes up to `nbytes` that are whole elements."""
    return nbytes if dtype is None else nbytes // dtype.itemsize * dtype.itemsize


class Reader:
    """The receiving end of a transfer."""

    def __init__(self, expected: Transfer) -> None:
        self.expected = expected
        self.bytes = np.zeros(expected.payload.nbytes, np.uint8)
        self.incoming = Incoming(expected.header, memoryview(self.bytes), _surprise, 1)

    @property
    def done(self) -> bool:
        return self.incoming.got == self.incoming.nbytes

    def check(self) -> None:
        assert np.array_equal(self.bytes, self.expected.payload)


def _surprise(_peer: int, _expected: bytes, header: bytes) -> None:
    raise AssertionError(f"another header: {header!r}")


class End:
    """One end of a lane with all it has to send and to receive."""

    def __init__(self, lane: Lane, sends: list[Transfer], recvs: list[Transfer]) -> None:
        self.lane = lane
        self._sends = [outgoing(each) for each in reversed(sends)]
        self._recvs = [Reader(each) for each in reversed(recvs)]

    def send(self) -> bool:
        if not self._sends:
            return False
        moved = self.lane.transmit(self._sends[-1])
        if self._sends[-1].sent == self._sends[-1].nbytes:
            self._sends.pop()
        return moved

    def receive(self) -> bool:
        if not self._recvs:
            return False
        moved = self.lane.receive(self._recvs[-1].incoming)
        if self._recvs[-1].done:
            self._recvs.pop().check()
        return moved

    @property
    def sending(self) -> bool:
        return bool(self._sends)

    @property
    def receiving(self) -> bool:
        return bool(self._recvs)


def carry(near: End, far: End, rng: random.Random | None = None) -> None:
    """Move everything both ends have; `rng` mixes the order of the steps."""
    deadline = time.monotonic() + DEADLINE
    while near.sending or near.receiving or far.sending or far.receiving:
        steps = [near.send, far.receive, far.send, near.receive]
        if rng is not None:
            steps = rng.choices(steps, k=8)
        moved = [step() for step in steps]
        if not any(moved) and rng is None:
            settle(near, far)
        assert time.monotonic() < deadline, "the lanes are stuck"


def settle(*ends: End) -> None:
    """Sleep as executors do until one of the ends may move."""
    poll = select.poll()
    try:
        for end in ends:
            if end.sending or end.receiving:
                events = end.lane.park(sending=end.sending, receiving=end.receiving)
                if not events:
                    return
                poll.register(end.lane.fileno(), events)
        assert poll.poll(DEADLINE * 1000), "no end was woken"
    finally:
        for end in ends:
            end.lane.unpark()


@every_lane
def test_payloads_of_every_size_arrive_whole_and_in_order(pair: Pair) -> None:
    transfers = [transfer(number, edge) for number, edge in enumerate(EDGES)]
    carry(End(pair[0], transfers, []), End(pair[1], [], transfers))


@every_lane
def test_both_directions_move_at_once(pair: Pair) -> None:
    there = [transfer(number, 700_001 + number) for number in range(4)]
    back = [transfer(10 + number, 600_000 + 16 * number) for number in range(4)]
    carry(End(pair[0], there, back), End(pair[1], back, there))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_sequence_of_transfers_arrives_whatever_the_pace(make: Callable[[], Pair], data: st.DataObject) -> None:
    size = st.one_of(st.integers(0, 300), st.integers(0, 400_000))

    def draw(first: int) -> list[Transfer]:
        drawn = enumerate(data.draw(st.lists(size, max_size=6)), first)
        return [transfer(number, nbytes) for number, nbytes in drawn]

    there, back = draw(0), draw(100)
    near, far = make()
    try:
        carry(End(near, there, back), End(far, back, there), random.Random(data.draw(st.integers(0, 1 << 30))))
    finally:
        near.close()
        far.close()


@settings(max_examples=examples(40), deadline=None)
@given(nbytes=st.integers(0, 3000), cuts=st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_a_stream_may_split_headers_and_payloads_anywhere(nbytes: int, cuts: list[int]) -> None:
    transfers = [transfer(number, nbytes) for number in range(3)]
    wire = b"".join(each.header + each.payload.tobytes() for each in transfers)
    raw, other = socket.socketpair()
    raw.setblocking(False)
    lane = StreamLane(other, "unix")
    try:
        readers = [Reader(each) for each in reversed(transfers)]
        at = turn = 0
        while readers:
            if at < len(wire):
                at += raw.send(wire[at : at + cuts[turn % len(cuts)]])
                turn += 1
            while readers and lane.receive(readers[-1].incoming):
                if readers[-1].done:
                    readers.pop().check()
    finally:
        raw.close()
        lane.close()


@every_lane
@pytest.mark.parametrize("nbytes", [0, 400], ids=["empty", "full"])
def test_another_header_than_expected_is_shown_before_any_byte_is_stored(pair: Pair, nbytes: int) -> None:
    class RefusedError(Exception):
        pass

    def wrong_header(*what: Any) -> None:
        seen.append(what)
        raise RefusedError

    sent, expected = transfer(1, nbytes), transfer(2, nbytes)
    seen: list[Any] = []
    out, into = outgoing(sent), np.zeros(nbytes, np.uint8)
    while out.sent < out.nbytes:
        pair[0].transmit(out)
    incoming = Incoming(expected.header, memoryview(into), wrong_header, 3)
    settle(End(pair[1], [], [expected]))
    with pytest.raises(RefusedError):
        pair[1].receive(incoming)
    assert seen == [(3, expected.header, sent.header)]
    assert not into.any()


@every_lane
def test_everything_sent_before_a_close_is_received_and_then_the_end_is_told(pair: Pair) -> None:
    transfers = [transfer(number, nbytes) for number, nbytes in enumerate([0, 5, 20_000, 1])]
    sender, receiver = End(pair[0], transfers, []), End(pair[1], [], [*transfers, transfer(9, 4)])
    while sender.sending:
        sender.send()
    pair[0].close()
    with pytest.raises(LaneClosedError):
        carry_alone(receiver)
    assert len(receiver._recvs) == 1, "what was sent before the close is missing"


@every_lane
def test_a_close_in_the_middle_of_a_transfer_is_told_after_the_part_that_came(pair: Pair) -> None:
    whole = transfer(0, 64 * MIB)
    sender, receiver = End(pair[0], [whole], []), End(pair[1], [], [whole])
    while sender._sends[-1].sent <= 0:
        assert sender.send()
    pair[0].close()
    with pytest.raises(LaneClosedError):
        carry_alone(receiver)
    got = receiver._recvs[-1].incoming.got
    assert 0 < got < whole.payload.nbytes
    assert np.array_equal(receiver._recvs[-1].bytes[:got], whole.payload[:got])


@every_lane
@pytest.mark.parametrize("nbytes", [0, 5, 100_000])
@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_the_header_that_comes_next_can_be_looked_at_though_its_sender_is_gone(
    pair: Pair, nbytes: int, closes: bool
) -> None:
    first, second = transfer(1, 20_000), transfer(2, nbytes)
    sender, receiver = End(pair[0], [first, second], []), End(pair[1], [], [first])
    assert pair[1].peek() == b""
    deadline = time.monotonic() + DEADLINE
    while sender.sending or receiver.receiving:
        sender.send()
        receiver.receive()
        assert time.monotonic() < deadline
    if closes:
        pair[0].close()
    seen = b""
    while not seen and time.monotonic() < deadline:  # TCP takes its time
        seen = pair[1].peek()
    assert seen == second.header


@every_lane
def test_a_lane_that_was_shut_down_ends_at_both_ends(pair: Pair) -> None:
    pair[0].shutdown(socket.SHUT_RDWR)
    for end in pair:
        with pytest.raises(LaneClosedError):
            carry_alone(End(end, [], [transfer(0, 4)]))


def carry_alone(end: End) -> None:
    deadline = time.monotonic() + DEADLINE
    while end.sending or end.receiving:
        if not (end.send() or end.receive()):
            settle(end)
        assert time.monotonic() < deadline, "the lane is stuck"


@every_lane
def test_a_sender_whose_peer_closed_is_told_at_the_latest_when_the_lane_is_full(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(LaneClosedError):
        carry_alone(End(pair[0], [transfer(0, 64 * MIB)], []))


@every_lane
def test_a_parked_receiver_is_woken_by_the_next_byte(pair: Pair) -> None:
    near, far = pair
    poll = select.poll()
    for number in range(3):
        message = transfer(number, 10)
        events = far.park(sending=False, receiving=True)
        assert events & select.POLLIN
        poll.register(far.fileno(), events)
        assert poll.poll(0) == []
        carry_alone(End(near, [message], []))
        assert poll.poll(DEADLINE * 1000), "the sender did not wake the receiver"
        far.unpark()
        carry_alone(End(far, [], [message]))


@every_lane
def test_parking_is_refused_or_ends_at_once_where_bytes_wait_already(pair: Pair) -> None:
    near, far = pair
    carry_alone(End(near, [transfer(0, 10)], []))
    events = far.park(sending=False, receiving=True)
    try:
        if events:
            poll = select.poll()
            poll.register(far.fileno(), events)
            assert poll.poll(DEADLINE * 1000)
    finally:
        far.unpark()
    carry_alone(End(far, [], [transfer(0, 10)]))


@every_lane
def test_a_sender_parked_on_a_full_lane_is_woken_when_the_peer_has_read(pair: Pair) -> None:
    near, far = pair
    whole = transfer(0, 64 * MIB)
    sender, receiver = End(near, [whole], []), End(far, [], [whole])
    while sender.send():
        pass
    events = near.park(sending=True, receiving=False)
    if events:
        poll = select.poll()
        poll.register(near.fileno(), events)
        while receiver.receive():
            pass
        assert poll.poll(DEADLINE * 1000), "the reader did not wake the sender"
    near.unpark()
    carry(sender, receiver)


@every_lane
def test_closing_twice_is_fine_and_frees_the_descriptor(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()
    assert pair[0].fileno() == -1


def test_the_first_bytes_of_a_lane_leave_with_their_header_in_one_call() -> None:
    near, far = socket.socketpair()
    lane = StreamLane(near, "unix")
    try:
        message = transfer(3, 100)
        out = outgoing(message)
        assert lane.transmit(out)
        assert out.sent == 100
        assert far.recv(TRANSFER_HEADER_BYTES + 101) == message.header + message.payload.tobytes()
    finally:
        lane.close()
        far.close()
