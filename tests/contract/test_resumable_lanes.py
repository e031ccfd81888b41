"""What resumable lanes promise beyond others: bytes arrive once and in order, whatever connections carry them."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.contract.test_lanes import _connected
from tests.contract.test_native_lanes import moved
from tests.contract.test_sealed_lanes import LANE, SECRET
from tests.support.in_turn import in_turn
from tests.support.native_ends import in_parallel, transfers
from tests.support.seeds import batches
from tests.support.sets import pairs
from tests.support.waiting import DEADLINE

from covey.base.native import native
from covey.net.host.machine import native_crypto
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.sealed import SealedLane
from covey.net.lanes.stream import StreamLane, is_striped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
SEEDS_OF_A_BATCH = 3
EXECUTORS = [(False, False)]
SHAPES: list[tuple[str, tuple[bool, bool]]] = []
"""What a lane is, and which of its ends the compiled executor moves."""
if native().module is not None and not native_crypto():
    EXECUTORS += [(True, False), (False, True), (True, True)]
    SHAPES.append(("striped", (True, True)))
SHAPES += [(shape, pair) for shape in ("plain", "sealed") for pair in EXECUTORS]
every_shape = pytest.mark.parametrize(("shape", "is_native"), SHAPES, ids=str)


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def resumable(
    socks: list[socket.socket], *, is_native: bool, dialler: bool, is_direct: bool, shape: str = "sealed"
) -> Any:
    if not is_native:
        (sock,) = socks
        if shape == "plain":
            return StreamLane(sock, "tcp", is_direct=is_direct)
        return SealedLane(sock, SECRET, LANE, dialler=dialler, is_direct=is_direct)
    from covey.net.lanes.native import NativeSealedLane, NativeStreamLane, NativeStripedLane

    directs = [is_direct] * len(socks)
    if shape == "plain":
        return NativeStreamLane(socks[0], "tcp", directs=directs)
    maker = NativeSealedLane if shape == "sealed" else NativeStripedLane
    return maker(socks, SECRET, LANE, dialler=dialler, directs=directs)


class Relay:
    """Passes bytes on, after a while and in other pieces; what it holds is lost when it ends."""

    def __init__(self, rng: random.Random) -> None:
        (self.near, one), (self.far, two) = _connected(), _connected()
        self._rng, self._is_over = random.Random(rng.random()), threading.Event()
        self._thread = threading.Thread(target=self._pass_on, args=([one, two],))
        self._thread.start()

    def _pass_on(self, socks: list[socket.socket]) -> None:
        held, rng = [bytearray(), bytearray()], self._rng
        while not self._is_over.is_set():
            for sock in select.select([sock for sock in socks if len(held[socks.index(sock)]) < MIB], [], [], 0.002)[0]:
                with contextlib.suppress(OSError):
                    held[socks.index(sock)] += sock.recv(rng.choice([10, 3000, 1 << 16]))
            for data, sock in zip(held, socks[::-1], strict=True):
                if rng.random() < 0.7 and select.select([], [sock], [], 0)[1]:
                    with contextlib.suppress(OSError):
                        del data[: sock.send(data[: rng.choice([7, 2000, 1 << 18])])]
        for sock in socks:
            sock.close()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


class Network:
    """Two ends of a lane, and the connections of its streams, which end and are replaced."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        rng: random.Random,
        is_native: tuple[bool, bool],
        shape: str,
        *,
        is_relayed: bool,
    ) -> None:
        self._rng, self._is_relayed, self._stack = rng, is_relayed, stack
        self._relays: list[Relay] = []
        self.streams = rng.choice([1, 1, 2, 3]) if shape != "plain" and all(is_native) else 1
        pairs = [self.connect() for _ in range(self.streams)]
        self.lanes = [
            resumable(list(socks), is_native=native, dialler=index == 0, is_direct=not is_relayed, shape=shape)
            for index, (socks, native) in enumerate(zip(zip(*pairs, strict=True), is_native, strict=True))
        ]
        for lane in self.lanes:
            stack.callback(lane.close)
        stack.callback(self._end_relays)

    def _end_relays(self) -> None:
        for relay in self._relays:
            relay.end()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        if not self._is_relayed:
            return _connected()
        self._relays.append(Relay(self._rng))
        return self._relays[-1].near, self._relays[-1].far

    def pause(self) -> None:
        if self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0.0, 0.01))

    def tell(self) -> None:
        """Let an end tell the other one how much it has, as the control loop does behind relays."""
        stream = self._rng.randrange(self.streams)
        index = self._rng.randrange(2)
        assert self.lanes[1 - index].acknowledge(stream, self.lanes[index].received(stream))

    def disturb(self, stream: int) -> None:
        """End the relay of a connection, or nothing: then one is left that still works."""
        if self._is_relayed and self._rng.random() < 0.7:
            for relay in self._relays:
                if relay.near is self.lanes[0].sockets()[stream]:
                    relay.end()

    def resume(self, stream: int, is_frozen: threading.Event | None = None) -> None:
        """Replace a connection, in the order of the handshake; the first tries may get halfway only.

        `is_frozen` is set once one end moves nothing over the old connection.
        """
        first = self._rng.randrange(2)
        lanes = self.lanes[first], self.lanes[1 - first]
        while True:
            lanes[0].freeze(stream)
            if is_frozen is not None:
                is_frozen.set()
            self.pause()
            lanes[1].freeze(stream)
            positions = [0, lanes[1].leave(stream)]
            self.pause()
            if self._rng.random() < 0.8:
                break
        positions[0] = lanes[0].leave(stream)
        pair = self.connect()
        socks = pair if first == 0 else pair[::-1]
        for lane, sock, position in zip(lanes, socks, reversed(positions), strict=True):
            assert lane.attach(stream, sock, position, is_direct=not self._is_relayed)
            self.pause()
        self.push()

    def push(self) -> None:
        """Do what the control loop does for lanes whose operation may be over."""
        for lane in self.lanes:
            lane.push()
            if is_striped(lane):
                lane.tend()


