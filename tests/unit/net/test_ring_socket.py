"""Messages through shared memory: what a thread finds that polls while another one closes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from covey.net.lanes.message_sockets import RingSocket
from covey.net.lanes.ring import memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 4096


@pytest.fixture
def ring() -> Iterator[RingSocket]:
    mine, theirs = socket.socketpair()
    with theirs:
        made = RingSocket(bytearray(memory_bytes(CAPACITY)), CAPACITY, mine, first=True)
        made.park(sending=False)
        yield made
        made.close()


def test_a_thread_that_polled_a_ring_which_another_thread_closed_finds_it_ended(ring: RingSocket) -> None:
    ring.close()
    ring.unpark(is_rung=True)
    assert ring.is_ready(sending=False)  # to notice that it has ended
    with pytest.raises(BrokenPipeError):
        ring.sendmsg([b"x"])
