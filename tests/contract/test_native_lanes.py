"""Lanes of the compiled executor hold what every lane promises, with Python at the other end and with themselves."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from tests.contract import test_sealed_lanes as sealed
from tests.contract.test_lanes import End, Reader, carry_alone, whole_elements
from tests.support.compiled import needs_native
from tests.support.in_turn import in_turn
from tests.support.native_ends import PREFIX, NativeEnd, OtherHeaderError, StoppedError, in_parallel, transfers
from tests.support.sets import pairs
from tests.support.waiting import DEADLINE

from covey.net.host.machine import native_crypto
from covey.net.lanes import shm
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.ring import RingLane, memory_bytes
from covey.net.lanes.sealed import SealedLane
from covey.net.lanes.stream import StreamLane
from covey.wire.header import SMALL_BYTES, TRANSFER_HEADER_BYTES, flagged
from covey.wire.seal import DIALLER, NEXT_KEY, RECORD_OVERHEAD_BYTES, SEALED_RECORD_LIMIT, Sealer, lane_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs_native

KIB, MIB = 1 << 10, 1 << 20
SMALL = [0, 1, 63, 64, 65, 127, 128, 129, 1000, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 5000]
# Around the pieces of a ring, what a stream reads and sends at once, the chunks that are sealed, and records.
LIMITS = [1 << 16, 1 << 17, 1 << 18, 1 << 20, SEALED_RECORD_LIMIT]
LARGE = [*SMALL, *(limit + by for limit in LIMITS for by in (-64, -1, 0, 1)), 2 * SEALED_RECORD_LIMIT + 5]
REDUCED = [np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "complex128")]

Pair = tuple[Any, Any]


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def rings(capacity: int, kernel_copy: str = "auto") -> Callable[..., Pair]:
    def make(stack: contextlib.ExitStack, is_native: tuple[bool, bool]) -> Pair:
        memory = bytearray(memory_bytes(capacity))
        return ring_ends(stack, is_native, (memory, memory), capacity, kernel_copy)

    make.__name__ = f"ring_{capacity}_{kernel_copy}"
    return make


def shared_rings(stack: contextlib.ExitStack, is_native: tuple[bool, bool]) -> Pair:
    descriptor, segment = shm.create(memory_bytes(128 * KIB))
    attached = shm.attach(descriptor, memory_bytes(128 * KIB))
    return ring_ends(stack, is_native, (segment, attached), 128 * KIB)


def ring_ends(
    stack: contextlib.ExitStack,
    is_native: tuple[bool, bool],
    memories: tuple[Any, Any],
    capacity: int,
    kernel_copy: str = "auto",
) -> Pair:
    from covey.net.lanes.native import NativeRingLane

    made = []
    for index, doorbell in enumerate(socket.socketpair()):
        maker: Any = functools.partial(NativeRingLane, kernel_copy=kernel_copy) if is_native[index] else RingLane
        made.append(maker(memories[index], capacity, doorbell, first=index == 0, kind="memory"))
        stack.callback(made[-1].close)
    return made[0], made[1]


def streams(pairs: Callable[..., Any], kind: str) -> Callable[..., Pair]:
    def make(stack: contextlib.ExitStack, is_native: tuple[bool, bool]) -> Pair:
        from covey.net.lanes.native import NativeStreamLane

        made = []
        for index, (sock,) in enumerate(pairs(stack, 1)):
            made.append((NativeStreamLane if is_native[index] else StreamLane)(sock, kind))
            stack.callback(made[-1].close)
        return made[0], made[1]

    make.__name__ = f"{kind}_{pairs.__name__}"
    return make


def seals(pairs: Callable[..., Any], count: int, *, is_helped: bool, is_slow: bool) -> Callable[..., Pair]:
    """`is_helped`: a helper thread seals large transfers. `is_slow`: libcrypto is, so long records go to Python's."""

    def make(stack: contextlib.ExitStack, is_native: tuple[bool, bool]) -> Pair:
        made = []
        for index, socks in enumerate(pairs(stack, count)):
            made.append(sealed_end(stack, socks, is_native=is_native[index], dialler=index == 0, is_slow=is_slow))
            made[-1].has_idle_core = is_helped
        return made[0], made[1]

    make.__name__ = f"{'helped' if is_helped else 'sealed'}_{'slow_' if is_slow else ''}{count}_{pairs.__name__}"
    return make


