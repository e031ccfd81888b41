"""Serves the page: its files, a stream of overviews, histories, lines of output, and what a person does there.

JSON has no NaN and no infinity, and a loss that becomes one is what people look for: the page gets the words `nan`,
`inf` and `-inf` in their place. A figure that is not known is null.
"""

from __future__ import annotations

import math
import threading
import time
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar
from urllib.parse import parse_qs

import msgspec

from covey.base.errors import CoveyError
from covey.base.text import printable
from covey.runtime.http_server import HttpServer, Response, Stream, text
from covey.ui.links import link_to
from covey.ui.qr import qr_rows
from covey.ui.rules import HEADERS, NO_TOKEN, Access, RequestRules, Tickets

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.http_server import Request
    from covey.watch.output import OutputPage
    from covey.watch.overview import Moment, Overview

BODY_LIMIT_BYTES: Final = 4096
ACTION_EVERY: Final = 1.0
"""At most one action in so many seconds."""
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in (
            "main",
            "session",
            "words",
            "elements",
            "machines",
            "ranks",
            "charts",
            "timeline",
            "logs",
            "past",
            "actions",
        )
    },
}
"""The files of the page by path, with their types."""
ACCESS: Final = {
    **dict.fromkeys(FILES, Access.OPEN),
    "/api/overviews": Access.READ,
    "/api/history": Access.READ,
    "/api/output": Access.READ,
    "/api/past": Access.READ,
    "/api/enter": Access.ENTER,
    "/api/link": Access.LINK,
    "/api/checkpoint": Access.ACT,
    "/api/stop": Access.ACT,
    "/api/approve": Access.ACT,
    "/api/deny": Access.ACT,
    "/api/code": Access.ACT,
}
"""All paths."""


class Source(Protocol):
    """Where overviews come from: `watch.collector.Collector`."""

    def newest(self) -> Overview:
        """Return the last overview."""

    def next_after(self, serial: int, within: float) -> Overview | None:
        """Return the newest overview as soon as its serial is above this one; None if there is none in time."""

    def history(self, run_id: str, since: float = 0.0) -> tuple[Moment, ...]:
        """Return the moments of a run after a time, the oldest first."""


class PageActions(Protocol):
    """What a person may do on the page; each says what came of it, or raises a CoveyError."""

    def checkpoint(self, run_id: str) -> str:
        """Ask the ranks of a run to save a checkpoint."""

    def stop(self, run_id: str, *, kill: bool = False) -> str:
        """End a run."""

    def approve(self, applicant_id: str) -> str:
        """Let a machine into the cluster."""

    def deny(self, applicant_id: str) -> str:
        """Keep a machine out of the cluster."""

    def join_code(self) -> str:
        """Return the code with which a machine joins the cluster: its secret."""


class Outputs(Protocol):
    """Where lines of output come from."""

    def lines(self, run_id: str, since: str = "") -> OutputPage:
        """Return the newest lines of a run; those after `since`, which an earlier answer gave as `next`."""


class _Ticket(msgspec.Struct, forbid_unknown_fields=True):
    ticket: str


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _RunMeant(msgspec.Struct, forbid_unknown_fields=True):
    run: str
    kill: bool = False


class _MachineMeant(msgspec.Struct, forbid_unknown_fields=True):
    id: str


_Body = TypeVar("_Body", _Ticket, _Nothing, _RunMeant, _MachineMeant)


