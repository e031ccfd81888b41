"""What the kernel tells about a connection: a receiver that does not read is not a path that is dead."""

from __future__ import annotations

import contextlib
import socket
import sys
import time

import pytest

from covey.net import tcp
from covey.net.tcp import STUCK_SECONDS, STUCK_TIMEOUTS, Acknowledgements

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


def test_a_path_is_dead_when_bytes_were_sent_again_and_again_and_nothing_came_back() -> None:
    assert Acknowledgements(STUCK_SECONDS, 3, STUCK_TIMEOUTS).is_stuck
    assert not Acknowledgements(3600.0, 0, 0).is_stuck, "an idle connection"
    assert not Acknowledgements(3600.0, 3, 0).is_stuck, "the first bytes after an hour"
    assert not Acknowledgements(STUCK_SECONDS / 2, 3, STUCK_TIMEOUTS).is_stuck


def test_a_receiver_that_does_not_read_is_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 20))
            time.sleep(STUCK_SECONDS + 0.5)
            known = tcp.acknowledgements(ours)
            assert known is not None
            assert not tcp.is_stuck(ours), known


def test_unix_sockets_have_no_such_news() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert tcp.acknowledgements(one) is None
        assert not tcp.is_stuck(one)
