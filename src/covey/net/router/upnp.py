"""Asks a router for a port with UPnP: searches for it, reads its description, and calls one of its services.

Only the router is spoken with: answers to a search count if they come from its address and name its address, and
redirections are not followed. Each exchange has a limit of bytes and of seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.wire.upnp import (
    CONFLICT,
    MOST_DOCUMENT_BYTES,
    MOST_SEARCH_BYTES,
    NOT_MAPPED,
    ONLY_PERMANENT,
    SEARCH_GROUP,
    SEARCH_PORT,
    UPNP_ERRORS,
    RouterUrl,
    UpnpService,
    ask_call,
    ask_http,
    ask_search,
    read_description,
    read_external_ip,
    read_found,
    read_reply,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

SEARCHES: Final = (1.25, 1.5)
"""Seconds that each search waits for answers: the router may take one before it sends."""
SEARCH_ANSWERS_LIMIT: Final = 16
"""Answers of the router that are read for each search."""
HTTP_SECONDS: Final = 3.0
"""For one exchange with the router, from the connection to the last byte: some are slow."""
DELETE_SECONDS: Final = 2.0
"""For the exchange that takes the mapping back: a process waits for it at its end."""
STILL_WANTED_EVERY: Final = 0.25
"""How often a search looks whether it is still wanted."""
OUTSIDE_PORTS_TRIED: Final = 4
"""Ports that the router is asked for, if others have the first ones."""
DYNAMIC_PORTS: Final = range(49152, 65536)
MAPPING_DESCRIPTION: Final = "covey"
"""What the page of the router shows beside the mapping."""


class UpnpPort:
    """A port that a router passes on to this machine, from `ask` until `end`. One thread at a time."""

    def __init__(self, port: int, ending: threading.Event | None = None) -> None:
        """Ask for nothing yet. Once `ending` is set, what waits gives up within a moment."""
        self.external = 0
        """The port of the router, while it is mapped."""
        self._port, self._ending = port, ending or threading.Event()
        self._service: UpnpService | None = None

    def ask(self, gateway: str, lifetime: int) -> tuple[str, int, int]:
        """Return the address outside, the port there, and for how many seconds; with a lifetime of 0, map nothing.

        Raises:
            ConnectError: the router does not offer UPnP, refuses, or answers with nonsense.
            OSError: it cannot be reached.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((gateway, SEARCH_PORT))
            own = sock.getsockname()[0]
        service, ip = self._connected_service(gateway, own)
        return (ip, *self._map(service, own, lifetime)) if lifetime else (ip, 0, 0)

    def end(self) -> None:
        """Take the mapping back, if there is one.

        Raises:
            ConnectError: the router refuses, or answers with nonsense.
            OSError: it cannot be reached.
        """
        if self._service is None or not self.external:
            return
        external, self.external = self.external, 0
        error = _do(self._service, "DeletePortMapping", DELETE_SECONDS, **_outside(external))
        if error not in {0, NOT_MAPPED}:
            raise _refusal(error)

    def _connected_service(self, gateway: str, own: str) -> tuple[UpnpService, str]:
        """Return the first service of the router whose line has an address outside, and that address."""
        problem = "it does not answer"
        with contextlib.closing(self._search(gateway, own)) as urls:
            for url in urls:
                try:
                    services = read_description(_exchange(url, ask_http(url), HTTP_SECONDS), url)
                except (RemoteProtocolError, OSError) as error:
                    problem, services = str(error), []
                for service in services:
                    self._still_wanted()
                    try:
                        ip = read_external_ip(_call(service, "GetExternalIPAddress", HTTP_SECONDS))
                    except (RemoteProtocolError, OSError) as error:
                        problem = str(error)
                        continue
                    if not ipaddress.IPv4Address(ip).is_unspecified:
                        return service, ip
                    problem = "the router has no address outside: its line is down"
        raise ConnectError(problem)

    def _map(self, service: UpnpService, own: str, lifetime: int) -> tuple[int, int]:
        """Ask for the port that was granted before, the same as inside, or others; return it, and the seconds."""
        wanted, lease = self.external or self._port, lifetime
        left, error = OUTSIDE_PORTS_TRIED, 0
        while left:
            self._still_wanted()
            values = _outside(wanted) | {"NewInternalPort": self._port, "NewInternalClient": own, "NewEnabled": 1}
            values |= {"NewPortMappingDescription": MAPPING_DESCRIPTION, "NewLeaseDuration": lease}
            error = _do(service, "AddPortMapping", HTTP_SECONDS, **values)
            if not error:
                self._service, self.external = service, wanted
                return wanted, lifetime
            if error == ONLY_PERMANENT and lease:
                lease = 0
            elif error == CONFLICT:
                self.external = 0
                wanted, left = DYNAMIC_PORTS[secrets.randbelow(len(DYNAMIC_PORTS))], left - 1
            else:
                break
        raise _refusal(error)

    def _search(self, gateway: str, own: str) -> Generator[RouterUrl]:
        """Yield where the router has descriptions, each once, until the time for searches is over."""
        known: set[RouterUrl] = set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((own, 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
            for seconds in SEARCHES:
                for target in (gateway, SEARCH_GROUP):  # some networks drop multicast, some routers hear nothing else
                    for version in (1, 2):
                        with contextlib.suppress(OSError):
                            sock.sendto(ask_search(version), (target, SEARCH_PORT))
                for data in self._answers(sock, gateway, time.monotonic() + seconds):
                    with contextlib.suppress(RemoteProtocolError):
                        url = read_found(data, gateway)
                        if url not in known:
                            known.add(url)
                            yield url
                if known:
                    return

    def _answers(self, sock: socket.socket, gateway: str, end: float) -> Iterator[bytes]:
        left = SEARCH_ANSWERS_LIMIT
        while left and (seconds := end - time.monotonic()) > 0:
            self._still_wanted()
            sock.settimeout(min(seconds, STILL_WANTED_EVERY))
            with contextlib.suppress(TimeoutError, ConnectionError):
                data, (sender, _) = sock.recvfrom(MOST_SEARCH_BYTES)
                if sender == gateway:
                    left -= 1
                    yield data

    def _still_wanted(self) -> None:
        if self._ending.is_set():
            raise ConnectError("the mapping is no longer wanted")


def _outside(external: int) -> dict[str, str | int]:
    return {"NewRemoteHost": "", "NewExternalPort": external, "NewProtocol": "TCP"}


def _refusal(error: int) -> ConnectError:
    return ConnectError(f"the router refuses: {UPNP_ERRORS.get(error, f'its reason has the number {error}')}")


def _do(service: UpnpService, name: str, seconds: float, **values: str | int) -> int:
    """Call a service that returns nothing; return the error, or 0."""
    try:
        return read_reply(_call(service, name, seconds, **values), name).error
    except RemoteProtocolError as error:
        raise ConnectError(str(error)) from error


def _call(service: UpnpService, name: str, seconds: float, **values: str | int) -> bytes:
    return _exchange(service.control, ask_call(service, name, **values), seconds)


def _exchange(url: RouterUrl, request: bytes, seconds: float) -> bytes:
    """Send a request of HTTP; return the body of the answer. Errors of SOAP have a body, and are returned, too.

    Raises:
        RemoteProtocolError: the answer is too long, is none of HTTP, or leads elsewhere.
        OSError: there is no answer, or not all of it in time.
    """
    end = time.monotonic() + seconds
    with socket.create_connection((url.ip, url.port), seconds) as sock:
        sock.sendall(request)
        return read_http(_BoundedStream(sock, end))


def read_http(stream: io.RawIOBase | io.BytesIO) -> bytes:
    """Return the body of an answer of HTTP with the status 200 or 500; raise RemoteProtocolError for anything else."""
    response = http.client.HTTPResponse(_ResponseSource(stream))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read(
            MOST_DOCUMENT_BYTES
        )  # without a number, it makes room for whatever length the router names
        if response.length:
            raise http.client.IncompleteRead(body, response.length)
    except (http.client.HTTPException, ValueError) as error:
        raise RemoteProtocolError(f"no answer of HTTP: {type(error).__name__}") from None  # it quotes the router
    if response.status not in {200, 500}:
        raise RemoteProtocolError(f"the router answers with the status {response.status}")
    return body


class _ResponseSource:
    """What `http.client` takes for a socket."""

    def __init__(self, stream: io.RawIOBase | io.BytesIO) -> None:
        self._stream = stream

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._stream)


class _BoundedStream(io.RawIOBase):
    """What a socket receives: up to a moment, and up to a number of bytes."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end, self._left = sock, end, MOST_DOCUMENT_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise RemoteProtocolError(f"the router sends more than {MOST_DOCUMENT_BYTES} bytes")
        self._sock.settimeout(max(0.001, self._end - time.monotonic()))
        got = self._sock.recv_into(buffer, min(len(buffer), self._left))
        self._left -= got
        return got
