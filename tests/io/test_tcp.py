"""What the kernel tells about a connection: a receiver that does not read is not a path that is dead."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.compiled import needs_compiler, shared_library

from covey.net.host import tcp
from covey.net.host.tcp import STUCK_SENDER_SECONDS, STUCK_TIMEOUTS, Acknowledgements

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


def after(timeouts: int, first: float, idle: float = 0.0) -> Acknowledgements:
    """Return what the kernel tells right after so many timeouts of bytes that it sent when it had been idle."""
    return Acknowledgements(idle + first * (2**timeouts - 1), 3, timeouts, first * 2**timeouts)


def test_a_path_is_dead_when_bytes_were_sent_again_and_again_and_nothing_came_back() -> None:
    assert Acknowledgements(STUCK_SENDER_SECONDS, 3, STUCK_TIMEOUTS, 1.6).is_stuck
    assert not Acknowledgements(3600.0, 0, 0, 0.2).is_stuck, "an idle connection"
    held_back = Acknowledgements(STUCK_SENDER_SECONDS, 0, 0, 1.6, unsent=1000, probes=STUCK_TIMEOUTS)
    assert held_back.is_stuck, "the interface is gone, or this machine's firewall drops the packets"
    assert not held_back._replace(unsent=0).is_stuck
    assert not held_back._replace(probes=0).is_stuck, "the receiver does not read, and answers probes"
    assert not Acknowledgements(3600.0, 3, 0, 0.2).is_stuck, "the first bytes after an hour"
    assert not Acknowledgements(STUCK_SENDER_SECONDS / 2, 3, STUCK_TIMEOUTS, 1.6).is_stuck


@pytest.mark.parametrize("first", [0.2, 0.3, 0.5, 0.6, 0.7, 1.0, 1.3, 1.6])
def test_a_dead_path_is_known_in_five_seconds_although_it_was_slow_before(first: float) -> None:
    """Timeouts begin with three times the round trip, and more if that varies."""
    stuck = next(count for count in range(1, 10) if after(count, first).is_stuck)
    assert after(stuck, first).seconds_ago < 5.0
    assert not after(1, first, idle=3600.0).is_stuck, "one packet was lost"


class Silent:
    """A connection whose bytes were sent so many times, and whose other end has not acknowledged them."""

    family = socket.AF_INET

    def __init__(self, timeouts: int, unacknowledged: int = 3) -> None:
        self._info = bytearray(176)
        self._info[2] = timeouts
        self._info[24:28] = unacknowledged.to_bytes(4, sys.byteorder)

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        return bytes(self._info)


def test_one_timeout_is_enough_if_the_other_machine_is_reached_over_another_network() -> None:
    assert tcp.is_stuck(Silent(1), has_moved=True)
    assert not tcp.is_stuck(Silent(1))
    assert not tcp.is_stuck(Silent(0), has_moved=True), "what was just sent"
    assert not tcp.is_stuck(Silent(1, 0), has_moved=True), "an idle connection"


def test_the_kernel_tells_timeouts_in_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.sendall(b"word")
            assert theirs.recv(4) == b"word"
            known = tcp.acknowledgements(ours)
            assert known is not None
            assert (known.timeouts, known.timed_out_seconds) == (0, 0.0)
            assert 0.1 < known.next_timeout < 2.0, "200 ms is the least that Linux waits"


def test_a_receiver_that_does_not_read_is_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 20))
            time.sleep(STUCK_SENDER_SECONDS + 0.5)
            known = tcp.acknowledgements(ours)
            assert known is not None
            assert not tcp.is_stuck(ours), known
            (_, raw), flow = tcp.path_facts(ours)[:2], tcp.flow(ours)  # type: ignore[index]
            assert flow is not None
            assert raw > STUCK_SENDER_SECONDS * 1e6
            assert flow[1] < raw / 2, "the network does not hold up what the receiver has no room for"


def test_unix_sockets_have_no_such_news() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert tcp.acknowledgements(one) is None
        assert not tcp.is_stuck(one)


def test_the_kernel_spaces_out_what_is_sent_and_tells_how_much_arrived() -> None:
    rate, free = 400_000, 10 * 65536  # what TCP sends on loopback before it knows a round trip
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        tcp.pace(near, rate)
        near.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 2 << 20:
                sent += near.send(bytes(1 << 16))
        arrived, began = 0, time.monotonic()
        while time.monotonic() < began + 1.0 or arrived <= free / 2:
            if select.select([far], [], [], 0.1)[0]:
                arrived += len(far.recv(1 << 16))
        assert free / 2 < arrived < free + 1.5 * rate * (time.monotonic() - began)
        known = tcp.progress(near)
        assert known is not None
        assert 0 < known.acknowledged < sent
        assert known.is_sending
    assert tcp.progress(near) is None


OFFSETS = """
#include <linux/tcp.h>
#include <stddef.h>
#define FIELD(name) (int)offsetof(struct tcp_info, tcpi_##name)
__attribute__((visibility("default"))) int offsets[] = {
    FIELD(probes), FIELD(rto), FIELD(last_ack_recv), FIELD(bytes_acked),
    FIELD(busy_time), FIELD(bytes_acked), FIELD(notsent_bytes), FIELD(bytes_received), FIELD(min_rtt),
    FIELD(total_retrans), FIELD(segs_out), FIELD(rwnd_limited),
};
"""


@needs_compiler
def test_fields_are_where_the_kernel_has_them(tmp_path: Path) -> None:
    """Each form skips to its fields: the offset of the last one is its size without the field."""
    library = ctypes.CDLL(str(shared_library(tmp_path, OFFSETS)))
    expected = list((ctypes.c_int * 12).in_dll(library, "offsets"))
    byte, word, long_word = 1, 4, 8
    found = [
        tcp._TIMEOUTS_AND_PROBES.size - byte,
        tcp._NEXT_TIMEOUT.size - word,
        tcp._LAST_ACK.size - word,
        tcp._ACKED_AND_BUSY.size - 2 * long_word - 40,
        tcp._ACKED_AND_BUSY.size - long_word,
        tcp._ACKED_AND_UNSENT.size - word - 16 - long_word,
        tcp._ACKED_AND_UNSENT.size - word,
        tcp._RECEIVED.size - long_word,
        tcp._LEAST_ROUND_TRIP.size - word,
        tcp._RETRANSMITTED.size - 2 * word - 32,
        tcp._RETRANSMITTED.size - word,
        tcp._ACKED_BUSY_AND_BLOCKED.size - long_word,
    ]
    assert found == expected
    assert tcp._ACKED_BUSY_AND_BLOCKED.size <= tcp._INFO_BYTES
