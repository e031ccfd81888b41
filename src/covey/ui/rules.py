"""The rules of the page: judge every request before anything else looks at it, whatever its path and method.

The page is for one person: this user, at a browser of this machine, who has the link. Others that can reach a port of
loopback are other users, web pages that the browser shows, and web pages whose name resolves to 127.0.0.1. Each rule
keeps out one of them, and each is enough: `docs/security.md` names them.

A ticket from the link, once and soon, is worth the token, which every question then shows. The token is in no address
and no cookie: browsers show addresses to others, and send cookies to every port of a host.
"""

from __future__ import annotations

import enum
import hmac
import os
import secrets
import socket
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.runtime.http_server import is_loopback, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.runtime.http_server import Request, Response

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer, besides those of the server: `no-store` and `nosniff`."""
WRONG_HOST: Final = (
    "This page has another address: open the link that `covey ui` has printed, or run `covey ui --link`.\n"
)
NO_TOKEN: Final = "This link is not valid any more. Run `covey ui --link` for another.\n"
ROOT_USER: Final = 0
TICKET_SECONDS: Final = 300.0
"""How long a link can be used."""
TICKETS: Final = 16
"""Links that can be used at a time; a further one ends the oldest."""
UNSEEN_SECONDS: Final = 12 * 3600.0
"""How long the token is valid without a viewer."""
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7
_OWNED_STATES: Final = frozenset(["01", "02", "03", "04", "05", "08", "09"])
"""Those in which a process has the socket; of others the table does not know whose they were."""
_BYTE_ORDER: Final = "little" if socket.htons(1) != 1 else "big"


class Access(enum.Enum):
    """What a path needs."""

    OPEN = "GET"
    """A file of the page: it is the same for every user, so no proof is needed."""
    READ = "GET and the token"
    ENTER = "POST from the page"
    """A ticket is worth the token."""
    ACT = "POST from the page, and the token"
    LINK = "POST, and the key that only commands of this user know"

    @property
    def method(self) -> str:
        """The only one that the path knows."""
        return "GET" if self in (Access.OPEN, Access.READ) else "POST"


class Tickets:
    """Gives out tickets and the token, and knows them again. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: dict[str, float] = {}
        """Until when each is valid, the oldest first."""
        self._token = secrets.token_urlsafe(32)
        self._seen = clock()
        self.link_key = secrets.token_urlsafe(32)
        """Known to this user's commands, by a private file: it is worth new tickets, and nothing else."""

    def new_ticket(self) -> str:
        """Return what a link holds."""
        ticket = secrets.token_urlsafe(24)
        with self._lock:
            self._forget_old_tickets()
            while len(self._tickets) >= TICKETS:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[ticket] = self._clock() + TICKET_SECONDS
        return ticket

    def enter(self, ticket: str) -> str | None:
        """Return the token for a ticket, which is used up by that; None if it was used, is too old, or never was."""
        with self._lock:
            self._forget_old_tickets()
            found = [each for each in self._tickets if _is_same(each, ticket)]
            if not found:
                return None
            del self._tickets[found[0]]
            if self._has_ended():
                self._token = secrets.token_urlsafe(32)
            self._seen = self._clock()
            return self._token

    def admits(self, token: str) -> bool:
        """Tell whether this is the token; if so, it has a viewer now."""
        with self._lock:
            is_valid = _is_same(self._token, token) and not self._has_ended()
            if is_valid:
                self._seen = self._clock()
            return is_valid

    def admits_command(self, key: str) -> bool:
        """Tell whether a command of this user asks."""
        return _is_same(self.link_key, key)

    def _has_ended(self) -> bool:
        return self._clock() - self._seen > UNSEEN_SECONDS

    def _forget_old_tickets(self) -> None:
        now = self._clock()
        self._tickets = {ticket: until for ticket, until in self._tickets.items() if until > now}