def stripes(pairs: Callable[..., Any], count: int, *, is_slow: bool) -> Callable[..., Pair]:
    """As `seals`, for lanes over several networks."""

    def make(stack: contextlib.ExitStack, is_native: tuple[bool, bool]) -> Pair:
        from covey.net.lanes.native import NativeStripedLane

        assert all(is_native)
        made = []
        for index, socks in enumerate(pairs(stack, count)):
            with mock.patch("covey.net.lanes.native.has_slow_libcrypto", return_value=is_slow):
                made.append(NativeStripedLane(socks, sealed.SECRET, sealed.LANE, dialler=index == 0))
            stack.callback(made[-1].close)
        return made[0], made[1]

    make.__name__ = f"striped_{'slow_' if is_slow else ''}{count}_{pairs.__name__}"
    return make


def sealed_end(
    stack: contextlib.ExitStack, socks: Any, *, is_native: bool, dialler: bool, is_slow: bool | None = None
) -> Any:
    if is_native:
        from covey.net.lanes.native import NativeSealedLane

        if native_crypto():
            pytest.skip(native_crypto())
        slow = len(socks) > 1 if is_slow is None else is_slow
        with mock.patch("covey.net.lanes.native.has_slow_libcrypto", return_value=slow):
            lane: Any = NativeSealedLane(socks, sealed.SECRET, sealed.LANE, dialler=dialler)
    else:
        (sock,) = socks
        lane = SealedLane(sock, sealed.SECRET, sealed.LANE, dialler=dialler)
    stack.callback(lane.close)
    return lane


NARROW = [streams(sealed.narrow_pairs, "tcp"), seals(sealed.narrow_pairs, 1, is_helped=True, is_slow=False)]
WIDE = [
    streams(sealed.unix_pairs, "unix"),
    *(
        seals(sealed.unix_pairs, 1, is_helped=helped, is_slow=slow)
        for helped, slow in ((False, False), (True, False), (True, True))
    ),
]
SEVERAL_WIDE = [
    seals(sealed.unix_pairs, 3, is_helped=True, is_slow=False),
    stripes(sealed.unix_pairs, 3, is_slow=True),
]
SEVERAL = [
    *SEVERAL_WIDE,
    seals(sealed.narrow_pairs, 3, is_helped=False, is_slow=True),
    stripes(sealed.narrow_pairs, 2, is_slow=False),
]
"""Lanes with several connections, which only the compiled executor has."""
TINY = [rings(128), rings(256), rings(4 * KIB)]
RINGS = [
    rings(128 * KIB, "always"),
    rings(128 * KIB, "never"),
    rings(2 * MIB),
    *([] if shm.obstacle_here(is_native=True) else [shared_rings]),
]
ENDS = [(True, False), (False, True), (True, True)]
"""Which of the two ends the compiled executor moves."""
RECEIVING = [(False, True), (True, True)]


def cases(makers: list[Any], several: list[Any], ends: list[tuple[bool, bool]] = ENDS) -> list[Any]:
    """Return lanes with the executors at their ends, those with several connections too."""
    return [*pairs(makers, ends), *((make, (True, True)) for make in several)]


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def moved(stack: contextlib.ExitStack, lane: Any, *what: Any, itemsize: int = 1) -> Callable[[], None]:
    """Return what moves the transfers of one end, with whichever executor the lane is for."""
    if not hasattr(lane, "native"):
        end = End(lane, *what)
        return lambda: carry_alone(end)
    native_end = NativeEnd(lane, *what, itemsize=itemsize)
    stack.callback(native_end.close)
    return native_end.run


