"""The gate: judges every request before anything else looks at it, whatever its path and method.

The page is for one person: this user, at a browser of this machine, who has the link. Others that can reach a port of
loopback are other users, web pages that the browser shows, and web pages whose name resolves to 127.0.0.1. Each rule
keeps out one of them, and each is enough: `docs/security.md` names them.
"""

from __future__ import annotations

import enum
import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from covey.runtime.http_server import is_loopback, text
from covey.ui.peer import uid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.runtime.http_server import Request, Response
    from covey.ui.admission import Admission

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
"""Of every answer, besides those of the server: `no-store` and `nosniff`."""
WRONG_HOST: Final = (
    "This page has another address: open the link that `covey ui` has printed, or run `covey ui --link`.\n"
)
NO_TOKEN: Final = "This link is not valid any more. Run `covey ui --link` for another.\n"
ROOT: Final = 0


class Access(enum.Enum):
    """What a path needs."""

    OPEN = "GET"
    """A file of the page: the same for everybody, so nothing."""
    READ = "GET and the token"
    ENTER = "POST from the page"
    """A ticket is worth the token."""
    ACT = "POST from the page, and the token"
    LINK = "POST, and the key that only commands of this user know"

    @property
    def method(self) -> str:
        """The only one that the path knows."""
        return "GET" if self in (Access.OPEN, Access.READ) else "POST"


class Gate:
    """Judges requests for paths with different needs."""

    def __init__(
        self,
        access: Mapping[str, Access],
        admission: Admission,
        port: int,
        peer_uid: Callable[[tuple[str, int], tuple[str, int]], int | None] = uid_of,
    ) -> None:
        """`port` is that of the server, and `peer_uid` tells whose the client's end of a connection is."""
        self._access = access
        self._admission = admission
        self._host = f"127.0.0.1:{port}"
        self._origin = f"http://{self._host}"
        self._peer_uid = peer_uid

    def refusal(self, request: Request) -> Response | None:
        """Return why a request is refused; None if it is not."""
        return self._refused_client(request) or self._refused_question(request) or self._refused_proof(request)

    def _refused_client(self, request: Request) -> Response | None:
        """Judge who asks, and for whom."""
        if not is_loopback(request.peer[0]):
            return text("This page is for this machine only.\n", HTTPStatus.FORBIDDEN)
        # Root may read this process anyway, and forwards connections of other systems, such as that around WSL.
        if self._peer_uid(request.peer, request.here) not in (None, os.geteuid(), ROOT):
            return text("This page belongs to another user of this machine.\n", HTTPStatus.FORBIDDEN)
        if request.all_of("host") != [self._host]:
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
            if request.all_of("origin") != [self._origin]:
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
        admits = self._admission.admits_command if access is Access.LINK else self._admission.admits
        return None if admits(key) else text(NO_TOKEN, HTTPStatus.UNAUTHORIZED)