def _is_same(mine: str, theirs: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(mine.encode(), theirs.encode(errors="replace"))


def uid_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user id of the end `peer` of a connection to `here`, both IPv4; None if it is not known."""
    wanted = {_spelled(peer), _spelled(peer, mapped=True)}, {_spelled(here), _spelled(here, mapped=True)}
    for table in TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:  # not Linux, or a sandbox
            continue
        for line in lines:
            words = line.split()
            if words[_LOCAL] in wanted[0] and words[_REMOTE] in wanted[1] and words[_STATE] in _OWNED_STATES:
                return int(words[_UID])
    return None


def _spelled(end: tuple[str, int], *, mapped: bool = False) -> str:
    """Return an address and port as the tables have them: words of four bytes in the order of this machine."""
    address = socket.inet_pton(socket.AF_INET, end[0])
    whole = bytes(10) + b"\xff\xff" + address if mapped else address
    words = (whole[start : start + 4] for start in range(0, len(whole), 4))
    return "".join(f"{int.from_bytes(word, _BYTE_ORDER):08X}" for word in words) + f":{end[1]:04X}"


class RequestRules:
    """Judges requests for paths with different needs."""

    def __init__(
        self,
        access: Mapping[str, Access],
        tickets: Tickets,
        peer_uid: Callable[[tuple[str, int], tuple[str, int]], int | None] = uid_of,
    ) -> None:
        """`peer_uid` tells which user has the client's end of a connection."""
        self._access = access
        self._tickets = tickets
        self._peer_uid = peer_uid

    def refusal(self, request: Request) -> Response | None:
        """Return why a request is refused; None if it is not."""
        return self._refused_client(request) or self._refused_question(request) or self._refused_proof(request)

    def _refused_client(self, request: Request) -> Response | None:
        """Judge the machine and user of the client, and the address that it asked for."""
        if not is_loopback(request.peer[0]):
            return text("This page is for this machine only.\n", HTTPStatus.FORBIDDEN)
        # Root may read this process anyway, and forwards connections of other systems, such as that around WSL.
        if self._peer_uid(request.peer, request.here) not in (None, os.geteuid(), ROOT_USER):
            return text("This page belongs to another user of this machine.\n", HTTPStatus.FORBIDDEN)
        if request.all_of("host") != [_host_of(request)]:
            return text(WRONG_HOST, HTTPStatus.MISDIRECTED_REQUEST)
        return None

    def _refused_question(self, request: Request) -> Response | None:
        """Judge path and method, and the page from which a browser asks."""
        if request.method not in ("GET", "POST"):
            return text("", HTTPStatus.METHOD_NOT_ALLOWED)
        access = self._access.get(request.path)
        if access is None:
            return text("", HTTPStatus.NOT_FOUND)
        if request.method != access.method:
            return text("", HTTPStatus.METHOD_NOT_ALLOWED)
        sites = request.all_of("sec-fetch-site")
        if access is not Access.OPEN and sites not in ([], ["same-origin"]):
            return text("Only the page itself may ask for this.\n", HTTPStatus.FORBIDDEN)
        if access.method == "POST":
            if request.all_of("origin") != [f"http://{_host_of(request)}"]:
                return text("Only the page itself may ask for this.\n", HTTPStatus.FORBIDDEN)
            if request.all_of("content-type") != ["application/json"]:
                return text("", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        return None

    def _refused_proof(self, request: Request) -> Response | None:
        """Judge what the client has to show."""
        access = self._access[request.path]
        if access in (Access.OPEN, Access.ENTER):
            return None
        shown = request.all_of("authorization")
        key = shown[0].removeprefix("Bearer ") if len(shown) == 1 and shown[0].startswith("Bearer ") else ""
        admits = self._tickets.admits_command if access is Access.LINK else self._tickets.admits
        return None if admits(key) else text(NO_TOKEN, HTTPStatus.UNAUTHORIZED)


def _host_of(request: Request) -> str:
    """Return the address of the server, as a browser that has the link sends it."""
    return f"127.0.0.1:{request.here[1]}"