def exchange(
    stack: contextlib.ExitStack, pair: Pair, sizes: list[int], dtype: np.dtype[Any] | None, itemsize: int = 1
) -> None:
    sizes = [whole_elements(size, dtype) if dtype else size // itemsize * itemsize for size in sizes]
    there, back = transfers(sizes, dtype, seed=1), transfers(sizes[::-1], dtype, seed=2)
    near = moved(stack, pair[0], there, back, itemsize=itemsize)
    far = moved(stack, pair[1], back, there, itemsize=itemsize)
    in_parallel(near, far)


@pytest.mark.parametrize(("make", "is_native"), cases([*RINGS, *WIDE, *NARROW], SEVERAL), ids=name_of)
def test_payloads_of_every_size_are_stored_both_ways_at_once(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool]
) -> None:
    exchange(ends, make(ends, is_native), LARGE, None)


@pytest.mark.parametrize(("make", "is_native"), cases([*RINGS, *WIDE, *NARROW], SEVERAL, ENDS[::-1]), ids=name_of)
def test_payloads_of_every_size_are_reduced_both_ways_at_once(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool]
) -> None:
    dtype = REDUCED[(len(make.__name__) + 2 * is_native[0] + is_native[1]) % len(REDUCED)]
    exchange(ends, make(ends, is_native), LARGE, dtype)


@pytest.mark.parametrize(("make", "is_native"), cases([*TINY, *RINGS, *WIDE, *NARROW], SEVERAL), ids=name_of)
def test_elements_of_any_size_are_moved_through_next_to_no_room(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool]
) -> None:
    pair = make(ends, is_native)
    for itemsize in (1, 3, 7, 16, 24):
        exchange(ends, pair, SMALL, None, itemsize)
    for dtype in REDUCED:
        exchange(ends, pair, SMALL, dtype)


@pytest.mark.parametrize("seed", range(12))
def test_steps_in_any_order_give_the_same_bytes(ends: contextlib.ExitStack, seed: int) -> None:
    """Both ends take turns on one thread, so that a transfer is interrupted at every point."""
    rng = random.Random(seed)
    pair = rng.choice([*TINY, *RINGS, *WIDE, *NARROW, *SEVERAL])(ends, (True, True))
    dtype = rng.choice([None, *REDUCED])
    sizes = [whole_elements(rng.choice([*SMALL, rng.randrange(100_000)]), dtype) for _ in range(8)]
    there, back = transfers(sizes, dtype, seed=1), transfers(sizes[::-1], dtype, seed=2)
    near, far = NativeEnd(pair[0], there, back), NativeEnd(pair[1], back, there)
    turns = 0
    while not (near.done and far.done):
        end = rng.choice([each for each in (near, far) if not each.done])
        end.advance()
        turns += 1
        assert turns < 1_000_000, "the lanes are stuck"
    for end in (near, far):
        end.check()
        end.close()


@pytest.mark.parametrize(("make", "is_native"), cases([RINGS[0], *WIDE], SEVERAL_WIDE, RECEIVING), ids=name_of)
@pytest.mark.parametrize("nbytes", [0, 400, 100_000])
def test_another_header_than_expected_is_shown_with_its_bytes(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool], nbytes: int
) -> None:
    pair = make(ends, is_native)
    (sent,) = transfers([nbytes])
    (expected,) = transfers([nbytes + 8])
    sender = moved(ends, pair[0], [sent], [])
    receiver = NativeEnd(pair[1], [], [expected])
    ends.callback(receiver.close)

    def receive() -> None:
        with pytest.raises(OtherHeaderError) as told:
            receiver.run()
        assert told.value.args == (expected.header, sent.header)

    in_parallel(sender, receive)
    receiver.check_canaries()


