"""A peer that writes what it likes into the rings of messages reaches nothing but its own messages.

What the compiled executor does not understand, or what cannot be, it leaves to Python. The memory of the rings lies
between two pages that cannot be touched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.compiled import needs_native
from tests.support.guarded import GuardedMemory
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import DTYPES, dtype_code
from covey.base.errors import RemoteProtocolError
from covey.net.lanes.message_sockets import RingSocket
from covey.net.lanes.ring import memory_bytes
from covey.proto.matching import Matcher
from covey.proto.message_link import LentStreams, MessageSizes
from covey.runtime.messages.lending import short_sizes, unfinished_message
from covey.runtime.messages.message_lane import MessageLane
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_native

CAPACITY = (4 * mmap.PAGESIZE - 1024) // 2
assert memory_bytes(CAPACITY) == 4 * mmap.PAGESIZE
SEEDS = int(os.environ.get("COVEY_FUZZ_SEEDS", "40"))
SIZES = MessageSizes(eager_bytes=2048, credit_bytes=16384)
IN, HEAD, TAIL, WRITER_ASLEEP, READER_ASLEEP = 32, 0, 8, 16, 24
"""The first word of the ring that the victim reads, and the words of a ring."""


class Victim:
    """One end of messages through guarded memory, whose streams can be lent to the compiled executor."""

    def __init__(self) -> None:
        self._guarded = GuardedMemory(4)
        mine, self.doorbell = socket.socketpair()
        self.ring = RingSocket(self._guarded.view, CAPACITY, mine, first=True, is_native=True)
        self.ring.prepare_short(mine.fileno(), mine.fileno(), short_sizes(SIZES), spins=False)
        self.matcher = Matcher(0, 2, SIZES)
        self.matcher.lane_opened(1)
        self.lane = MessageLane(1, self.ring, self.matcher)
        self.words = self._guarded.view[:1024].cast("Q")
        self.bytes_in = self._guarded.view[1024 + CAPACITY :]
        self.is_lent = False
        self.operation: Any = None
        """The message that was under way when the streams were taken back last."""
        self.put(wire.encode(MessageHeader(wire.RESUME)))
        self.lane.flush()
        self.read()

    def put(self, data: bytes) -> None:
        """Write bytes into the ring as its peer would; the victim must have read what was there before."""
        head = self.words[IN + HEAD]
        for at, byte in enumerate(data):
            self.bytes_in[(head + at) % CAPACITY] = byte
        self.words[IN + HEAD] = head + len(data)

    def lend(self) -> None:
        streams = self.matcher.lend(1)
        assert streams is not None
        self.ring.lend(streams)
        self.is_lent = True

    def take_back(self) -> LentStreams:
        streams, kept, unfinished, has_waiting = self.ring.take_back()
        assert not has_waiting
        self.is_lent = False
        message = None if unfinished is None else unfinished_message(unfinished)
        self.operation = self.matcher.take_back(1, LentStreams(*streams), kept, message)
        return LentStreams(*streams)

    def receive(self, out: Any = None, tag: int = -1) -> Any:
        return self.ring.short.receive(out, tag, 0.0)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.ring.is_ready(sending=False):
                self.lane.read()

    def drain(self) -> None:
        """Let the peer take everything that the victim has written."""
        self.words[TAIL] = self.words[HEAD]

    def close(self) -> None:
        if self.is_lent:
            self.take_back()
        self.ring.close()
        self.doorbell.close()
        self._guarded.close()


@pytest.fixture
def victim() -> Iterator[Victim]:
    made = Victim()
    try:
        yield made
    finally:
        made.close()


def eager(number: int, array: np.ndarray[Any, Any], tag: int = 3, **changed: Any) -> bytes:
    header = MessageHeader(wire.EAGER, number, array.nbytes, tag, False, dtype_code(array.dtype), array.shape)
    return wire.encode(header._replace(**changed)) + array.tobytes()


ARRAY = np.arange(6, dtype=np.int16).reshape(2, 3)


def test_a_message_that_is_as_it_should_be_passes(victim: Victim) -> None:
    victim.lend()
    victim.put(eager(0, ARRAY) + eager(1, ARRAY + 1))
    np.testing.assert_array_equal(victim.receive(), ARRAY)
    out = np.zeros(6, np.int16)
    assert victim.receive(out, 3) is out
    np.testing.assert_array_equal(out, (ARRAY + 1).reshape(-1))
    assert victim.receive() is False
    streams = victim.take_back()
    assert (streams.expected_id, streams.received) == (2, 2 * (wire.FIXED_BYTES + 16 + 12))


@pytest.mark.parametrize(
    "frame",
    [
        eager(1, ARRAY),
        eager(0, ARRAY, payload_bytes=13),
        eager(0, ARRAY, shape=(3, 3)),
        eager(0, ARRAY, shape=(1 << 62, 6)),
        eager(0, ARRAY, shape=((1 << 64) - 2, 3)),
        eager(0, ARRAY, kind=wire.END),
        eager(0, np.zeros(2049, np.uint8)),
        eager(0, ARRAY)[:6] + bytes([33]) + eager(0, ARRAY)[7:],
        eager(0, ARRAY)[:5] + bytes([200]) + eager(0, ARRAY)[6:],
        b"\0" * 64,
        wire.encode(MessageHeader(wire.ACK, payload_bytes=1)) + b"\0" * 64,
        wire.encode(MessageHeader(wire.CREDIT, payload_bytes=1)) + b"\0" * 64,
        wire.encode(MessageHeader(wire.RESUME)),
    ],
)
def test_a_frame_that_cannot_be_is_left_to_python_which_refuses_it(victim: Victim, frame: bytes) -> None:
    victim.lend()
    victim.put(frame)
    assert victim.receive() is False
    assert victim.take_back().received == 0
    with pytest.raises(RemoteProtocolError):
        victim.read()


@pytest.mark.parametrize("by", [-1, CAPACITY + 1, 1 << 32, 1 << 63])
@pytest.mark.parametrize("word", [IN + HEAD, TAIL])
def test_an_impossible_position_moves_nothing(victim: Victim, word: int, by: int) -> None:
    victim.drain()
    victim.lend()
    base = victim.words[IN + TAIL if word == IN + HEAD else HEAD]
    victim.words[word] = (base + (by if word == IN + HEAD else -by)) % (1 << 64)
    head = victim.words[HEAD]
    assert victim.receive() is False
    if word == TAIL:
        assert not victim.ring.short.send(ARRAY, 1, 0.0)
    assert victim.words[HEAD] == head or word != TAIL
    victim.take_back()
    with pytest.raises(ConnectionAbortedError):
        victim.ring.recv(1) if word == IN + HEAD else victim.ring.send(b"x")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_bytes_are_messages_or_left_to_python(victim: Victim, seed: int) -> None:
    rng = random.Random(seed)
    good, received = 0, 0
    victim.lend()
    for _ in range(30):
        array = np.frombuffer(
            rng.randbytes(8 * rng.randrange(1, 40)), rng.choice([d for d in DTYPES if d.kind in "iu"])
        )
        frame = bytearray(eager(good, array) if rng.random() < 0.8 else wire.encode(MessageHeader(wire.ACK)))
        is_good = rng.random() < 0.7
        if not is_good:
            for _ in range(rng.choice([1, 1, 4])):
                frame[rng.randrange(min(len(frame), 40))] = rng.randrange(256)
        victim.put(bytes(frame))
        victim.drain()
        got = victim.receive(tag=rng.choice([-1, 3]))
        if got is False:
            is_message = is_good and frame[3] == wire.EAGER
            assert not is_message, frame.hex()
            victim.take_back()
            with contextlib.suppress(RemoteProtocolError):
                victim.read()
            if victim.matcher.lend(1) is None or not is_good:
                return
            victim.lend()
        else:
            if is_good:
                np.testing.assert_array_equal(got, array)
            good, received = good + 1, received + got.nbytes
        if rng.random() < 0.3:
            assert victim.ring.short.send(array, rng.randrange(9), 0.0) in (True, False)
    assert victim.ring.short.counts()[2] <= good


# Long messages

LONG = np.arange(3000, dtype=np.int16)


def rts(number: int = 0, array: np.ndarray[Any, Any] = LONG, **changed: Any) -> bytes:
    return eager(number, array, kind=wire.RTS, **changed)[: wire.FIXED_BYTES + 8 * array.ndim]


def data(number: int, payload: bytes, **changed: Any) -> bytes:
    return wire.encode(MessageHeader(wire.DATA, number, len(payload))._replace(**changed)) + payload


def test_a_long_message_that_is_as_it_should_be_passes(victim: Victim) -> None:
    victim.lend()
    content = LONG.tobytes()
    victim.put(rts() + data(0, content[:1]) + data(0, content[1:5999]) + data(0, content[5999:]))
    np.testing.assert_array_equal(victim.receive(), LONG)
    victim.put(rts(1) + data(1, content[:100]))
    unfinished = victim.receive()
    assert unfinished[2] is None
    streams = victim.take_back()
    assert (streams.expected_id, victim.ring.short.counts()) == (2, (0, 0, 1, 6000))
    victim.put(data(1, content[100:]))
    victim.read()
    assert victim.operation in victim.matcher.completed


@pytest.mark.parametrize(
    "frame",
    [
        data(1, b"x" * 10),
        data(0, b"x" * 10, tag=1),
        data(0, b"x" * 10, shape=(10,)),
        data(0, b"x" * 6001),
        data(0, b""),
        data(0, b"x" * 10, payload_bytes=1 << 62),
        rts(0),
        rts(2),
        wire.encode(MessageHeader(wire.CTS, 0, 6000)),
        b"\0" * 64,
    ],
)
@pytest.mark.parametrize("moved", [0, 100])
def test_a_piece_that_cannot_be_is_left_to_python_which_refuses_it(victim: Victim, frame: bytes, moved: int) -> None:
    victim.lend()
    content = LONG.tobytes()
    victim.put(rts() + (data(0, content[:moved]) if moved else b"") + frame)
    assert type(victim.receive()) is tuple
    victim.take_back()
    with pytest.raises(RemoteProtocolError):
        victim.read()


@pytest.mark.parametrize(
    "frame",
    [
        rts(0, LONG, payload_bytes=7),
        rts(1),
        rts(0, np.zeros(1024, np.int16)),
        rts(0, LONG, shape=(1 << 62,)),
        rts(0, LONG, tag=-1),
        data(0, b"x" * 10),
    ],
)
def test_an_announcement_that_cannot_be_is_left_to_python_which_refuses_it(victim: Victim, frame: bytes) -> None:
    victim.lend()
    victim.put(frame + b"\0" * 64)
    assert victim.receive() is False
    assert victim.take_back().received == 0
    with pytest.raises(RemoteProtocolError):
        victim.read()


def test_an_announcement_of_more_than_there_is_memory_for_is_left_to_python(victim: Victim) -> None:
    victim.lend()
    victim.put(rts(0, LONG, shape=(1 << 60,), payload_bytes=1 << 61))
    assert victim.receive() is False
    victim.take_back()
    victim.read()
    assert victim.matcher.has_match(1, 3)


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(MessageHeader(wire.CTS, 1, 6000)),
        wire.encode(MessageHeader(wire.CTS, 0, 5999)),
        wire.encode(MessageHeader(wire.CTS, 0, 6000))[:4] + b"\1" + wire.encode(MessageHeader(wire.CTS, 0, 6000))[5:],
        wire.encode(MessageHeader(wire.ACK, payload_bytes=1 << 40)),
        data(0, b"x"),
    ],
)
def test_an_answer_that_cannot_be_is_left_to_python_which_refuses_it(victim: Victim, frame: bytes) -> None:
    victim.drain()
    victim.lend()
    victim.put(frame)
    assert type(victim.ring.short.send(LONG, 1, 0.0)) is tuple
    victim.take_back()
    with pytest.raises(RemoteProtocolError):
        victim.read()


@pytest.mark.parametrize("by", [-1, CAPACITY + 1, 1 << 63])
@pytest.mark.parametrize("word", [IN + HEAD, TAIL])
def test_an_impossible_position_ends_a_long_message_that_waits(victim: Victim, word: int, by: int) -> None:
    """The word is written when the victim waits for more of the payload, or for room."""
    victim.drain()
    victim.lend()
    large = np.arange(CAPACITY, dtype=np.int16)
    is_sent = word == TAIL
    victim.put(
        wire.encode(MessageHeader(wire.CTS, 0, large.nbytes)) if is_sent else rts() + data(0, b"x", payload_bytes=6000)
    )
    began, base = time.monotonic(), victim.words[HEAD] if is_sent else victim.words[IN + HEAD]

    def write() -> None:
        while victim.words[HEAD] - victim.words[TAIL] < (CAPACITY if is_sent else 1):
            time.sleep(0.001)
        victim.words[word] = ((victim.words[HEAD] - by) if is_sent else (base + by)) % (1 << 64)
        victim.doorbell.send(b"!")

    thread = threading.Thread(target=write)
    thread.start()
    if is_sent:
        unfinished = victim.ring.short.send(large, 1, DEADLINE)
    else:
        unfinished = victim.ring.short.receive(None, 3, time.monotonic() + DEADLINE)
    thread.join(DEADLINE)
    assert type(unfinished) is tuple
    assert time.monotonic() - began < DEADLINE / 2
    victim.take_back()
    with pytest.raises(ConnectionAbortedError):
        victim.ring.send(b"x") if is_sent else victim.ring.recv(1)


@pytest.mark.parametrize("does", ["send", "recv"])
def test_a_peer_that_sleeps_is_woken_for_the_last_part_of_a_payload(victim: Victim, does: str) -> None:
    """It is woken for the announcement, and again for a payload that is less than half of a ring."""
    victim.drain()
    victim.lend()
    small = np.arange(1100, dtype=np.int16)
    victim.words[READER_ASLEEP if does == "send" else IN + WRITER_ASLEEP] = 1
    if does == "send":
        victim.put(wire.encode(MessageHeader(wire.CTS, 0, small.nbytes)))
        assert type(victim.ring.short.send(small, 3, 0.0)) is tuple  # it is not acknowledged
    else:
        victim.put(rts(0, small) + data(0, small.tobytes()))
        np.testing.assert_array_equal(victim.receive(), small)
    victim.doorbell.setblocking(False)
    assert len(victim.doorbell.recv(100)) >= 2


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_bytes_are_pieces_or_left_to_python(victim: Victim, seed: int) -> None:
    rng = random.Random(seed)
    victim.lend()
    for number in range(12):
        array = np.frombuffer(rng.randbytes(rng.randrange(2049, 6000)), np.uint8)
        content, frames, at = array.tobytes(), [rts(number, array)], 0
        while at < len(content):
            step = rng.randrange(1, 3000)
            frames.append(data(number, content[at : at + step]))
            at += step
        is_good = rng.random() < 0.7
        if not is_good:
            broken = rng.randrange(len(frames))
            frame = bytearray(frames[broken])
            frame[rng.randrange(min(len(frame), 40))] = rng.randrange(256)
            frames[broken] = bytes(frame)
        stream = b"".join(frames)
        victim.drain()
        if len(stream) > CAPACITY:
            continue
        victim.put(stream)
        got = victim.receive(tag=rng.choice([-1, 3]))
        if is_good and got is not False:
            np.testing.assert_array_equal(got, array)
        elif is_good or type(got) is not np.ndarray:
            assert not is_good
            victim.take_back()
            with contextlib.suppress(RemoteProtocolError, MemoryError):
                victim.read()
            return
        victim.put(wire.encode(MessageHeader(wire.CTS, number, rng.choice([0, array.nbytes]))))
        sent = victim.ring.short.send(array, rng.randrange(9), 0.0)
        if sent is not True:
            assert type(sent) is tuple
            victim.take_back()
            assert victim.operation is not None
            return
