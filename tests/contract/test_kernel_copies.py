"""Transfers that the kernel copies between processes: complete when they were read, and not changed before."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.contract.test_native_lanes import KIB, MIB, Pair, ring_ends, rings
from tests.support.compiled import needs_native
from tests.support.native_ends import NativeEnd, OtherHeaderError, transfers
from tests.support.waiting import DEADLINE

from covey.net.lanes import shm
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.ring import CONTROL_BYTES, memory_bytes
from covey.wire.header import TRANSFER_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a call")
pytestmark = [needs_native, needs_linux]

ADDRESS_AT = TRANSFER_HEADER_BYTES - 8
SIZES = [300_000, 3 * MIB + 7]


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def acquainted(stack: contextlib.ExitStack, memory: Any = None) -> Pair:
    """Return a pair whose ends have found that they can read each other."""
    memory = bytearray(memory_bytes(128 * KIB)) if memory is None else memory
    pair = ring_ends(stack, (True, True), (memory, memory), 128 * KIB, "always")
    swap(stack, pair, [0])
    return pair


def swap(stack: contextlib.ExitStack, pair: Pair, sizes: list[int]) -> None:
    """Move transfers both ways, by turns on one thread."""
    there, back = transfers(sizes, seed=3), transfers(sizes, seed=4)
    near, far = started(stack, pair[0], there, back), started(stack, pair[1], back, there)
    for _ in range(1000):
        if near.advance() & far.advance():
            near.check()
            far.check()
            return
    pytest.fail("the lanes are stuck")


def started(stack: contextlib.ExitStack, lane: Any, sends: Any, recvs: Any) -> NativeEnd:
    end = NativeEnd(lane, sends, recvs)
    stack.callback(end.close)
    return end


def copies(pair: Pair) -> tuple[int, int]:
    return pair[0].native.kernel_copies, pair[1].native.kernel_copies


def test_large_transfers_are_copied_by_the_kernel_once_both_ends_have_found_that_it_can(
    ends: contextlib.ExitStack,
) -> None:
    pair = acquainted(ends)
    assert copies(pair) == (0, 0)
    swap(ends, pair, [*SIZES, 200_000])
    assert copies(pair) == (2, 2), "200,000 bytes are not worth it"


def test_an_end_that_does_not_want_it_gets_and_sends_no_addresses(ends: contextlib.ExitStack) -> None:
    pair = rings(128 * KIB, "never")(ends, (True, True))
    for _ in range(2):
        swap(ends, pair, SIZES)
    assert copies(pair) == (0, 0)


def test_both_ways_are_measured_and_the_slower_one_is_tried_again(ends: contextlib.ExitStack) -> None:
    pair = rings(512 * KIB, "auto")(ends, (True, True))
    swap(ends, pair, [MIB] * 9)
    before = copies(pair)
    assert all(3 <= count <= 5 for count in before), "at first both ways are tried in turn"
    swap(ends, pair, [MIB] * 64)  # the compiled executor measures the slower way again after as many
    for first, last in zip(before, copies(pair), strict=True):
        assert 1 <= last - first < 64, "one of the two ways was never tried again"


def test_a_transfer_is_sent_when_it_was_read_and_not_before(ends: contextlib.ExitStack) -> None:
    pair = acquainted(ends)
    sent = transfers([MIB])
    near, far = started(ends, pair[0], sent, []), started(ends, pair[1], [], sent)
    for _ in range(3):
        assert not near.advance()
    assert far.advance(DEADLINE)
    assert near.advance(DEADLINE)
    far.check()


def test_what_the_sender_has_withdrawn_is_never_received(ends: contextlib.ExitStack) -> None:
    """The sender gives up in the middle, as at a deadline or a revocation, and its program reuses the memory."""
    pair = acquainted(ends)
    sent = transfers([3 * MIB])
    near, far = started(ends, pair[0], sent, []), started(ends, pair[1], [], sent)
    assert not near.advance()
    near.runner.finish()
    near.overwrite()
    for _ in range(3):
        assert not far.advance()
    assert far.runner.applied == 0
    assert not far.received.any(), "memory was copied that the sender had taken back"
    pair[0].close()
    with pytest.raises(LaneClosedError):
        far.advance(DEADLINE)


def connected_by(child: Callable[[socket.socket], None]) -> tuple[socket.socket, int]:
    """Fork a process that connects to this one, and calls `child` with its end; return ours, and the process.

    The kernel tells each end which process listened, or connected.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # to a free name without a file
        listener.listen(1)
        process = os.fork()
        if not process:
            with contextlib.suppress(BaseException):
                bell = socket.socket(socket.AF_UNIX)
                bell.connect(listener.getsockname())
                child(bell)
            os._exit(1)
        return listener.accept()[0], process