@pytest.mark.parametrize("make", [RINGS[0], *WIDE], ids=lambda make: make.__name__)
def test_a_header_may_say_that_a_change_is_pending_and_nothing_else(ends: contextlib.ExitStack, make: Any) -> None:
    sent = transfers([0, 10, 5000])
    marked = [each._replace(header=flagged(each.header)) if move == 1 else each for move, each in enumerate(sent)]
    near, far = make(ends, (False, True))
    receiver = NativeEnd(far, [], sent)
    ends.callback(receiver.close)
    in_parallel(moved(ends, near, marked, []), receiver.run)
    assert receiver.runner.change_pending
    for at in range(TRANSFER_HEADER_BYTES):
        near, far = make(ends, (False, True))
        header = bytearray(sent[0].header)
        header[at] ^= 2
        receiver = NativeEnd(far, [], sent)
        ends.callback(receiver.close)
        carry_alone(End(near, [sent[0]._replace(header=bytes(header))], []))
        with pytest.raises(OtherHeaderError):
            receiver.run()


@pytest.mark.parametrize(("make", "is_native"), cases([*RINGS, *WIDE], SEVERAL_WIDE, RECEIVING), ids=name_of)
def test_everything_sent_before_a_close_is_received_and_then_the_end_is_told(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool]
) -> None:
    pair = make(ends, is_native)
    sent = transfers([0, 5, 20_000, 1])
    moved(ends, pair[0], sent, [])()
    pair[0].close()
    receiver = NativeEnd(pair[1], [], transfers([0, 5, 20_000, 1, 4]))
    ends.callback(receiver.close)
    with pytest.raises(LaneClosedError, match=r"end of stream|closed its doorbell"):
        receiver.run()
    assert np.array_equal(receiver.received[:-4], receiver.expected[:-4])


@pytest.mark.parametrize("make", [*RINGS, *WIDE, *SEVERAL], ids=lambda make: make.__name__)
def test_a_sender_whose_peer_closed_is_told(ends: contextlib.ExitStack, make: Any) -> None:
    pair = make(ends, (True, True))
    pair[1].close()
    sender = NativeEnd(pair[0], transfers([64 * MIB]), [])
    ends.callback(sender.close)
    with pytest.raises(LaneClosedError, match=r"\w"):
        sender.run()


@pytest.mark.parametrize("make", [*RINGS, *WIDE, *SEVERAL], ids=lambda make: make.__name__)
def test_a_lane_that_python_has_closed_cannot_move_and_does_not_crash(ends: contextlib.ExitStack, make: Any) -> None:
    pair = make(ends, (True, True))
    pair[0].close()
    pair[0].close()
    for sends, receives in ((transfers([64 * MIB]), []), ([], transfers([5]))):
        end = NativeEnd(pair[0], sends, receives)
        ends.callback(end.close)
        with contextlib.suppress(LaneClosedError, AssertionError):
            end.advance(0.2)
        assert not end.done


@pytest.mark.parametrize(("make", "is_native"), cases([*RINGS, *WIDE], SEVERAL_WIDE, RECEIVING), ids=name_of)
@pytest.mark.parametrize("nbytes", [0, 5, 100_000])
def test_the_header_that_comes_next_can_be_looked_at(
    ends: contextlib.ExitStack, make: Any, is_native: tuple[bool, bool], nbytes: int
) -> None:
    near, far = make(ends, is_native)
    assert far.peek() == b""
    (message,) = transfers([nbytes])
    if is_native[0]:
        native_end = NativeEnd(near, [message], [])
        ends.callback(native_end.close)
        native_end.advance()
    else:
        sender = End(near, [message], [])
        for _ in range(3):
            sender.send()
    assert far.peek() == message.header


@pytest.mark.parametrize("make", [*RINGS, *WIDE, *SEVERAL], ids=lambda make: make.__name__)
def test_the_stop_word_and_the_wake_descriptor_end_a_wait(ends: contextlib.ExitStack, make: Any) -> None:
    pair = make(ends, (True, True))
    for stop in ("wake_up", "stop"):
        end = NativeEnd(pair[0], [], transfers([100_000]))
        ends.callback(end.close)
        assert not end.advance()
        getattr(end.runner if stop == "stop" else end, stop)()
        with pytest.raises(StoppedError):
            end.advance(DEADLINE)