def survive(is_native: tuple[bool, bool], seed: int, shape: str, *, is_relayed: bool, is_held: bool) -> int:
    """Move transfers both ways while connections end at any moment; return how often one was replaced.

    With `is_held` the transfers begin while the first one is being replaced.
    """
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        network = Network(stack, rng, is_native, shape, is_relayed=is_relayed)
        near, far = network.lanes
        dtype = rng.choice([None, np.dtype(np.uint32)])
        sizes = [rng.choice([0, 4, 2048, 2052, 70_000, rng.randrange(MIB) & ~3]) for _ in range(rng.randrange(4, 16))]
        sizes.append(rng.choice([0, 5 * MIB]))
        there, back = transfers(sizes, dtype, seed=1), transfers(sizes[::-1], dtype, seed=2)
        may_begin, is_over, replaced = threading.Event(), threading.Event(), 0

        def control() -> None:
            nonlocal replaced
            try:
                if is_held:
                    network.resume(rng.randrange(network.streams), may_begin)
                    replaced += 1
            finally:
                may_begin.set()
            while not is_over.is_set():
                network.pause()
                if is_relayed:
                    network.tell()
                stream = rng.randrange(network.streams)
                if replaced < 12 and rng.random() < 0.5:
                    network.disturb(stream)
                    network.pause()
                    network.resume(stream)
                    replaced += 1
                for each in {*near.broken(), *far.broken()}:
                    network.resume(each)
                network.push()

        def move() -> None:
            try:
                assert may_begin.wait(DEADLINE)
                in_parallel(moved(stack, near, there, back), moved(stack, far, back, there))
            finally:
                is_over.set()

        in_parallel(move, control)
        return replaced


@pytest.mark.parametrize(("lane", "is_relayed"), pairs(SHAPES, [False, True]), ids=str)
@pytest.mark.parametrize("batch", batches(10))
def test_connections_that_end_at_any_moment_cost_no_byte(
    lane: tuple[str, tuple[bool, bool]], is_relayed: bool, batch: int
) -> None:
    (shape, is_native), replaced = lane, 0

    @in_turn(seed=range(SEEDS_OF_A_BATCH * batch, SEEDS_OF_A_BATCH * (batch + 1)))
    def check(seed: int) -> None:
        nonlocal replaced
        count = survive(is_native, seed, shape, is_relayed=is_relayed, is_held=False)
        if not count:  # all bytes had arrived before a connection was ended, as they may again and again
            count = survive(is_native, seed, shape, is_relayed=is_relayed, is_held=True)
        assert count
        replaced += count

    check()
    assert replaced >= SEEDS_OF_A_BATCH


