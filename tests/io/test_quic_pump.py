"""The pump of QUIC connections, with real sockets on loopback: behind its sockets everything is as with TCP."""

from __future__ import annotations

import contextlib
import queue
import random
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

pytest.importorskip("qh3")

from covey.net.quic.line import QuicSocket
from covey.net.quic.pump import QuicPump
from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = bytes(range(32))


class Admitting:
    """Accepts connections with the key, and proves them at once if asked to."""

    def __init__(self, *, proves: bool = True) -> None:
        self.came: queue.Queue[QuicSocket] = queue.Queue()
        self.proves, self.ips = proves, list[tuple[str, str]]()

    def door_keys(self) -> tuple[bytes, ...]:
        return (bytes(32), KEY)

    def comes(self, ip: str, local_ip: str) -> Callable[[], None] | None:
        self.ips.append((ip, local_ip))
        return lambda: None

    def take(self, sock: QuicSocket, proved: Callable[[], None]) -> None:
        if self.proves:
            proved()
        self.came.put(sock)


class Machines:
    """Two pumps, and the sockets between them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack, self.gates = stack, (Admitting(), Admitting())
        self.pumps = [QuicPump(gate, is_local=True) for gate in self.gates]
        for pump in self.pumps:
            stack.callback(pump.close)

    def connect(self) -> tuple[socket.socket, socket.socket]:
        one = self.pumps[0].dial(("127.0.0.1", self.pumps[1].port), KEY)
        other = self.gates[1].came.get(timeout=DEADLINE)
        for sock in (one, other):
            sock.settimeout(DEADLINE)
            self.stack.callback(sock.close)
        return one, other


@pytest.fixture
def machines() -> Iterator[Machines]:
    with contextlib.ExitStack() as stack:
        yield Machines(stack)


def read_all(sock: socket.socket) -> bytes:
    data = bytearray()
    while piece := sock.recv(1 << 16):
        data += piece
    return bytes(data)


def send_and_end(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def test_bytes_of_both_directions_arrive_whole_and_then_the_end(machines: Machines) -> None:
    chance = random.Random(5)
    ends = machines.connect()
    sources = [chance.randbytes(9 << 20), chance.randbytes(3 << 20)]
    threads = [threading.Thread(target=send_and_end, args=(end, data)) for end, data in zip(ends, sources, strict=True)]
    got: list[bytes] = [b"", b""]

    def read(index: int) -> None:
        got[1 - index] = read_all(ends[index])

    threads += [threading.Thread(target=read, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert got == sources
    assert machines.gates[1].ips == [("127.0.0.1", "127.0.0.1")]


def test_what_was_sent_before_both_were_closed_still_arrives(machines: Machines) -> None:
    one, other = machines.connect()
    data = random.Random(6).randbytes(1 << 20)

    def send_and_close() -> None:
        one.sendall(data)
        one.close()
        machines.pumps[0].close()

    thread = threading.Thread(target=send_and_close)
    thread.start()
    assert read_all(other) == data
    other.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_a_socket_that_is_not_read_holds_back_its_sender(machines: Machines) -> None:
    one, _other = machines.connect()
    one.setblocking(False)
    sent, until = 0, time.monotonic() + DEADLINE
    while select.select([], [one], [], 1.0)[1]:
        with contextlib.suppress(BlockingIOError):
            sent += one.send(bytes(1 << 16))
        assert sent < 32 << 20, "what is not read is not bounded"
        assert time.monotonic() < until


def test_a_closed_socket_ends_the_other_one(machines: Machines) -> None:
    one, other = machines.connect()
    other.close()
    assert one.recv(1) == b""
    with contextlib.suppress(OSError):
        one.sendall(bytes(1 << 20))


def test_connections_do_not_wait_for_each_other(machines: Machines) -> None:
    stuck, _ = machines.connect()
    stuck.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            stuck.send(bytes(1 << 16))
    one, other = machines.connect()
    one.sendall(b"ping")
    assert other.recv(4) == b"ping"


def test_where_nothing_listens_a_dial_ends_with_a_reason(machines: Machines) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        sock = machines.pumps[0].dial(silent.getsockname(), KEY)
        with sock:
            machines.pumps[0].close()
            sock.settimeout(DEADLINE)
            assert sock.recv(1) == b""
            assert "closed" in sock.problem


def test_a_failure_of_the_thread_ends_all_lanes_and_says_why(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = machines.connect()
    pump = machines.pumps[0]
    monkeypatch.setattr(pump, "_arrive", lambda *_: 1 / 0)
    assert one.recv(1) == b""
    assert isinstance(one, QuicSocket)
    assert "ZeroDivisionError" in one.problem
    with pytest.raises(ConnectionError, match="ZeroDivisionError"):
        pump.dial(("127.0.0.1", machines.pumps[1].port), KEY)


def test_an_acceptor_that_is_heard_from_another_address_is_followed_if_it_has_the_key(machines: Machines) -> None:
    """A machine of which only the address has changed answers there: what it sends comes from another port here."""
    one, other = machines.connect()
    one.sendall(b"before")
    assert other.recv(6) == b"before"
    dialler, acceptor = machines.pumps
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forwarder,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        for sock in (forwarder, stranger):
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(DEADLINE)
        (line,) = dialler._lines
        fake = b"\x40" + next(iter(line.ids)) + bytes(60)
        stranger.sendto(fake, ("127.0.0.1", dialler.port))
        assert quic.is_about_path(stranger.recv(2048)), "the address is asked for the key"
        stranger.sendto(quic.path_answer(bytes(32), bytes(16)), ("127.0.0.1", dialler.port))
        until = time.monotonic() + DEADLINE
        while dialler.moved == 0:
            assert time.monotonic() < until
            forwarder.sendto(fake, ("127.0.0.1", dialler.port))
            forwarder.settimeout(0.1)  # questions are rare
            try:
                question = forwarder.recv(2048)
            except TimeoutError:
                continue
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.settimeout(DEADLINE)
                asking.sendto(question, ("127.0.0.1", acceptor.port))
                answer = asking.recv(2048)
            forwarder.sendto(answer, ("127.0.0.1", dialler.port))
            time.sleep(0.01)
        assert line.remote[1] == forwarder.getsockname()[1]


def test_a_dial_that_is_given_up_leaves_nothing_behind(machines: Machines) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        machines.pumps[0].dial(silent.getsockname(), KEY).close()
        until = time.monotonic() + DEADLINE
        while machines.pumps[0]._lines:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_leaving_does_not_wait_for_an_end_that_has_everything_and_stays(machines: Machines) -> None:
    one, other = machines.connect()
    data = random.Random(7).randbytes(300_000)
    threading.Thread(target=send_and_end, args=(one, data)).start()
    assert read_all(other) == data
    one.close()
    machines.pumps[0].close()
    assert not machines.pumps[0]._thread.is_alive()
    assert other.recv(1) == b"", "and the other end is told"
