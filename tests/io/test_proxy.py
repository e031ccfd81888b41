"""The proxy that tests put between two nodes does what its controls say, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE

from covey.testing import proxy as proxy_module
from covey.testing.proxy import Direction, Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = bytes(range(1, 251)) * 40


class Echo:
    """A server that answers every byte with 255 less that byte, so that directions differ; it keeps a record."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self.ended: list[str] = []
        self.news = threading.Condition()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.threads = [threading.Thread(target=self.accept, daemon=True)]
        self.threads[0].start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self.heard.append(bytearray())
                self.ended.append("")
                thread = threading.Thread(target=self.serve, args=(sock, len(self.heard) - 1), daemon=True)
                self.threads.append(thread)
                thread.start()

    def serve(self, sock: socket.socket, number: int) -> None:
        end = "closed"
        with sock:
            try:
                while data := sock.recv(4096):
                    with self.news:
                        self.heard[number] += data
                        self.news.notify_all()
                    sock.sendall(answer(data))
            except ConnectionError:
                end = "reset"
        with self.news:
            self.ended[number] = end
            self.news.notify_all()

    def end_of(self, number: int) -> str:
        with self.news:
            assert self.news.wait_for(lambda: len(self.ended) > number and bool(self.ended[number]), DEADLINE)
        return self.ended[number]

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(DEADLINE)
        assert not any(thread.is_alive() for thread in self.threads)


def answer(data: bytes) -> bytes:
    return bytes(255 - byte for byte in data)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.listener.getsockname()) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with dial(proxy) as sock:
        yield sock


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=DEADLINE)


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := sock.recv(size - len(data))):
        data += more
    return data


def ask(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    return read(sock, len(data))


def test_bytes_pass_unchanged_both_ways_and_are_recorded_by_connection(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, TEXT) == answer(TEXT)
    with dial(proxy) as second:
        assert ask(second, b"second") == answer(b"second")
    assert proxy.connections() == 2
    assert [proxy.recorded(0, way) for way in Direction] == [TEXT, answer(TEXT)]
    assert [proxy.recorded(1, way) for way in Direction] == [b"second", answer(b"second")]


def test_the_end_of_one_direction_is_passed_on_while_the_other_still_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()) as proxy:
        listener.settimeout(DEADLINE)
        with dial(proxy) as client:
            client.sendall(b"question")
            client.shutdown(socket.SHUT_WR)
            server, _ = listener.accept()
            with server:
                server.settimeout(DEADLINE)
                assert read(server, 100) == b"question"
                server.sendall(b"answer")
            assert read(client, 100) == b"answer"


def test_a_delay_is_felt_once_each_way_and_not_once_a_chunk(
    proxy: Proxy, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, delays = proxy_module._ProxyPipe.put, list[float]()

    def note(pipe: Any, data: bytes, now: float, **limits: float) -> None:
        put(pipe, data, now, **limits)
        delays.append(pipe.queue[-1][0] - now)

    monkeypatch.setattr(proxy_module._ProxyPipe, "put", note)
    proxy.delay = 0.1
    start = time.monotonic()
    assert ask(client, TEXT * 30) == answer(TEXT * 30)  # 300 kB: many chunks
    assert time.monotonic() - start >= 0.2
    assert len(delays) >= 10
    assert max(delays) < 0.11, "no chunk waits for the delay of another one"


def test_bandwidth_is_limited_each_way(proxy: Proxy, client: socket.socket) -> None:
    proxy.bytes_per_second = 100_000
    start = time.monotonic()
    assert ask(client, TEXT * 3) == answer(TEXT * 3)
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("byte", [0, 5_432, len(TEXT) - 1])
def test_one_bit_of_one_byte_of_one_direction_is_flipped(
    proxy: Proxy, client: socket.socket, echo: Echo, way: Direction, byte: int
) -> None:
    proxy.flip_bit(way, byte, bit=3)
    got = ask(client, TEXT)
    flipped = bytearray(TEXT if way is Direction.TO_TARGET else answer(TEXT))
    flipped[byte] ^= 8
    assert proxy.flips_done == 1
    assert echo.heard[0] == (flipped if way is Direction.TO_TARGET else TEXT)
    assert got == (answer(bytes(flipped)) if way is Direction.TO_TARGET else flipped)


def test_what_is_held_is_neither_accepted_nor_forwarded_and_comes_when_resumed(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    assert ask(client, b"before") == answer(b"before")
    proxy.hold()
    client.sendall(b"while held")
    with dial(proxy) as late:
        late.sendall(b"late")
        assert proxy.connections() == 1
        assert echo.heard == [b"before"]
        proxy.resume()
        assert read(client, 10) == answer(b"while held")
        assert read(late, 4) == answer(b"late")


def test_what_is_swallowed_is_taken_and_not_passed_on(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    client.sendall(TEXT[:100])
    assert client.recv(100, socket.MSG_WAITALL) == bytes(255 - byte for byte in TEXT[:100])
    proxy.swallow(Direction.TO_TARGET)
    client.sendall(TEXT)
    while len(proxy.recorded(0, Direction.TO_TARGET)) < 100 + len(TEXT):
        time.sleep(0.001)
    assert bytes(echo.heard[0]) == TEXT[:100]
    with dial(proxy) as another:
        another.sendall(TEXT[:10])
        assert another.recv(10, socket.MSG_WAITALL) == bytes(255 - byte for byte in TEXT[:10]), "later ones pass"


def test_all_connections_can_be_ended_in_order(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert ask(client, TEXT) == answer(TEXT)
    assert proxy.end_all() == 1
    assert client.recv(1) == b""
    assert echo.end_of(0) == "closed"
    assert proxy.end_all() == 0
    with dial(proxy) as again:
        assert ask(again, TEXT) == answer(TEXT)


def test_all_connections_can_be_reset(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert ask(client, TEXT) == answer(TEXT)
    assert proxy.end_all(reset=True) == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.end_of(0) == "reset"


@pytest.mark.parametrize("size", [0, 1, 4_321])
def test_a_truncated_direction_brings_so_many_bytes_and_then_the_end(
    proxy: Proxy, client: socket.socket, echo: Echo, size: int
) -> None:
    proxy.truncate(Direction.TO_TARGET, size)
    client.sendall(TEXT)
    echo.end_of(0)
    assert echo.heard[0] == TEXT[:size]
    with contextlib.suppress(ConnectionResetError):  # which end it is depends on what was still on its way
        while client.recv(4096):
            pass


def test_an_earlier_connection_is_replayed_to_the_target(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    ask(client, TEXT)
    with proxy.replay(0) as again:
        assert read(again, len(TEXT)) == answer(TEXT)
    assert echo.end_of(1) == "closed"
    assert echo.heard == [TEXT, TEXT]


def test_recorded_bytes_are_put_into_a_living_connection_a_second_time(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    ask(client, b"first, ")
    proxy.inject(0, Direction.TO_TARGET, proxy.recorded(0, Direction.TO_TARGET)[:3])
    assert read(client, 3) == answer(b"fir")
    assert ask(client, b"last") == answer(b"last")
    assert echo.heard[0] == b"first, firlast"
    proxy.inject(0, Direction.TO_CLIENT, b"forged")
    assert read(client, 6) == b"forged"


def test_a_client_of_a_target_that_is_not_there_is_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with Proxy(address) as proxy, dial(proxy) as client:
        assert client.recv(1) == b""
        assert proxy.connections() == 0