class PageServer:
    """Serves the page of one source at 127.0.0.1 until it is closed."""

    def __init__(
        self,
        source: Source,
        actions: PageActions,
        outputs: Outputs | None = None,
        port: int = 0,
        tickets: Tickets | None = None,
        *,
        past: Callable[[], list[dict[str, object]]] | None = None,
    ) -> None:
        """Listen at once; port 0 takes a free one. Without `outputs` the page says that it has none.

        `past` returns the runs that this machine remembers, the newest first; without it the page lists none.

        Raises:
            ConfigError: the port cannot be listened at.
        """
        self._source = source
        self._actions = actions
        self._outputs = outputs
        self._past = past or list
        self.tickets = tickets or Tickets()
        self._files = {path: _read(name) for path, (name, _) in FILES.items()}
        self._acting = threading.Lock()
        self._acted = -ACTION_EVERY
        self._line = (0, b"")
        self._rules = RequestRules(ACCESS, self.tickets)
        self._http = HttpServer(self._answer, port, body_limit=BODY_LIMIT_BYTES, headers=HEADERS)
        self.port = self._http.port

    def close(self) -> None:
        """Serve no more. Closing twice is fine."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_link(self) -> str:
        """Return an address with which a browser enters once."""
        return link_to(self.port, self.tickets.new_ticket())

    def _answer(self, request: Request) -> Response | Stream:
        if (refusal := self._rules.refusal(request)) is not None:
            return refusal
        if request.path in FILES:
            return Response(HTTPStatus.OK, FILES[request.path][1], self._files[request.path])
        asked = parse_qs(request.query)
        match request.path:
            case "/api/overviews":
                return self._overviews(request.header("authorization"))
            case "/api/history":
                moments = self._source.history(_first(asked, "run"))
                return _json(_with_words(msgspec.to_builtins(moments)))
            case "/api/output" if self._outputs is None:
                return text("This page shows no output: `covey logs RUN` does.\n", HTTPStatus.NOT_FOUND)
            case "/api/output":
                assert self._outputs is not None
                page = self._outputs.lines(_first(asked, "run"), _first(asked, "since"))
                return _json(page)
            case "/api/past":
                return _json(_with_words(self._past()))
            case "/api/enter":
                return self._enter(request)
            case "/api/link":
                return _json({"ticket": self.tickets.new_ticket()})
        return self._act(request)

    def _overviews(self, authorization: str) -> Stream:
        """Return the stream of overviews: the newest at once, then every further one that its reader has time for."""
        token = authorization.removeprefix("Bearer ")
        sent = 0

        def next_line(within: float) -> bytes | None:
            nonlocal sent
            if not self.tickets.admits(token):  # it has a viewer as long as the stream is read
                return None
            overview = self._source.next_after(sent, within) if sent else self._source.newest()
            if overview is None:
                return b""
            sent = overview.serial
            return self._line_of(overview)

        return Stream("application/x-ndjson", next_line)

    def _line_of(self, overview: Overview) -> bytes:
        """Return an overview as JSON, made once for all streams."""
        serial, line = self._line
        if serial != overview.serial:
            line = msgspec.json.encode(_with_words(msgspec.to_builtins(overview))) + b"\n"
            self._line = (overview.serial, line)
        return line

    def _enter(self, request: Request) -> Response:
        body = _decoded(request.body, _Ticket)
        token = self.tickets.enter(body.ticket) if body is not None else None
        return text(NO_TOKEN, HTTPStatus.UNAUTHORIZED) if token is None else _json({"token": token})

    # Actions

    def _act(self, request: Request) -> Response:
        """Do what a person asks for: one thing at a time, one a second. `Actions` notes it in the audit log."""
        name = request.path.removeprefix("/api/")
        act = self._action(name, request.body)
        if act is None:
            return text("", HTTPStatus.BAD_REQUEST)
        if not self._acting.acquire(blocking=False):
            return text("Another action is under way.\n", HTTPStatus.TOO_MANY_REQUESTS)
        try:
            if time.monotonic() - self._acted < ACTION_EVERY:
                return text("One action a second: try again.\n", HTTPStatus.TOO_MANY_REQUESTS)
            self._acted = time.monotonic()
            return act()
        except CoveyError as error:
            return text(f"{error}\n", HTTPStatus.CONFLICT)
        finally:
            self._acting.release()

    def _action(self, name: str, body: bytes) -> Callable[[], Response] | None:
        """Return what does what is asked for; None if the body does not fit."""
        actions = self._actions
        if name in ("checkpoint", "stop") and (run := _decoded(body, _RunMeant)) is not None:
            if name == "checkpoint":
                return lambda: _json({"text": actions.checkpoint(run.run)})
            return lambda: _json({"text": actions.stop(run.run, kill=run.kill)})
        if name in ("approve", "deny") and (machine := _decoded(body, _MachineMeant)) is not None:
            do = actions.approve if name == "approve" else actions.deny
            return lambda: _json({"text": do(machine.id)})
        if name == "code" and _decoded(body, _Nothing) is not None:
            return self._code
        return None

    def _code(self) -> Response:
        code = self._actions.join_code()
        return _json({"code": code, "qr": qr_rows(code.upper())})


def _first(asked: dict[str, list[str]], name: str) -> str:
    """Return an argument of the address; empty if there is none."""
    return printable(asked.get(name, [""])[0])


def _decoded(body: bytes, kind: type[_Body]) -> _Body | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _json(value: Any) -> Response:
    return Response(HTTPStatus.OK, "application/json", msgspec.json.encode(value))


def _read(name: str) -> bytes:
    return resources.files("covey.ui").joinpath("page", name).read_bytes()


def _with_words(value: Any) -> Any:
    """Return a value of builtins with words in place of floats that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _with_words(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(each) for each in value]
    return value
