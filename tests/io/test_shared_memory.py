"""Shared memory between two ranks: named by a descriptor that is passed on, and proved by what is read out of it."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from covey.base.errors import ConnectError
from covey.net.lanes import shm
from covey.runtime.members import lane_acceptor, lane_dialler

pytestmark = pytest.mark.skipif(not shm.usable(), reason="shared memory is for Linux on x86-64")


@pytest.mark.parametrize("is_honest", [True, False], ids=["reads it", "does not"])
def test_a_segment_is_named_by_a_descriptor_and_proved_by_what_is_in_it(is_honest: bool) -> None:
    """The end that gives the memory sees 32 bytes of its own come back, or hands over nothing."""
    nbytes = 1 << 16

    async def give(sock: socket.socket) -> None:
        descriptor, segment = shm.create(nbytes)
        try:
            await lane_dialler.hand_over(sock, descriptor, "", segment)
        finally:
            os.close(descriptor)

    async def take(sock: socket.socket) -> int:
        await lane_acceptor.readable(sock)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        segment = shm.attach(descriptors[0], nbytes)
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