def kill(process: int) -> int:
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def test_a_sender_that_dies_in_the_middle_ends_the_lane(ends: contextlib.ExitStack) -> None:
    from covey.net.lanes.native import NativeRingLane

    descriptor, segment = shm.create(memory_bytes(128 * KIB))
    ends.callback(os.close, descriptor)
    sent = transfers([MIB])

    def send(bell: socket.socket) -> None:
        lane = NativeRingLane(segment, 128 * KIB, bell, first=True, kind="shm", kernel_copy="always")
        with contextlib.ExitStack() as stack:
            started(stack, lane, transfers([0]), transfers([0])).advance(DEADLINE)
            started(stack, lane, sent, []).advance(DEADLINE)

    bell, process = connected_by(send)
    lane = NativeRingLane(segment, 128 * KIB, bell, first=False, kind="shm", kernel_copy="always")
    ends.callback(lane.close)
    started(ends, lane, transfers([0]), transfers([0])).run()
    while not any(lane.native.peek()):
        time.sleep(0.001)
    assert kill(process) == signal.SIGKILL, "the sender did not wait until its memory was read"
    with pytest.raises(LaneClosedError, match=r"exited|closed its doorbell"):
        started(ends, lane, [], sent).advance(DEADLINE)
    assert lane.native.kernel_copies == 0


def test_no_other_process_is_read_than_the_one_that_the_kernel_names(ends: contextlib.ExitStack) -> None:
    """An end that got its connection from another process cannot make its peer read a third one."""
    from covey.net.lanes.native import NativeRingLane

    ours, theirs = socket.socketpair()

    def hand_over(bell: socket.socket) -> None:
        socket.send_fds(theirs, [b"\0"], [bell.fileno()])
        time.sleep(DEADLINE)

    bell, process = connected_by(hand_over)
    ends.callback(kill, process)
    with ours, theirs:
        other = socket.socket(fileno=socket.recv_fds(ours, 1, 1)[1][0])
    memory = bytearray(memory_bytes(128 * KIB))
    pair = [
        NativeRingLane(memory, 128 * KIB, doorbell, first=doorbell is bell, kind="memory", kernel_copy="always")
        for doorbell in (bell, other)
    ]
    for lane in pair:
        ends.callback(lane.close)
    for sizes in ([0], SIZES):
        swap(ends, (pair[0], pair[1]), sizes)
    assert pair[0].native.kernel_copies == 0, "it read the process that connected, which is not the sender"
    assert pair[1].native.kernel_copies == 2, "the kernel names the sender, which listened"


@pytest.mark.parametrize("address", [0x1000, (1 << 64) - 64])
def test_memory_that_the_kernel_cannot_read_comes_through_the_ring(ends: contextlib.ExitStack, address: int) -> None:
    """Such as memory of a device; and a peer may send any number as an address."""
    memory = bytearray(memory_bytes(128 * KIB))
    pair = acquainted(ends, memory)
    sent = transfers([MIB, MIB + 5])
    near, far = started(ends, pair[0], sent, []), started(ends, pair[1], [], sent)
    assert not near.advance()
    struct.pack_into("<Q", memory, CONTROL_BYTES + TRANSFER_HEADER_BYTES + ADDRESS_AT, address)
    for _ in range(1000):
        if near.advance() & far.advance():
            break
    far.check()
    assert copies(pair) == (0, 0), "an end that was told wrong asks again"


def test_an_address_that_was_not_asked_for_is_another_header(ends: contextlib.ExitStack) -> None:
    memory = bytearray(memory_bytes(128 * KIB))
    pair = acquainted(ends, memory)
    sent = transfers([1000])
    near, far = started(ends, pair[0], sent, []), started(ends, pair[1], [], sent)
    assert near.advance()
    struct.pack_into("<Q", memory, CONTROL_BYTES + TRANSFER_HEADER_BYTES + ADDRESS_AT, 0x1000)
    with pytest.raises(OtherHeaderError):
        far.advance(DEADLINE)
    far.check_canaries()


def test_an_address_does_not_hide_that_the_header_is_another(ends: contextlib.ExitStack) -> None:
    pair = acquainted(ends)
    (sent,), (expected,) = transfers([MIB]), transfers([MIB + 8])
    near, far = started(ends, pair[0], [sent], []), started(ends, pair[1], [], [expected])
    assert not near.advance()
    with pytest.raises(OtherHeaderError) as raised:
        far.advance(DEADLINE)
    assert raised.value.args == (expected.header, sent.header)
    assert np.array_equal(np.frombuffer(far.lane.peek(), np.uint8), np.frombuffer(sent.header, np.uint8))
