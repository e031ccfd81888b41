"""The HTTP server: pages, bounds on what clients may send and how long they may take, and its end."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.runtime import http_server
from covey.runtime.http_server import CONNECTIONS, HttpServer, Request, Response, by_path, text
from covey.runtime.metrics.pages import stacks_page
from covey.runtime.tracebacks import stacks

if TYPE_CHECKING:
    from collections.abc import Iterator


def hello(request: Request) -> Response:
    return text(f"hello {request.path}, you accept {request.header('accept')!r}")


def fail(_request: Request) -> Response:
    raise ValueError("secret")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    pages = {"/hello": hello, "/fails": fail, "/stacks": lambda request: stacks_page(request, stacks)}
    with HttpServer(by_path(pages), 0) as server:
        yield server


def ask(server: HttpServer, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def say(server: HttpServer, *pieces: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while more := connection.recv(1 << 16):
            answer += more
        return answer


def test_pages_are_served_by_path_and_other_questions_are_refused(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    status, body, headers = ask(server, "GET", "/hello?a=b", Accept="text/plain")
    assert (status, body) == (200, "hello /hello, you accept 'text/plain'")
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    assert ask(server, "HEAD", "/hello")[:2] == (200, "")
    status, body, _ = ask(server, "GET", "/nothing")
    assert (status, body) == (404, "there is no page here; pages: /fails, /hello, /stacks\n")
    assert ask(server, "POST", "/hello")[0] == 405
    status, body, _ = ask(server, "GET", "/fails")
    assert (status, body) == (500, "ValueError\n")  # what it says is for the log only
    assert "secret" in caplog.text
    assert b" 400 " in say(server, b"\x16\x03\x01 no http\r\n\r\n").splitlines()[0]
    assert b" 400 " in say(server, b"GET /hello extra HTTP/1.1\r\n\r\n").splitlines()[0]


def test_slow_clients_and_long_requests_are_cut_off_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (http_server.CONNECTIONS, http_server.HEAD_LIMIT_BYTES, http_server.HTTP_REQUEST_SECONDS) == (8, 8192, 5.0)
    monkeypatch.setattr(http_server, "HTTP_REQUEST_SECONDS", 0.5)
    before = threading.active_count()
    with HttpServer(by_path({"/hello": hello}), 0) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 * CONNECTIONS)]
        try:
            idle[0].sendall(b"GET /hello HTTP/1.1\r\nX-Slow: ")
            assert ask(server, "GET", "/hello")[0] == 200  # after those before it were cut off
            assert threading.active_count() <= before + 1 + CONNECTIONS
            for connection in idle[:CONNECTIONS]:
                connection.settimeout(DEADLINE)
                assert connection.recv(100) == b""
        finally:
            for connection in idle:
                connection.close()
        long = say(server, b"GET /hello HTTP/1.1\r\nX: " + b"y" * (8192 - 24))
        assert b" 431 " in long.splitlines()[0]


def test_idle_connections_keep_nobody_out_and_the_oldest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HTTP_REQUEST_SECONDS", DEADLINE)  # none of them ends by itself
    with HttpServer(by_path({"/hello": hello}), 0) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), DEADLINE) for _ in range(3 * CONNECTIONS)]
        try:
            idle[-1].sendall(b"GET /hel")  # has begun, and is idle all the same
            for _ in range(CONNECTIONS - 1):
                assert ask(server, "GET", "/hello")[0] == 200
            for connection in idle[: 2 * CONNECTIONS + 1]:
                assert connection.recv(100) == b""
            idle[-1].sendall(b"lo HTTP/1.0\r\n\r\n")
            assert idle[-1].recv(100).startswith(b"HTTP/1.1 200 ")
        finally:
            for connection in idle:
                connection.close()


def test_connections_that_are_being_answered_are_not_ended_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HTTP_REQUEST_SECONDS", DEADLINE)
    asked, may_end = threading.Semaphore(0), threading.Event()

    def slow(_request: Request) -> Response:
        asked.release()
        assert may_end.wait(DEADLINE)
        return text("done")

    answers: list[int] = []
    with HttpServer(by_path({"/slow": slow, "/hello": hello}), 0) as server:
        busy = [
            threading.Thread(target=lambda: answers.append(ask(server, "GET", "/slow")[0])) for _ in range(CONNECTIONS)
        ]
        for thread in busy:
            thread.start()
        for _ in busy:
            assert asked.acquire(timeout=DEADLINE)
        waiting = threading.Thread(target=lambda: answers.append(ask(server, "HEAD", "/hello")[0]))
        waiting.start()
        may_end.set()
        for thread in (*busy, waiting):
            thread.join(DEADLINE)
    assert answers == [200] * (CONNECTIONS + 1)


def test_stacks_are_shown_to_this_machine_only(server: HttpServer) -> None:
    status, body, _ = ask(server, "GET", "/stacks")
    assert status == 200
    assert "test_stacks_are_shown_to_this_machine_only" in body
    for host in ("localhost:9100", "[::1]:9100", "127.0.0.1"):
        assert ask(server, "GET", "/stacks", Host=host)[0] == 200
    for host in ("evil.example", "evil.example:9100", "192.168.1.5", "[fe80::1]", "9100", ":9100", "[::1", "::1", "0"):
        assert ask(server, "GET", "/stacks", Host=host)[:2] == (403, "stacks are shown on this machine only\n")
    assert not http_server.is_loopback("192.168.1.5")
    assert http_server.is_loopback("::ffff:127.0.0.1")


@given(st.text(alphabet="019:[]%.abcflost", max_size=20))
@example("9100")
@example(":9100")
def test_a_host_is_this_machine_only_if_it_names_it(host: str) -> None:
    if http_server._is_here(host):
        name = urlsplit(f"//{host}").hostname
        assert not host or name == "localhost" or http_server.is_loopback(name or "")


def test_an_answer_that_has_begun_is_sent_before_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BEGUN_ANSWERS_SECONDS", DEADLINE)
    begun = threading.Event()

    def slow(_request: Request) -> Response:
        begun.set()
        time.sleep(0.3)
        return text("done")

    server = HttpServer(by_path({"/slow": slow}), 0)
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(ask(server, "GET", "/slow")[0]))
    client.start()
    assert begun.wait(DEADLINE)
    server.close()
    server.close()
    client.join(DEADLINE)
    assert answers == [200]
    with pytest.raises(OSError, match="refused"):
        ask(server, "GET", "/slow")
    with (
        HttpServer(by_path({}), 0) as other,
        pytest.raises(ConfigError, match=f"127.0.0.1:{other.port}: .*; use another port"),
    ):
        HttpServer(by_path({}), other.port)
