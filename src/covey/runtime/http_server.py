"""A small HTTP server for orchestrators, Prometheus and the page of `covey ui`. h11 reads and writes HTTP.

Clients are strangers: the server handles a few connections at a time, reads one request of bounded size from each,
gives each a few seconds in all, and then closes it. A further connection ends the oldest one that has not sent its
request, so that idle connections keep no request out; if all are being answered, it waits.

An answer that has no end (`Stream`) counts apart from the others, so that viewers keep no request out. The server holds
one piece for each: a client that does not read it in time is dropped, and misses what came in between.
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
HTTP_STREAMS: Final = 8
"""Streams that are sent at a time, besides those connections."""
HTTP_BACKLOG: Final = 64
HEAD_LIMIT_BYTES: Final = 8192
"""Most bytes of a request line and its headers."""
HTTP_PIECE_BYTES: Final = 4096
HTTP_REQUEST_SECONDS: Final = 5.0
"""How long a client may take for its request."""
FIRST_BYTES_SECONDS: Final = 0.25
"""How long no connection is ended for a newer one: the request of a browser that opens several may be on its way."""
READ_ANSWER_SECONDS: Final = 30.0
"""How long a client may take to read the answer."""
READ_PIECE_SECONDS: Final = 10.0
"""How long a client may take to read a piece of a stream."""
STREAM_BUFFER_BYTES: Final = 64 << 10
"""How much of a stream the kernel keeps for a client that does not read."""
PIECE_WAIT_SECONDS: Final = 0.5
"""How long a stream waits for its next piece before it looks whether the client is there."""
UNREAD_REST_SECONDS: Final = 1.0
UNREAD_REST_BYTES: Final = 1 << 20
"""How long, and how much, of a request is read and dropped after its answer."""
BEGUN_ANSWERS_SECONDS: Final = 2.0
"""How long `close` waits for answers that have begun."""
_HEADERS: Final = (
    ("Server", f"covey/{__version__}"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Connection", "close"),
)
"""Headers of every answer."""
_HOST: Final = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]+)(:\d*)?")
"""The header of this name: an address in brackets, or a name, and perhaps a port."""


class Request(NamedTuple):
    """What a client asks for."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    """Names in lower case, in the order in which they came; a name may occur twice."""
    body: bytes
    peer: tuple[str, int]
    """Address and port of the client's end."""
    here: tuple[str, int]
    """Address and port of the server's end."""

    def header(self, name: str) -> str:
        """Return a header of this name; empty if it has none."""
        return next(iter(self.all_of(name)), "")

    def all_of(self, name: str) -> list[str]:
        """Return all headers of this name."""
        return [value for each, value in self.headers if each == name]

    @property
    def is_local(self) -> bool:
        """Whether it comes from this machine, for a name or address of this machine."""
        return is_loopback(self.peer[0]) and _is_here(self.header("host"))


class Response(NamedTuple):
    """The answer to a client."""

    status: HTTPStatus
    content_type: str
    body: bytes


class Stream(NamedTuple):
    """An answer that goes on until its source ends, or the client does."""

    content_type: str
    next_piece: Callable[[float], bytes | None]
    """Returns the next bytes; none (empty) if there are none within so many seconds; None at the end. The next ones are
    asked for when the client has room for them, so that a slow one gets fewer, and newer ones."""


