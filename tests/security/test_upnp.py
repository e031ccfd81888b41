"""A hostile router that speaks UPnP, and machines that pretend to be the router."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.net.router import port_mapping, upnp
from covey.net.router.port_mapping import ask_gateway
from covey.net.router.upnp import SEARCH_ANSWERS_LIMIT, UpnpPort, read_http
from covey.testing.gateway import GatewayThread
from covey.wire.upnp import MOST_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

NONCE = bytes(range(12))
BOMB = (
    b'<?xml version="1.0"?><!DOCTYPE r [<!ENTITY a "aaaaaaaaaa">'
    + b"".join(b'<!ENTITY %c "%s">' % (98 + i, b"&%c;" % (97 + i) * 10) for i in range(9))
    + b"]><r>&j;</r>"
)
KIND = "urn:schemas-upnp-org:service:WANIPConnection:1"
SERVICES = "<service><serviceType>" + KIND + "</serviceType><controlURL>{}</controlURL></service>"
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"


@pytest.fixture(name="router")
def _router(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayThread]:
    with GatewayThread(speaks="upnp", claims="192.0.2.7") as router:
        monkeypatch.setattr(port_mapping, "GATEWAY_PORT", router.port)
        monkeypatch.setattr(upnp, "SEARCH_PORT", router.gateway.upnp.search_port)
        monkeypatch.setattr(upnp, "SEARCHES", (2.0,))
        yield router


def found(where: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nST: {DEVICE}\r\nLOCATION: {where}\r\n\r\n".encode()


def refused() -> str:
    """Return why no port is mapped."""
    with pytest.raises(ConnectError) as refusal:
        ask_gateway("127.0.0.1", 4711, NONCE, 60, (0.05,))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (BOMB, "declares types or entities"),
        (b"<a>" * 20_000, "more than 32 levels"),
        (b"<r>" + b" " * MOST_DOCUMENT_BYTES + b"</r>", "sends more than 65536 bytes"),
        (b"\xff\xfe<\0r\0>\0", "is no XML"),
        (f"<r>{SERVICES.format('http://127.0.0.2:80/c')}</r>".encode(), "names another machine, 127.0.0.2"),
        (f"<r>{SERVICES.format('/c HTTP/1.1&#13;&#10;X: y')}</r>".encode(), "none of HTTP"),
    ],
)
def test_documents_that_do_harm_are_refused(router: GatewayThread, document: bytes, why: str) -> None:
    router.gateway.upnp.document = document
    assert why in refused()
    assert not router.gateway.upnp.calls


def test_a_router_is_not_followed_to_another_machine(router: GatewayThread) -> None:
    said = router.gateway.upnp
    with socket.create_server(("127.0.0.9", said.port)) as elsewhere:
        elsewhere.setblocking(False)
        said.location = f"http://127.0.0.1:{said.port}/moved"
        assert "the status 302" in refused()
        for host in ("127.0.0.9", "localhost"):
            said.location = f"http://{host}:{said.port}/root.xml"
            assert "it does not answer" in refused()
        said.location = f"http://127.0.0.1:{said.port}/root.xml"
        said.control = f"http://127.0.0.9:{said.port}/control"
        assert "names another machine, 127.0.0.9" in refused()
        said.control, said.base = "/control", f"<URLBase>http://127.0.0.9:{said.port}/</URLBase>"
        assert "names another machine, 127.0.0.9" in refused()
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


def test_only_answers_from_the_address_of_the_router_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger answers the search of another machine's router, and names itself or the router."""
    monkeypatch.setattr(upnp, "SEARCHES", (1.0,))
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
        socket.create_server(("127.0.0.1", 0)) as pages,
    ):
        router.bind(("127.0.0.1", 0))
        router.settimeout(DEADLINE)
        stranger.bind(("127.0.0.2", 0))
        pages.setblocking(False)
        monkeypatch.setattr(upnp, "SEARCH_PORT", router.getsockname()[1])

        def answer() -> None:
            _, client = router.recvfrom(2000)
            for host in ("127.0.0.1", "127.0.0.2"):
                where = f"http://{host}:{pages.getsockname()[1]}/"
                stranger.sendto(found(where), client)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(ConnectError, match="it does not answer"):
                UpnpPort(4711).ask("127.0.0.1", 60)
        finally:
            thread.join(DEADLINE)
        with pytest.raises(BlockingIOError):
            pages.accept()


def test_a_flood_of_answers_to_a_search_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SEARCH_ANSWERS_LIMIT == 16
    monkeypatch.setattr(upnp, "SEARCHES", (5.0,))
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router,
        socket.create_server(("127.0.0.1", 0)) as pages,
    ):
        router.bind(("127.0.0.1", 0))
        router.settimeout(DEADLINE)
        pages.setblocking(False)
        monkeypatch.setattr(upnp, "SEARCH_PORT", router.getsockname()[1])

        def answer() -> None:
            _, client = router.recvfrom(2000)
            for data in [*[b"?"] * SEARCH_ANSWERS_LIMIT, found(f"http://127.0.0.1:{pages.getsockname()[1]}/")]:
                router.sendto(data, client)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(ConnectError, match="it does not answer"):
                UpnpPort(4711).ask("127.0.0.1", 60)
        finally:
            thread.join(DEADLINE)
        with pytest.raises(BlockingIOError):
            pages.accept()


def test_a_router_that_never_ends_its_answer_is_given_up(
    router: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert upnp.HTTP_SECONDS == 3.0
    monkeypatch.setattr(upnp, "HTTP_SECONDS", 0.5)
    router.gateway.upnp.stalls = True
    assert "timed out" in refused()


def test_an_answer_that_comes_byte_by_byte_is_given_up_at_the_same_moment() -> None:
    ours, theirs = socket.socketpair()
    ending = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not ending.wait(0.02):
                theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    with ours, theirs:
        thread.start()
        try:
            ours.settimeout(DEADLINE)
            with pytest.raises(TimeoutError):
                read_http(upnp._BoundedStream(ours, time.monotonic() + 0.3))
        finally:
            ending.set()
            thread.join(DEADLINE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"evil\x1b[2J" * 1000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000000\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nDE0B6B3A7640000\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.9/\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_other_answers_of_http_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^(no answer of HTTP: \w+|the router answers with the status 302)$"):
        read_http(io.BytesIO(data))


def test_answers_of_http_are_read() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert read_http(io.BytesIO(chunked)) == b"abc"
    assert read_http(io.BytesIO(b"HTTP/1.0 500 No\r\n\r\nxyz")) == b"xyz"