def lanes_over(
    stack: contextlib.ExitStack, is_native: tuple[bool, bool], shape: str, *, is_direct: bool = True
) -> tuple[Any, Any]:
    pair = _connected()
    made = [
        resumable([sock], is_native=native, dialler=index == 0, is_direct=is_direct, shape=shape)
        for index, (sock, native) in enumerate(zip(pair, is_native, strict=True))
    ]
    for lane in made:
        stack.callback(lane.close)
    return made[0], made[1]


@every_shape
def test_what_was_sent_arrives_though_its_sender_is_in_no_operation_when_the_path_dies(
    ends: contextlib.ExitStack, shape: str, is_native: tuple[bool, bool]
) -> None:
    near, far = lanes_over(ends, is_native, shape, is_direct=False)
    sent = transfers([4, 1000, 70_000])
    moved(ends, near, sent, [])()
    for lane in (near, far):  # the path swallows all of it
        lane.freeze(0)
        lane.sockets()[0].shutdown(socket.SHUT_RDWR)
    while far.sockets()[0].recv(MIB):
        pass
    assert far.leave(0) == 0
    near.leave(0)
    one, two = _connected()
    assert near.attach(0, one, 0, is_direct=True)
    assert far.attach(0, two, 0, is_direct=True)
    while near.push():
        time.sleep(0.001)
    moved(ends, far, [], sent)()


@every_shape
def test_a_lane_that_gets_no_connection_waits_until_it_is_told_to_end(
    ends: contextlib.ExitStack, shape: str, is_native: tuple[bool, bool]
) -> None:
    near, far = lanes_over(ends, is_native, shape, is_direct=False)
    near.sockets()[0].shutdown(socket.SHUT_RDWR)
    sent = transfers([2 * MIB])
    errors: list[str] = []

    def use(lane: Any, *what: Any) -> Callable[[], None]:
        move = moved(ends, lane, *what)

        def expect() -> None:
            with pytest.raises(LaneClosedError) as told:
                move()
            errors.append(str(told.value))

        return expect

    def control() -> None:
        until = time.monotonic() + DEADLINE
        while not (near.broken() == far.broken() == [0]):
            time.sleep(0.01)
            assert time.monotonic() < until
        assert errors == []
        for lane in (near, far):
            lane.end("there is no path")

    in_parallel(use(near, sent, []), use(far, [], sent), control)
    assert errors == ["there is no path"] * 2


@every_shape
def test_a_direct_connection_that_the_other_end_closes_ends_the_lane(
    ends: contextlib.ExitStack, shape: str, is_native: tuple[bool, bool]
) -> None:
    near, far = lanes_over(ends, is_native, shape)
    near.close()
    with pytest.raises(LaneClosedError, match="end of stream"):
        moved(ends, far, [], transfers([4]))()
    assert near.is_closed
    one, two = _connected()
    assert not near.attach(0, one, 0, is_direct=True)
    one.close()
    two.close()


@every_shape
def test_an_end_that_expects_what_is_not_kept_gets_nothing(
    ends: contextlib.ExitStack, shape: str, is_native: tuple[bool, bool]
) -> None:
    near, far = lanes_over(ends, is_native, shape, is_direct=False)
    first = transfers([5 * MIB])
    in_parallel(moved(ends, near, first, []), moved(ends, far, [], first))
    position = far.received(0)
    assert near.acknowledge(0, position)
    assert not near.acknowledge(0, position + 1)
    more = transfers([5 * MIB])
    in_parallel(moved(ends, near, more, []), moved(ends, far, [], more))
    assert near.acknowledge(0, far.received(0))
    near.freeze(0)
    near.leave(0)
    one, two = _connected()
    for impossible in (0, far.received(0) + 1, -1):
        assert not near.attach(0, one, impossible, is_direct=True)
    assert near.attach(0, one, far.received(0), is_direct=True)
    two.close()