def text(body: str, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return an answer of plain text."""
    return Response(status, "text/plain; charset=utf-8", body.encode(errors="replace"))


def by_path(pages: Mapping[str, Callable[[Request], Response]]) -> Callable[[Request], Response]:
    """Return what answers questions about these pages, and refuses all that could change something."""

    def answer(request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return text("", HTTPStatus.METHOD_NOT_ALLOWED)
        page = pages.get(request.path)
        if page is None:
            return text(f"there is no page here; pages: {', '.join(sorted(pages))}\n", HTTPStatus.NOT_FOUND)
        return page(request)

    return answer


class HttpServer:
    """Serves pages over HTTP until it is closed. See `covey.serve_http`."""

    def __init__(
        self,
        answer: Callable[[Request], Response | Stream],
        port: int,
        host: str = LOOPBACK,
        *,
        body_limit: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Listen at once; port 0 takes a free one. `answer` runs on threads of the server.

        Bodies of requests are read up to `body_limit` bytes; with 0, they are not read at all. `headers` are added to
        every answer, whatever it is.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        self._answer = answer
        self._body_limit = body_limit
        self._headers = [*_HEADERS, *(headers or {}).items()]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(HTTP_BACKLOG)
        except (OSError, OverflowError) as error:
            self._listener.close()
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"pages cannot be served at {host}:{port}: {why}; use another port") from error
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        """Without a path: `url + "/readyz"` is the address of a page."""
        self._slots = threading.Semaphore(CONNECTIONS)
        self._stream_slots = threading.Semaphore(HTTP_STREAMS)
        self._closed = threading.Event()
        self._handlers: set[threading.Thread] = set()
        self._changing = threading.Lock()
        self._idle: dict[socket.socket, float] = {}
        """Connections whose requests have not arrived, and since when they are open; the oldest first."""
        self._streaming: set[socket.socket] = set()
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
        with self._changing:
            for connection in self._streaming:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that writes to it
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
            thread = threading.Thread(target=self._handle, args=(connection, address[:2]), name="covey-http-client")
            thread.daemon = True
            with self._changing:
                self._idle[connection] = time.monotonic()
            self._handlers.add(thread)
            thread.start()

    def _found_room(self) -> bool:
        """Take a slot, which the oldest idle connection makes free if none is; False if the server is closed."""
        while not self._slots.acquire(blocking=False):
            with self._changing:
                oldest, since = next(iter(self._idle.items()), (None, 0.0))
                wait = since + FIRST_BYTES_SECONDS - time.monotonic() if oldest is not None else 0.5
                if oldest is not None and wait <= 0:
                    del self._idle[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            if self._slots.acquire(timeout=wait if wait > 0 else 0.5):
                return True
            if self._closed.is_set():
                return False
        return True

    def _handle(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        slots = self._slots
        try:
            with connection, contextlib.suppress(OSError):
                http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES - 1)
                here = connection.getsockname()[:2]
                asked = _read_request(connection, http, peer, here, self._body_limit)
                if asked is None or not self._is_wanted(connection):
                    return
                answer = self._answer_to(asked) if isinstance(asked, Request) else text("", asked)
                if isinstance(answer, Stream):
                    if self._stream_slots.acquire(blocking=False):
                        slots.release()
                        slots = self._stream_slots
                        self._send_pieces(connection, http, answer)
                        return
                    answer = text("as many streams as there may be are open\n", HTTPStatus.SERVICE_UNAVAILABLE)
                connection.settimeout(READ_ANSWER_SECONDS)
                is_head = isinstance(asked, Request) and asked.method == "HEAD"
                connection.sendall(_written(http, self._headers, answer, is_head=is_head))
                if http.their_state is not h11.DONE:
                    _let_finish(connection)
        except Exception:
            logger.exception("a request over HTTP could not be answered")
        finally:
            self._is_wanted(connection)
            self._handlers.discard(threading.current_thread())
            slots.release()

    def _is_wanted(self, connection: socket.socket) -> bool:
        """Tell whether a connection was not ended for a newer one; from now on it is not."""
        with self._changing:
            was_idle = connection in self._idle
            self._idle.pop(connection, None)
            return was_idle

    def _answer_to(self, request: Request) -> Response | Stream:
        try:
            return self._answer(request)
        except Exception as error:
            logger.exception("the page %s could not be made", request.path)
            return text(f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR)

    def _send_pieces(self, connection: socket.socket, http: h11.Connection, stream: Stream) -> None:
        """Send a stream to its end; OSError if the client has gone, or reads too slowly."""
        with self._changing:
            self._streaming.add(connection)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES)
            connection.settimeout(READ_PIECE_SECONDS)
            head = _head(HTTPStatus.OK, [*self._headers, ("Content-Type", stream.content_type)])
            connection.sendall(http.send(head) or b"")
            while not self._closed.is_set() and not _has_ended(connection):
                piece = stream.next_piece(PIECE_WAIT_SECONDS)
                if piece is None:
                    connection.sendall(http.send(h11.EndOfMessage()) or b"")
                    return
                if piece:
                    connection.sendall(http.send(h11.Data(data=piece)) or b"")
        finally:
            with self._changing:
                self._streaming.discard(connection)


def _read_request(
    connection: socket.socket, http: h11.Connection, peer: tuple[str, int], here: tuple[str, int], body_limit: int
) -> Request | HTTPStatus | None:
    """Return the request of a client, what is wrong with it, or None if the client ends the connection first.

    Raises:
        TimeoutError: it is late.
    """
    until = time.monotonic() + HTTP_REQUEST_SECONDS
    head, body = None, b""
    try:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                connection.settimeout(left)
                http.receive_data(connection.recv(HTTP_PIECE_BYTES))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.EndOfMessage):
                return None
            if head is not None and (not body_limit or isinstance(event, h11.EndOfMessage)):
                break
            if head is not None and max(_length(head), len(body)) > body_limit:
                return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    except h11.RemoteProtocolError as error:
        return HTTPStatus(error.error_status_hint)
    path, _, query = head.target.decode("ascii", "replace").partition("?")
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
    return Request(head.method.decode("ascii", "replace"), path, query, headers, body, peer, here)


def _length(head: h11.Request) -> int:
    """Return how long a request says that its body is; 0 if it does not say so. h11 has checked the number."""
    return max((int(value) for name, value in head.headers if name == b"content-length"), default=0)


def _head(status: HTTPStatus, headers: list[tuple[str, str]]) -> h11.Response:
    """Return the head of an answer."""
    return h11.Response(status_code=status, headers=headers, reason=status.phrase.encode())


def _written(http: h11.Connection, headers: list[tuple[str, str]], response: Response, *, is_head: bool) -> bytes:
    """Return the bytes of an answer."""
    own = [("Content-Type", response.content_type), ("Content-Length", str(len(response.body)))]
    head = _head(response.status, [*headers, *own])
    events = (head, h11.Data(data=b"" if is_head else response.body), h11.EndOfMessage())
    return b"".join(http.send(event) or b"" for event in events)


def _let_finish(connection: socket.socket) -> None:
    """Read the rest of a request that was answered early: closing would make the kernel drop the answer instead."""
    connection.shutdown(socket.SHUT_WR)
    until, left = time.monotonic() + UNREAD_REST_SECONDS, UNREAD_REST_BYTES
    while left > 0 and (seconds := until - time.monotonic()) > 0:
        connection.settimeout(seconds)
        piece = connection.recv(HTTP_PIECE_BYTES)
        if not piece:
            return
        left -= len(piece)


def _has_ended(connection: socket.socket) -> bool:
    """Tell whether a client has closed its end; what it sends after its request is not read."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(READ_PIECE_SECONDS)


def is_loopback(address: str) -> bool:
    """Tell whether an address is one of this machine alone."""
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
    return name == "localhost" or is_loopback(name.removeprefix("[").removesuffix("]"))
