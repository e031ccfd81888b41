"""A peer that writes what it likes into the shared memory of a ring ends its lane, and reaches nothing else.

The memory of each ring lies between two pages that cannot be touched: a step outside of it ends the process.
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
from tests.support.native_ends import NativeEnd, OtherHeaderError, transfers
from tests.support.waiting import DEADLINE

from covey.base.native import native
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.ring import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_native

CAPACITY = (4 * mmap.PAGESIZE - 1024) // 2
assert CAPACITY % 64 == 0
assert memory_bytes(CAPACITY) == 4 * mmap.PAGESIZE
SEEDS = int(os.environ.get("COVEY_FUZZ_SEEDS", "40"))
HEAD, TAIL, WRITER_ASLEEP, READER_ASLEEP, WORDS = 0, 8, 16, 24, 32
OUT, IN = 0, WORDS
"""The first words of the two rings, as the first end sees them."""


class Victim:
    """The first end of a ring lane, moved by the compiled executor, and the memory that its peer writes."""

    def __init__(self) -> None:
        from covey.net.lanes.native import NativeRingLane

        self._guarded = GuardedMemory(4)
        self.memory = self._guarded.view
        self.words = self.memory[:1024].cast("Q")
        self.bytes_in = self.memory[1024 + CAPACITY :]
        mine, self.doorbell = socket.socketpair()
        self.lane = NativeRingLane(self.memory, CAPACITY, mine, first=True, kind="shm")
        self.end: NativeEnd | None = None

    def starts(self, sends: list[Any], recvs: list[Any]) -> NativeEnd:
        if self.end is not None:
            self.end.close()
        self.end = NativeEnd(self.lane, sends, recvs)
        return self.end

    def close(self) -> None:
        if self.end is not None:
            self.end.check_canaries()
            self.end.close()
        self.lane.close()
        self.doorbell.close()
        self._guarded.close()


@pytest.fixture
def victim() -> Iterator[Victim]:
    made = Victim()
    try:
        yield made
    finally:
        made.close()


def wrapped(value: int) -> int:
    return value % (1 << 64)


# What a word must never hold, measured from where the victim is.
IMPOSSIBLE_HEADS = [1, 63, 65, -64, -1, CAPACITY + 64, CAPACITY + 1, 1 << 32, 1 << 63, -(1 << 40) * 64]
IMPOSSIBLE_TAILS = [64, 1, -1, 63, -CAPACITY - 64, -CAPACITY - 1, 1 << 32, 1 << 63]


@pytest.mark.parametrize("has_begun", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("by", IMPOSSIBLE_HEADS)
def test_an_impossible_head_ends_the_lane(victim: Victim, by: int, has_begun: bool) -> None:
    (message,) = transfers([100])
    if has_begun:
        for part in (message.header, message.payload.tobytes()):
            put(victim, part)
        victim.starts([], [message]).run()
    end = victim.starts([], [message])
    victim.words[IN + HEAD] = wrapped(victim.words[IN + TAIL] + by)
    with pytest.raises(LaneClosedError, match="impossible position"):
        end.run()
    assert not end.received.any()


@pytest.mark.parametrize("has_begun", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("by", IMPOSSIBLE_TAILS)
def test_an_impossible_tail_ends_the_lane(victim: Victim, by: int, has_begun: bool) -> None:
    if has_begun:
        victim.starts(transfers([100]), []).run()
        victim.words[OUT + TAIL] = victim.words[OUT + HEAD]
    head = victim.words[OUT + HEAD]
    end = victim.starts(transfers([3 * CAPACITY]), [])
    victim.words[OUT + TAIL] = wrapped(head + by)
    with pytest.raises(LaneClosedError, match="impossible position"):
        end.run()
    assert victim.words[OUT + HEAD] == head


@pytest.mark.parametrize("word", [IN + HEAD, OUT + TAIL])
@pytest.mark.parametrize("by", [-64, 1, CAPACITY + 64, 1 << 63])
def test_a_sleeper_finds_an_impossible_position_when_it_is_woken(victim: Victim, word: int, by: int) -> None:
    sends, recvs = (transfers([2 * CAPACITY]), []) if word == OUT + TAIL else ([], transfers([100]))
    end = victim.starts(sends, recvs)
    told: list[str] = []

    def run() -> None:
        try:
            end.run()
        except LaneClosedError as error:
            told.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    asleep = OUT + WRITER_ASLEEP if word == OUT + TAIL else IN + READER_ASLEEP
    deadline = time.monotonic() + DEADLINE
    while not victim.words[asleep]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    base = victim.words[OUT + HEAD] - CAPACITY if word == OUT + TAIL else victim.words[IN + TAIL]
    victim.words[word] = wrapped(base + by)
    victim.doorbell.send(b"\0")
    thread.join(DEADLINE)
    assert len(told) == 1
    assert "impossible position" in told[0]


def put(victim: Victim, data: bytes) -> None:
    """Write bytes into the ring and publish them, in whole lines, as an honest peer does."""
    at = victim.words[IN + HEAD] % CAPACITY
    victim.bytes_in[at : at + len(data)] = data
    victim.words[IN + HEAD] += len(data) + -len(data) % 64


def test_a_header_that_changes_while_it_is_read_is_judged_by_one_copy(victim: Victim) -> None:
    """A header that is reported differs from the expected one, although the peer has changed the bytes back."""
    (message,) = transfers([0])
    good, bad = message.header[20], message.header[20] ^ 0xFF
    stopping, at = False, 0

    def change() -> None:
        memory = victim.bytes_in
        while not stopping:
            memory[at + 20] = bad
            memory[at + 20] = good

    thread = threading.Thread(target=change)
    thread.start()
    done, reported = 0, []
    try:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            at = victim.words[IN + TAIL] % CAPACITY
            if victim.words[IN + HEAD] == victim.words[IN + TAIL]:
                put(victim, message.header)
            try:
                assert victim.starts([], [message]).advance(1.0)
                done += 1
            except OtherHeaderError as error:
                reported.append(error.args)
    finally:
        stopping = True
        thread.join(DEADLINE)
    assert done
    assert all(expected == message.header and header[20] == bad for expected, header in reported)


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_random_words_in_the_shared_memory_end_the_lane_or_nothing(victim: Victim, seed: int) -> None:
    """Between any two steps the peer writes anything anywhere; the victim's own words stay possible."""
    rng = random.Random(seed)
    near = [0, 1, 63, 64, 128, CAPACITY - 64, CAPACITY, CAPACITY + 64, 1 << 32, 1 << 63, (1 << 64) - 1]
    sizes = [rng.choice([0, 1, 64, 1000, CAPACITY, 3 * CAPACITY]) for _ in range(6)]
    ended = 0
    for _ in range(60):
        end = victim.starts(
            transfers(sizes), transfers(sizes[::-1], np.dtype(np.uint8) if rng.random() < 0.5 else None)
        )
        try:
            for _ in range(30):
                if rng.random() < 0.7:  # an honest step: what was written is read, and more is written
                    victim.words[OUT + TAIL] = victim.words[OUT + HEAD]
                    room = CAPACITY - wrapped(victim.words[IN + HEAD] - victim.words[IN + TAIL])
                    if 0 < room <= CAPACITY:
                        victim.words[IN + HEAD] = wrapped(victim.words[IN + HEAD] + rng.randrange(room // 64 + 1) * 64)
                    (header,) = transfers([sizes[-1]])
                    at = victim.words[IN + TAIL] % CAPACITY
                    victim.bytes_in[at : at + 64] = header.header
                else:
                    word = rng.choice([IN + HEAD, OUT + TAIL, IN + WRITER_ASLEEP, OUT + READER_ASLEEP])
                    own = victim.words[IN + TAIL] if word == IN + HEAD else victim.words[OUT + HEAD]
                    victim.words[word] = wrapped(rng.choice([0, own]) + rng.choice([-1, 1]) * rng.choice(near))
                if end.advance():
                    break
                assert victim.words[OUT + HEAD] % 64 == 0
                assert victim.words[IN + TAIL] % 64 == 0
        except (LaneClosedError, OtherHeaderError):
            ended += 1
        end.check_canaries()
        while True:  # or the doorbell fills
            try:
                if len(victim.doorbell.recv(4096, socket.MSG_DONTWAIT)) < 4096:
                    break
            except BlockingIOError:
                break
    assert ended


def test_a_peer_that_writes_all_the_time_crashes_nothing(victim: Victim) -> None:
    rng = random.Random(7)
    stopping = False

    def scribble() -> None:
        while not stopping:
            for _ in range(50):
                word = rng.choice([IN + HEAD, OUT + TAIL])
                victim.words[word] = rng.choice([0, 64, 128, CAPACITY, rng.getrandbits(64), rng.getrandbits(20) * 64])
            at = rng.randrange(CAPACITY // 64) * 64
            victim.bytes_in[at : at + 64] = rng.randbytes(64)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            end = victim.starts(transfers([5000, 0, 70_000]), transfers([5000, 0, 70_000]))
            with contextlib.suppress(LaneClosedError, OtherHeaderError):
                end.advance(0.001)
            end.check_canaries()
    finally:
        stopping = True
        thread.join(DEADLINE)


def test_a_ring_that_does_not_fit_its_memory_is_refused() -> None:
    ring = native().module.Ring
    one, other = socket.socketpair()
    with one, other:
        for memory, capacity in [
            (bytearray(memory_bytes(4096) - 1), 4096),
            (bytearray(memory_bytes(4096)), 4100),
            (bytearray(memory_bytes(4096)), 0),
            (bytearray(memory_bytes(4096)), -64),
            (bytearray(memory_bytes(4096)), 1 << 62),
            (bytearray(memory_bytes(4096)), (1 << 63) - 64),
            (memoryview(bytearray(memory_bytes(4096) + 8))[1:], 4096),
        ]:
            with pytest.raises(ValueError, match="too small"):
                ring(memory, capacity, one.fileno(), True, bytes(32), 1)
        with pytest.raises((TypeError, BufferError)):
            ring(bytes(memory_bytes(4096)), 4096, one.fileno(), True, bytes(32), 1)
        for token, how in [(bytes(31), 1), (bytes(33), 1), (bytes(32), -1), (bytes(32), 3)]:
            with pytest.raises(ValueError, match="token"):
                ring(bytearray(memory_bytes(4096)), 4096, one.fileno(), True, token, how)