@pytest.mark.parametrize("make", SEVERAL, ids=lambda make: make.__name__)
def test_lanes_with_several_connections_check_all_of_a_header_and_take_the_news_of_a_change(
    ends: contextlib.ExitStack, make: Any
) -> None:
    sent = transfers([0, 10, 5000])

    def moving(prefix: bytes) -> tuple[NativeEnd, NativeEnd]:
        near, far = make(ends, (True, True))
        made = NativeEnd(near, sent, [], prefix=prefix), NativeEnd(far, [], sent)
        for end in made:
            ends.callback(end.close)
        return made

    sender, receiver = moving(flagged(PREFIX))
    in_parallel(sender.run, receiver.run)
    assert receiver.runner.change_pending
    for at in range(len(PREFIX)):
        prefix = bytearray(PREFIX)
        prefix[at] ^= 2
        sender, receiver = moving(bytes(prefix))
        sender.advance()
        with pytest.raises(OtherHeaderError):
            receiver.run()


# What a stranger on the wire does to records


UINT16 = np.dtype(np.uint16)
# Small payloads are stored and reduced; large ones take long, so they are stored from one stream and reduced from two.
STRANGER = [
    (count, alter, nbytes, dtype)
    for count in (1, 2)
    for alter in (*sealed.ALTERED, *sealed.ENDED, *(sealed.SPLICED if count > 1 else ()))
    for nbytes, dtype in ((1600, None), (1600, UINT16), (sealed.LARGE, None if count == 1 else UINT16))
]


@in_turn(case=STRANGER)
def test_altered_records_end_the_lane_and_change_no_number(case: tuple[int, Any, int, np.dtype[Any] | None]) -> None:
    with contextlib.ExitStack() as ends:
        alter_records(ends, *case)


def alter_records(ends: contextlib.ExitStack, count: int, alter: Any, nbytes: int, dtype: np.dtype[Any] | None) -> None:
    source, far = sealed.unix_pairs(ends, count)
    sent = transfers([nbytes] * (7 if nbytes < SEALED_RECORD_LIMIT else 2), dtype)
    records = sealed.sealed_records(sent, count)
    alter(records)
    receiver = NativeEnd(sealed_end(ends, far, is_native=True, dialler=False), [], sent)
    ends.callback(receiver.close)
    with pytest.raises(LaneClosedError) as told:
        feed(receiver, source, [b"".join(each) for each in records])
    assert ("end" if alter in sealed.ENDED else "altered on the way") in str(told.value)
    receiver.check_canaries()
    if dtype is not None:
        differs = np.flatnonzero(receiver.received != receiver.expected)
        assert differs.size, "an altered record was accepted"
        assert not receiver.received[differs[0] :].any(), "something was absorbed before it was verified"
    if count > 1:
        return
    # The Python lane says the same about the same bytes.
    source, far = sealed.unix_pairs(ends, count)
    readers = [Reader(each) for each in sent]
    with pytest.raises(LaneClosedError) as python:
        sealed.feed(sealed.acceptor(ends, far), source, [b"".join(each) for each in records], readers)
    assert str(told.value) == str(python.value)


def feed(receiver: NativeEnd, socks: list[socket.socket], wire: list[bytes]) -> None:
    """Put `wire` on the streams, end them, and receive until all is there or the lane has ended."""
    left = [memoryview(data) for data in wire]
    for _ in range(100_000):
        for stream, sock in enumerate(socks):
            with contextlib.suppress(BlockingIOError, OSError):
                while left[stream]:
                    left[stream] = left[stream][sock.send(left[stream]) :]
                sock.shutdown(socket.SHUT_WR)
        if receiver.advance():
            return
    raise AssertionError("the lane neither moves nor says why")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_records_on_the_streams_in_turn_are_sent_and_received(ends: contextlib.ExitStack, count: int) -> None:
    near, tap = sealed.unix_pairs(ends, count)
    source, far = sealed.unix_pairs(ends, count)
    sent = transfers([1600, 5 * SEALED_RECORD_LIMIT, 0, 7])
    records = sealed.sealed_records(sent, count)
    sender = NativeEnd(sealed_end(ends, near, is_native=True, dialler=True), sent, [])
    receiver = NativeEnd(sealed_end(ends, far, is_native=True, dialler=False), [], sent)
    ends.callback(sender.close)
    ends.callback(receiver.close)
    wire = [bytearray() for _ in tap]
    while not sender.advance():
        sealed.drain(tap, wire)
    sealed.drain(tap, wire)
    assert [sealed.split(data) for data in wire] == records
    feed(receiver, source, [b"".join(each) for each in records])
    receiver.check()


