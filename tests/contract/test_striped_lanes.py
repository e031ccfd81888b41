"""What lanes over several networks promise beyond sealed ones: a stream that dies costs no byte of a transfer.

Only the compiled executor has them.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.contract.test_native_lanes import moved
from tests.contract.test_sealed_lanes import LANE, SECRET, narrow_pairs, unix_pairs
from tests.support.compiled import needs_native
from tests.support.in_turn import in_turn
from tests.support.native_ends import NativeEnd, in_parallel, transfers
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE

from covey.net.host.machine import native_crypto
from covey.net.lanes.lane import LaneClosedError
from covey.wire.seal import (
    DIALLER,
    RECORD_LENGTH,
    RECORD_OVERHEAD_BYTES,
    STRIPE_BYTES,
    STRIPE_NUMBER,
    STRIPE_WINDOW,
    Opener,
    Sealer,
    lane_keys,
    record_length,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
STANDSTILL_SECONDS = 0.3
STUCK_SECONDS = 2.0
"""A lane on which nothing moves for so long, though both ends are attended to, is stuck: it looks at its streams ten
times a second."""

pytestmark = [needs_native, pytest.mark.skipif(bool(native_crypto()), reason=native_crypto())]


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def striped(stack: contextlib.ExitStack, socks: list[socket.socket], *, dialler: bool) -> Any:
    from covey.net.lanes.native import NativeStripedLane

    lane = NativeStripedLane(socks, SECRET, LANE, dialler=dialler)
    stack.callback(lane.close)
    return lane


def kill(sock: socket.socket) -> None:
    """Break a connection: bytes that come from now on are answered by a reset, after which what was on its way is lost.

    What has arrived can still be read, as after a reset from outside; closing the descriptor would lose it.
    """
    with contextlib.suppress(OSError):  # the other end has reset it
        sock.shutdown(socket.SHUT_RDWR)


def tended(stack: contextlib.ExitStack, *lanes: Any) -> None:
    """Tend lanes from another thread, as the control loop does."""
    is_over = threading.Event()

    def tend() -> None:
        while not is_over.wait(0.05):
            for lane in lanes:
                lane.tend()

    thread = threading.Thread(target=tend)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)


@pytest.mark.parametrize("seed", range(3))
def test_streams_that_die_at_any_moment_cost_no_byte(ends: contextlib.ExitStack, seed: int) -> None:
    """All streams but one die, some after the machine stood still, while both ends send and reduce."""
    rng = random.Random(seed)
    near, far = narrow_pairs(ends, 3) if seed % 2 else unix_pairs(ends, 3)
    lanes = [striped(ends, socks, dialler=index == 0) for index, socks in enumerate((near, far))]
    tended(ends, *lanes)
    dtype = rng.choice([None, np.dtype(np.uint32)])
    sizes = [rng.choice([0, 4, 2048, 2052, STRIPE_BYTES - 4, STRIPE_BYTES, rng.randrange(MIB) & ~3]) for _ in range(12)]
    sizes += [2 * MIB]
    there, back = transfers(sizes, dtype, seed=1), transfers(sizes[::-1], dtype, seed=2)
    victims = rng.sample([(near, index) for index in range(3)], 2)
    times = sorted(rng.uniform(0.0, 0.15) for _ in victims)

    def destroy() -> None:
        began = time.monotonic()
        for at, (socks, index) in zip(times, victims, strict=True):
            time.sleep(max(0.0, began + at - time.monotonic()))
            if rng.random() < 0.5:
                time.sleep(STANDSTILL_SECONDS)
            kill(socks[index])

    in_parallel(moved(ends, lanes[0], there, back), moved(ends, lanes[1], back, there), destroy)


class TwoPrograms:
    """Two compiled ends that do the same operations one after the other, over streams that die, in one thread.

    An end that has done its part of an operation is in its program until the other has done the same: there, only the
    control loop attends to the lane.
    """

    def __init__(self, stack: contextlib.ExitStack, rng: random.Random, *, attends: bool) -> None:
        """Without `attends`, there is no control loop."""
        self._stack, self._rng, self._attends = stack, rng, attends
        self._socks = unix_pairs(stack, rng.choice([2, 3]))
        for sock in [*self._socks[0], *self._socks[1]]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, rng.choice([1 << 13, 1 << 16]))
        self.lanes = [striped(stack, socks, dialler=index == 0) for index, socks in enumerate(self._socks)]
        self._alive = list(range(len(self._socks[0])))

    def run(self) -> bool:
        """Do some operations; return whether all ended, or one of them makes no progress any more."""
        return all(self._operation(number) for number in range(6))

    def _operation(self, number: int) -> bool:
        rng = self._rng
        sizes = [
            [rng.choice([4, 2000, rng.randrange(3 * STRIPE_BYTES)]) for _ in range(rng.choice([0, 1, 4]))] for _ in "ab"
        ]
        there, back = (transfers(each, seed=2 * number + index) for index, each in enumerate(sizes))
        pair = [NativeEnd(self.lanes[0], there, back), NativeEnd(self.lanes[1], back, there)]
        seen, until = None, 0.0
        try:
            while not all(end.done for end in pair):
                for end in rng.sample(pair, 2):
                    if not end.done:
                        end.advance()
                for lane in self.lanes:
                    if self._attends:
                        lane.tend()
                if len(self._alive) > 1 and rng.random() < 0.02:
                    kill(self._socks[rng.randrange(2)][self._alive.pop(rng.randrange(len(self._alive)))])
                now = (
                    [(end.runner.sent, end.runner.applied) for end in pair],
                    [lane.native.streams() for lane in self.lanes],
                )
                if now != seen:
                    seen, until = now, time.monotonic() + STUCK_SECONDS
                elif time.monotonic() > until:
                    return False
                else:
                    time.sleep(0.001)
            for end in pair:
                end.check()
        finally:
            for end in pair:
                end.close()
        return True


@in_turn(seed=seeds(12))
def test_no_sender_waits_for_an_end_that_has_done_its_part_and_is_in_its_program(seed: int) -> None:
    with contextlib.ExitStack() as stack:
        assert TwoPrograms(stack, random.Random(seed), attends=True).run()


@pytest.mark.thorough
def test_without_the_control_loop_some_sender_waits_for_the_next_operation() -> None:
    """The test above can fail. Which seed holds a sender up depends on the threads: the first one is enough."""
    deadline = time.monotonic() + DEADLINE
    for seed in itertools.count():
        with contextlib.ExitStack() as stack:
            if not TwoPrograms(stack, random.Random(seed), attends=False).run():
                return
        assert time.monotonic() < deadline, "nothing was held up"


def test_what_a_stream_had_is_sent_again_though_its_sender_is_in_no_operation(ends: contextlib.ExitStack) -> None:
    near, far = unix_pairs(ends, 2)
    lanes = [striped(ends, socks, dialler=index == 0) for index, socks in enumerate((near, far))]
    first, second = transfers([4, 1000, 2000, 2000, 2000]), transfers([STRIPE_BYTES])
    moved(ends, lanes[0], first, [])()  # the kernel has it; the other end, which reads nothing, has not acknowledged it
    kill(near[0])
    tended(ends, lanes[0])
    moved(ends, lanes[1], [], first)()
    deadline = time.monotonic() + DEADLINE
    while not lanes[0].sent_again:
        time.sleep(0.01)
        assert time.monotonic() < deadline
    in_parallel(moved(ends, lanes[0], second, []), moved(ends, lanes[1], [], second))
    while not lanes[0].is_settled:
        time.sleep(0.01)
        assert time.monotonic() < deadline


def test_a_sender_stops_at_the_end_of_its_window(ends: contextlib.ExitStack) -> None:
    """Record 0 stays on a stream that is not read, and the other stream is read to its end."""
    near, far = unix_pairs(ends, 2)
    lane, seen = striped(ends, near, dialler=True), bytearray()
    numbers = [Opener(lane_keys(SECRET, LANE, stream)[DIALLER], LANE, stream, DIALLER) for stream in range(2)]
    (sent,) = transfers([(STRIPE_WINDOW + 20) * STRIPE_BYTES])
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with contextlib.suppress(BlockingIOError):
                seen.extend(far[1].recv(MIB))
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        end = NativeEnd(lane, [sent], [])
        ends.callback(end.close)
        assert not end.advance(0.5)
        time.sleep(0.05)
    finally:
        is_over.set()
        reader.join()
    with contextlib.suppress(BlockingIOError):
        while True:
            seen.extend(far[1].recv(MIB))
    found, at = [], 0
    while at + RECORD_LENGTH.size <= len(seen) and at + record_length(seen, at) + RECORD_OVERHEAD_BYTES <= len(seen):
        length = record_length(seen, at)
        plain = bytearray(length)
        numbers[1].open(memoryview(seen)[at : at + length + RECORD_OVERHEAD_BYTES], plain)
        found.append(STRIPE_NUMBER.unpack_from(plain)[0])
        at += length + RECORD_OVERHEAD_BYTES
    assert found
    assert min(found) > 0
    assert max(found) < STRIPE_WINDOW


def test_a_lane_whose_streams_have_all_died_ends(ends: contextlib.ExitStack) -> None:
    near, far = narrow_pairs(ends, 2)
    lanes = [striped(ends, socks, dialler=index == 0) for index, socks in enumerate((near, far))]
    for sock in near:
        kill(sock)
    sent = transfers([2 * MIB])
    for lane, what in ((lanes[0], (sent, [])), (lanes[1], ([], sent))):
        with pytest.raises(LaneClosedError):
            moved(ends, lane, *what)()


def sealers() -> list[Sealer]:
    return [Sealer(lane_keys(SECRET, LANE, stream)[DIALLER], LANE, stream, DIALLER) for stream in range(2)]


def record(sealer: Sealer, number: int, payload: bytes) -> bytes:
    into = bytearray(STRIPE_NUMBER.size + len(payload) + RECORD_OVERHEAD_BYTES)
    sealer.seal(STRIPE_NUMBER.pack(number) + payload, memoryview(into))
    return bytes(into)


def receiving(stack: contextlib.ExitStack) -> tuple[list[socket.socket], Any]:
    near, far = unix_pairs(stack, 2)
    return near, striped(stack, far, dialler=False)


@pytest.mark.parametrize("seed", range(4))
def test_records_are_delivered_once_and_in_order_however_they_come(ends: contextlib.ExitStack, seed: int) -> None:
    """Each record may come twice, on either stream, and up to STRIPE_WINDOW - 1 too early."""
    rng = random.Random(seed)
    (near, lane), seals = receiving(ends), sealers()
    expected = transfers([rng.randrange(2000) for _ in range(2 * STRIPE_WINDOW)])
    payloads = [each.header + each.payload.tobytes() for each in expected]
    wire = [bytearray(), bytearray()]
    early: list[int] = list(range(STRIPE_WINDOW))
    rng.shuffle(early)
    order = [*early, *range(STRIPE_WINDOW, 2 * STRIPE_WINDOW)]
    for number in order:
        for stream in rng.sample((0, 1), rng.choice((1, 2))):
            wire[stream] += record(seals[stream], number, payloads[number])

    def send(stream: int) -> Callable[[], None]:
        def run() -> None:
            near[stream].setblocking(True)
            near[stream].sendall(wire[stream])

        return run

    in_parallel(moved(ends, lane, [], expected), send(0), send(1))


@pytest.mark.parametrize("what", ["missing", "long", "short", "altered", "no number"])
def test_a_peer_that_breaks_the_rules_ends_the_lane_and_costs_no_memory(ends: contextlib.ExitStack, what: str) -> None:
    (near, lane), (seal, other) = receiving(ends), sealers()
    (expected,) = transfers([100])
    payload = expected.header + expected.payload.tobytes()
    if what == "missing":  # both streams go on beyond the window, without record 0
        near[0].sendall(record(seal, STRIPE_WINDOW, payload))
        near[1].sendall(record(other, 1 << 63, payload))
    elif what == "long":
        near[0].sendall(record(seal, 0, payload + bytes(1)))
    elif what == "short":
        near[0].sendall(record(seal, 0, payload[:10]))
    elif what == "altered":
        sealed = bytearray(record(seal, 0, payload))
        sealed[20] ^= 1
        near[0].sendall(sealed)
    else:
        into = bytearray(STRIPE_NUMBER.size + RECORD_OVERHEAD_BYTES)
        seal.seal(bytes(STRIPE_NUMBER.size), memoryview(into))
        near[0].sendall(into)
    with pytest.raises(LaneClosedError):
        moved(ends, lane, [], [expected])()
