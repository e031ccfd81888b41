"""Shared memory between two ranks: named by a descriptor that is passed on, and proved by what is read out of it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.lane_pairs import opener_of
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.base.lane_kinds import LANE_KINDS
from covey.net.lanes import shm
from covey.net.lanes.ring import memory_bytes
from covey.runtime.joining.node import node_of
from covey.runtime.lanes.rings import readable
from covey.testing.threads import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    import covey

pytestmark = pytest.mark.skipif(not shm.has_memory(), reason="shared memory is for Linux and macOS")


@pytest.mark.parametrize("is_honest", [True, False], ids=["reads it", "does not"])
def test_a_segment_is_named_by_a_descriptor_and_proved_by_what_is_in_it(is_honest: bool) -> None:
    """The end that gives the memory sees 32 bytes of its own come back, or hands over nothing."""
    nbytes = 1 << 16

    async def give(sock: socket.socket) -> None:
        opener = opener_of(LANE_KINDS["shm"])
        memory = opener.prepare(nbytes)
        offer = messages.Offer(bytes(16), bytes(32), 1, "collectives", "shm", nbytes, 1, 0)
        try:
            lane = await opener.dialled(memory, [sock], offer, None)
            lane.close()
        finally:
            memory.release()

    async def take(sock: socket.socket) -> int:
        await readable(sock)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        segment = shm.attach(descriptors[0], memory_bytes(nbytes))
        word = bytes(memoryview(segment).cast("B")[-32:])
        assert any(word)
        await asyncio.get_running_loop().sock_sendall(sock, word if is_honest else bytes(32))
        return len(descriptors)

    async def both() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            given, taken = await asyncio.gather(give(ours), take(theirs), return_exceptions=True)
        assert taken == 1
        assert (given is None) if is_honest else isinstance(given, ConnectError)

    asyncio.run(both())


@pytest.mark.parametrize(
    ("system", "machine", "is_native", "works"),
    [
        ("linux", "x86_64", False, True),
        ("linux", "x86_64", True, True),
        ("linux", "aarch64", False, False),
        ("linux", "aarch64", True, True),
        ("darwin", "arm64", False, False),
        ("darwin", "arm64", True, True),
        ("darwin", "x86_64", False, True),
        ("freebsd14", "amd64", True, False),
    ],
)
def test_rings_need_descriptors_of_memory_and_stores_in_order_or_barriers(
    system: str, machine: str, is_native: bool, works: bool
) -> None:
    assert (shm.obstacle(system, machine, is_native=is_native) == "") is works


def test_a_segment_of_shm_open_has_no_name_and_is_seen_through_its_descriptor() -> None:
    """As on macOS, which has no memfd."""
    names = Path("/dev/shm")  # of Linux; macOS lists them nowhere
    before = set(names.glob("covey-*"))
    descriptor = shm.unlinked(1 << 16)
    try:
        assert set(names.glob("covey-*")) <= before
        assert os.get_inheritable(descriptor) is False
        with mmap.mmap(descriptor, 1 << 16) as ours, mmap.mmap(descriptor, 1 << 16) as theirs:
            ours[12345:12350] = b"covey"
            assert theirs[12345:12350] == b"covey"
    finally:
        os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has seals")
def test_a_segment_that_its_maker_could_shrink_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="another one arrived"):
        shm.attach(shm.unlinked(1 << 16), 1 << 16)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has seals")
def test_a_write_to_the_descriptor_of_a_segment_changes_no_byte_of_it() -> None:
    """As by a library whose file was closed, and whose number the segment has now, in either process."""
    nbytes = 1 << 16
    descriptor, ours = shm.create(nbytes)
    passed_on = os.dup(descriptor)
    with ours, shm.attach(os.dup(descriptor), nbytes) as theirs:
        for number in (descriptor, passed_on):
            with pytest.raises(PermissionError):
                os.write(number, b"a line of a log\n")
            os.close(number)
        assert theirs[:] == bytes(nbytes)


@pytest.mark.parametrize("unable", [0, 1])
def test_a_pair_with_an_end_that_has_no_rings_uses_a_unix_socket(unable: int) -> None:
    """Whichever end dials; the other pair keeps its rings, and all ranks run the same plan."""
    no_lane_is_open = threading.Barrier(3)

    def body(group: covey.Group) -> tuple[dict[int, str], list[float]]:
        node = node_of(group)
        assert node is not None
        if group.rank == unable:
            node.lanes.factory.ring_obstacle = shm.obstacle("linux", "aarch64", is_native=False)
        no_lane_is_open.wait(DEADLINE)
        x = np.arange(300_000.0) + group.rank
        group.all_reduce(x)
        return dict(group.lanes()), [x[0], x[-1]]

    lanes, sums = zip(*run_threads(3, body, lanes="auto"), strict=True)
    assert sums == ([3.0, 900_000.0],) * 3
    for rank, kinds in enumerate(lanes):
        expected = {peer: "unix" if unable in (rank, peer) else "shm" for peer in range(3) if peer != rank}
        assert kinds == expected
