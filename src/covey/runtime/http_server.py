"""A small HTTP server for orchestrators and Prometheus: it answers questions, and changes nothing. h11 reads HTTP.

Clients are strangers: the server handles a few connections at a time, reads one request of bounded size from each,
gives each a few seconds in all, and then closes it. A further connection ends the oldest one that has not sent its
request, so that idle connections keep no request out; if all are being answered, it waits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import h11

from covey.base.errors import ConfigError
from covey.base.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("covey")

LOOPBACK: Final = "127.0.0.1"
CONNECTIONS: Final = 8
"""Connections that are handled at a time, each on a thread; the threads end with them."""
BACKLOG: Final = 64
HEAD_LIMIT_BYTES: Final = 8192
"""Of a request line and its headers."""
PIECE_BYTES: Final = 4096
REQUEST_SECONDS: Final = 5.0
"""How long a client may take for its request."""
READ_ANSWER_SECONDS: Final = 30.0
"""How long a client may take to read the answer."""
BEGUN_ANSWERS_SECONDS: Final = 2.0
"""How long `close` waits for answers that have begun."""
_HOST: Final = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]+)(:\d*)?")
"""The header of this name: an address in brackets, or a name, and perhaps a port."""


class Request(NamedTuple):
    """What a client asks for."""

    path: str
    accept: str
    """Its header of this name; empty if it has none."""
    is_local: bool
    """Whether it comes from this machine, for a name or address of this machine."""


class Response(NamedTuple):
    """The answer to a client."""

    status: HTTPStatus
    content_type: str
    body: bytes


def text(body: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return an answer of plain text."""
    return Response(status, "text/plain; charset=utf-8", body.encode(errors="replace"))


class HttpServer:
    """Serves pages over HTTP until it is closed. See `covey.serve_http`."""

    def __init__(self, pages: Mapping[str, Callable[[Request], Response]], port: int, host: str = LOOPBACK) -> None:
        """Listen at once; port 0 takes a free one. `pages` are the answers by path; they run on threads of the server.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._pages = dict(pages)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            self._listener.close()
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"pages cannot be served at {host}:{port}: {why}; use another port") from error
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        """Without a path: `url + "/readyz"` is the address of a page."""
        self._slots = threading.Semaphore(CONNECTIONS)
        self._closed = threading.Event()
        self._handlers: set[threading.Thread] = set()
        self._changing = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """Connections whose requests have not arrived, the oldest first."""
        self._thread = threading.Thread(target=self._accept, name="covey-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and let answers that have begun be sent. Closing twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        until = time.monotonic() + BEGUN_ANSWERS_SECONDS
        for thread in (self._thread, *list(self._handlers)):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:
                if not self._closed.wait(0.05):  # the process has no descriptor left; others may be freed
                    continue
                return
            if not self._found_room():
                connection.close()
                return
            thread = threading.Thread(target=self._handle, args=(connection, address[0]), name="covey-http-client")
            thread.daemon = True
            with self._changing:
                self._idle[connection] = None
            self._handlers.add(thread)
            thread.start()

    def _found_room(self) -> bool:
        """Take a slot, which the oldest idle connection makes free if none is; False if the server is closed."""
        while not self._slots.acquire(blocking=False):
            with self._changing:
                oldest = next(iter(self._idle), None)
                if oldest is not None:
                    del self._idle[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            if self._slots.acquire(timeout=0.5):
                return True
            if self._closed.is_set():
                return False
        return True

    def _handle(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES - 1)
                asked = _read_request(connection, http, time.monotonic() + REQUEST_SECONDS)
                if asked is None or not self._is_wanted(connection):
                    return
                if isinstance(asked, h11.Request):
                    response, is_head = self._answer(asked, address), asked.method == b"HEAD"
                else:
                    response, is_head = text("", asked), False
                connection.settimeout(READ_ANSWER_SECONDS)
                connection.sendall(_written(http, response, is_head=is_head))
        except Exception:
            logger.exception("a request over HTTP could not be answered")
        finally:
            self._is_wanted(connection)
            self._handlers.discard(threading.current_thread())
            self._slots.release()

    def _is_wanted(self, connection: socket.socket) -> bool:
        """Tell whether a connection was not ended for a newer one; from now on it is not."""
        with self._changing:
            was_idle = connection in self._idle
            self._idle.pop(connection, None)
            return was_idle

    def _answer(self, asked: h11.Request, address: str) -> Response:
        if asked.method not in (b"GET", b"HEAD"):
            return text("", HTTPStatus.METHOD_NOT_ALLOWED)
        path = asked.target.decode("ascii", "replace").partition("?")[0]
        page = self._pages.get(path)
        if page is None:
            return text(f"there is no page here; pages: {', '.join(sorted(self._pages))}\n", HTTPStatus.NOT_FOUND)
        try:
            headers = {name: value.decode("latin-1") for name, value in asked.headers}
            is_local = _is_loopback(address) and _is_here(headers.get(b"host", ""))
            return page(Request(path, headers.get(b"accept", ""), is_local))
        except Exception as error:
            logger.exception("the page %s could not be made", path)
            return text(f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR)


def _read_request(connection: socket.socket, http: h11.Connection, until: float) -> h11.Request | HTTPStatus | None:
    """Return the request of a client, what is wrong with it, or None if the client ends the connection first.

    Raises:
        TimeoutError: it is late.
    """
    try:
        while (event := http.next_event()) is h11.NEED_DATA:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            http.receive_data(connection.recv(PIECE_BYTES))
    except h11.RemoteProtocolError as error:
        return HTTPStatus(error.error_status_hint)
    return event if isinstance(event, h11.Request) else None


def _written(http: h11.Connection, response: Response, *, is_head: bool) -> bytes:
    """Return the bytes of an answer."""
    headers = [
        ("Server", f"covey/{__version__}"),
        ("Content-Type", response.content_type),
        ("Content-Length", str(len(response.body))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]
    head = h11.Response(status_code=response.status, headers=headers, reason=response.status.phrase.encode())
    events = (head, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage())
    return b"".join(http.send(event) or b"" for event in events)


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_here(host: str) -> bool:
    """Tell whether a request names this machine: a page in a browser may have its own name resolve to 127.0.0.1."""
    if not host:  # no browser leaves it out
        return True
    found = _HOST.fullmatch(host)
    name = found["name"] if found else ""
    return name == "localhost" or _is_loopback(name.removeprefix("[").removesuffix("]"))
