"""A small HTTP server for orchestrators and Prometheus, on Python's own: it answers questions, and changes nothing.

Clients are strangers: the server handles a few connections at a time, reads one request of bounded size from each,
gives each a few seconds in all, and then closes it. Other connections wait in the kernel.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Final, NamedTuple, Self

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
REQUEST_SECONDS: Final = 5.0
"""How long a client may take for its request."""
ANSWER_SECONDS: Final = 30.0
"""How long a client may take to read the answer."""
CLOSE_SECONDS: Final = 2.0
"""How long `close` waits for answers that have begun."""


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
        until = time.monotonic() + CLOSE_SECONDS
        for thread in (self._thread, *list(self._handlers)):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._slots.acquire(timeout=0.5):
                continue
            try:
                connection, address = self._listener.accept()
            except OSError:
                self._slots.release()
                if not self._closed.wait(0.05):  # the process has no descriptor left; others may be freed
                    continue
                return
            thread = threading.Thread(target=self._handle, args=(connection, address[0]), name="covey-http-client")
            thread.daemon = True
            self._handlers.add(thread)
            thread.start()

    def _handle(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                head = _read_head(connection, time.monotonic() + REQUEST_SECONDS)
                answered = _Answer(self._pages, head, address)
                connection.settimeout(ANSWER_SECONDS)
                connection.sendall(answered.written.getvalue())
        except Exception:
            logger.exception("a request over HTTP could not be answered")
        finally:
            self._handlers.discard(threading.current_thread())
            self._slots.release()


def _read_head(connection: socket.socket, until: float) -> bytes:
    """Return what comes up to the end of the headers, or to the limit; TimeoutError, an OSError, if it is late."""
    head = bytearray()
    while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) < HEAD_LIMIT_BYTES:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        piece = connection.recv(HEAD_LIMIT_BYTES - len(head))
        if not piece:
            break
        head += piece
    return bytes(head)


class _Answer(BaseHTTPRequestHandler):
    """Parses one request, and writes the answer to memory."""

    server_version, sys_version = f"covey/{__version__}", ""
    default_request_version = "HTTP/1.0"  # so that errors have a status line, whatever the client has sent

    def __init__(self, pages: Mapping[str, Callable[[Request], Response]], head: bytes, address: str) -> None:
        self._pages, self._address = pages, address
        self.written = io.BytesIO()
        """The answer."""
        self.rfile, self.wfile = io.BytesIO(head), self.written
        self.client_address = address, 0
        self.close_connection = True
        self._is_whole = b"\r\n\r\n" in head or b"\n\n" in head
        self.handle_one_request()

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(HEAD_LIMIT_BYTES)
        if not self.raw_requestline:
            return
        if not self._is_whole:
            self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.parse_request():
            if self.command in ("GET", "HEAD"):
                self._answer()
            else:
                self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        page = self._pages.get(path)
        if page is None:
            response = text(f"there is no page here; pages: {', '.join(sorted(self._pages))}\n", HTTPStatus.NOT_FOUND)
        else:
            try:
                is_local = _is_loopback(self._address) and _is_here(self.headers.get("Host", ""))
                response = page(Request(path, self.headers.get("Accept", ""), is_local))
            except Exception as error:
                logger.exception("the page %s could not be made", path)
                response = text(f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(response.body)

    def log_message(self, *_: object) -> None:
        """Log nothing: orchestrators ask every few seconds."""


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _is_here(host: str) -> bool:
    """Tell whether a request names this machine: a page in a browser may have its own name resolve to 127.0.0.1."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    return name in ("", "localhost") or _is_loopback(name.removeprefix("[").removesuffix("]"))