@pytest.mark.parametrize("lengths", [[63], [65], [64, 4097], [64, 4095, 1], [64 + 4096]])
def test_a_peer_that_cuts_its_payload_otherwise_is_refused(ends: contextlib.ExitStack, lengths: list[int]) -> None:
    (raw,), far = sealed.unix_pairs(ends, 1)
    (message,) = transfers([4096])
    plain = message.header + message.payload.tobytes() + bytes(5000)
    sealer = Sealer(lane_keys(sealed.SECRET, sealed.LANE, 0)[DIALLER], sealed.LANE, 0, DIALLER)
    for length in lengths:
        record = memoryview(bytearray(length + RECORD_OVERHEAD_BYTES))
        sealer.seal(plain[:length], record)
        plain = plain[length:]
        raw.sendall(record)
    receiver = NativeEnd(sealed_end(ends, far, is_native=True, dialler=False), [], [message])
    ends.callback(receiver.close)
    with pytest.raises(LaneClosedError, match="altered on the way"):
        feed(receiver, [raw], [b""])
    assert not receiver.received.any()


@pytest.mark.parametrize("count", [1, 3])
def test_keys_that_the_other_end_changes_are_followed(ends: contextlib.ExitStack, count: int) -> None:
    source, far = sealed.unix_pairs(ends, count)
    sent = transfers([5000, 70_000, 10, 3 * SEALED_RECORD_LIMIT])
    receiver = NativeEnd(sealed_end(ends, far, is_native=True, dialler=False), [], sent)
    ends.callback(receiver.close)
    feed(receiver, source, [b"".join(each) for each in sealed.sealed_records(sent, count, renews=True)])
    receiver.check()


def test_a_claimed_change_of_key_is_refused(ends: contextlib.ExitStack) -> None:
    source, far = sealed.unix_pairs(ends, 1)
    sent = transfers([100])
    ((record,),) = sealed.sealed_records(sent)
    length = int.from_bytes(record[:4], "little") | NEXT_KEY
    receiver = NativeEnd(sealed_end(ends, far, is_native=True, dialler=False), [], sent)
    ends.callback(receiver.close)
    with pytest.raises(LaneClosedError, match="altered on the way: record 0 of stream 0"):
        feed(receiver, source, [length.to_bytes(4, "little") + record[4:]])


@pytest.mark.parametrize("make", [RINGS[0], *WIDE, *SEVERAL], ids=lambda make: make.__name__)
def test_a_lane_that_is_closed_while_a_thread_uses_it_keeps_its_descriptors_until_the_thread_has_left(
    ends: contextlib.ExitStack, make: Any
) -> None:
    """Else the thread might write into another file, which has got the same number."""
    made = contextlib.ExitStack()  # in which `near` would be closed a third time
    near, far = make(made, (True, True))
    made.pop_all()
    ends.callback(far.close)
    waiting, late = NativeEnd(near, [], transfers([10])), NativeEnd(far, [], transfers([10]))
    ends.callback(late.close)
    numbers = [sock.fileno() for sock in near.sockets()] if hasattr(near, "sockets") else [near.fileno()]

    def wait() -> None:
        with pytest.raises((StoppedError, LaneClosedError)):
            waiting.advance(DEADLINE)

    def close() -> None:
        while not waiting.runner.is_running:
            time.sleep(0.001)
        near.close()
        for number in numbers:
            os.fstat(number)
        near.close()
        with pytest.raises(LaneClosedError):  # the other end is told at once
            late.advance(DEADLINE)

    in_parallel(wait, close)
    waiting.close()
    del near.native
    for number in numbers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
