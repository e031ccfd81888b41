"""The rules of the page, attacked with raw bytes: other users, other web pages, rebinding, wrong proofs, slow readers.

Each attack changes one thing of a request that would be answered; the first test shows that it would be.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import threading
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.support.player import JOIN_CODE, Player
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime import http_server
from covey.ui import server as page_server
from covey.ui.rules import HEADERS, TICKET_SECONDS, UNSEEN_SECONDS, Access, Tickets, uid_of
from covey.ui.server import ACCESS, FILES, PageServer
from covey.watch.overview import MachineSeen, Overview

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACTIONS = {
    "/api/checkpoint": {"run": "train"},
    "/api/stop": {"run": "train"},
    "/api/approve": {"id": "ab12"},
    "/api/deny": {"id": "ab12"},
    "/api/code": {},
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """A page with a viewer that has entered, and what the attacks start from."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.player = Player(Overview(1, 100.0, cluster="home", machines=(MachineSeen("a" * 64, "north"),)))
        self.page = PageServer(self.player, self.player, self.player, tickets=Tickets(self.clock))
        self.host = f"127.0.0.1:{self.page.port}"
        self.origin = f"http://{self.host}"
        self.token = self.enter(self.ticket())

    def ticket(self) -> str:
        return self.page.new_link().partition("#ticket=")[2]

    def enter(self, ticket: str) -> str:
        answer = self.post("/api/enter", {"ticket": ticket}, Authorization=None)
        assert answer.status == 200, answer
        return json.loads(answer.body)["token"]

    def headers(self, **changed: str | None) -> dict[str, str]:
        """Return the headers of a good request, with changes: underscores mean dashes, None means to leave it out."""
        good: dict[str, str | None] = {"Host": self.host, "Authorization": f"Bearer {getattr(self, 'token', '')}"}
        good |= {name.replace("_", "-"): value for name, value in changed.items()}
        return {name: value for name, value in good.items() if value is not None}

    def get(self, path: str, **changed: str | None) -> Answer:
        return self.ask("GET", path, self.headers(**changed))

    def post(self, path: str, body: object, **changed: str | None) -> Answer:
        usual: dict[str, str | None] = {"Origin": self.origin, "Content_Type": "application/json"}
        return self.ask("POST", path, self.headers(**(usual | changed)), json.dumps(body).encode())

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        length = [f"Content-Length: {len(body)}"] if body else []
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items()), *length])
        return self.say(head.encode() + b"\r\n\r\n" + body)

    def say(self, data: bytes) -> Answer:
        """Send bytes, and return the answer, which ends with the connection."""
        with socket.create_connection(("127.0.0.1", self.page.port), DEADLINE) as connection:
            connection.sendall(data)
            got = b""
            while more := connection.recv(1 << 16):
                got += more
        head, _, body = got.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return Answer(int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body)

    def stream(self) -> socket.socket:
        """Return a connection that has asked for overviews."""
        connection = socket.create_connection(("127.0.0.1", self.page.port), DEADLINE)
        head = "\r\n".join(f"{name}: {value}" for name, value in self.headers().items())
        connection.sendall(f"GET /api/overviews HTTP/1.1\r\n{head}\r\n\r\n".encode())
        return connection


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(page_server, "ACTION_EVERY", 0.0)
    made = Served()
    with made.page:
        yield made


def until(connection: socket.socket, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        more = connection.recv(1 << 16)
        assert more, f"it ended before {wanted!r} came: {got!r}"
        got += more
    return got


def test_who_has_entered_sees_and_acts(served: Served) -> None:
    for path, access in ACCESS.items():
        if access is Access.OPEN:
            assert served.get(path, Authorization=None).status == 200, path
    assert served.get("/api/history?run=train").body == b"[]"
    assert json.loads(served.get("/api/output?run=train").body)["lines"] == []
    for path, body in ACTIONS.items():
        assert served.post(path, body).status == 200, path
    assert [each[0] for each in served.player.done] == ["checkpoint", "stop", "approve", "deny", "code"]
    with served.stream() as stream:
        assert b'"cluster":"home"' in until(stream, b"north")


def test_every_method_but_the_one_of_a_path_is_refused(served: Served) -> None:
    good = served.headers(Origin=served.origin, Content_Type="application/json")
    others = {path: access for path, access in ACCESS.items() if access is not Access.OPEN or path in ("/", "/main.js")}
    for path, access in {**others, "/nothing": None}.items():
        for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "EVIL"):
            if access is not None and method == access.method:
                continue
            expected = 404 if access is None and method in ("GET", "POST") else 405
            body = b"{}" if method not in ("GET", "HEAD") else b""
            assert served.ask(method, path, good, body).status == expected, (method, path)
    assert served.player.done == []


def test_a_host_that_is_not_exactly_this_one_is_refused_with_what_to_open(served: Served) -> None:
    port = served.page.port
    wrong: tuple[str, ...] = (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"localhost:{port}",
        f"127.0.0.1:{port + 1}",
    )
    wrong += (f"[::1]:{port}", f"127.0.0.1.:{port}", f"127.0.0.1:0{port}", f"0.0.0.0:{port}", f"127.1:{port}", "")
    for host in wrong:
        for path in ("/", "/main.js", "/api/history", "/nothing"):
            answer = served.get(path, Host=host)
            assert answer.status == 421, (host, path, answer)
            assert b"open the link that `covey ui` has printed" in answer.body
    for path, body in ACTIONS.items():
        rebound = f"evil.example:{port}"
        assert served.post(path, body, Host=rebound, Origin=f"http://{rebound}").status == 421
    two = f"GET / HTTP/1.1\r\nHost: {served.host}\r\nHost: {served.host}\r\n\r\n".encode()
    assert served.say(two).status == 400
    assert served.say(b"GET / HTTP/1.1\r\n\r\n").status == 400
    assert served.say(b"GET / HTTP/1.0\r\n\r\n").status == 421
    absolute = f"GET http://evil.example/ HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode()
    assert served.say(absolute).status == 404
    assert served.player.done == []


def test_without_the_token_in_its_header_nothing_is_told_and_nothing_done(served: Served) -> None:
    token = served.token
    shown: tuple[str | None, ...] = (
        None,
        "",
        "Bearer ",
        "Bearer wrong",
        f"Basic {token}",
        token,
        f"Bearer {token}x",
        f"bearer {token}",
    )
    shown += (f"Bearer {token[:-1]}", f"Bearer {served.page.tickets.link_key}")
    for authorization in shown:
        for path in ("/api/overviews", f"/api/history?token={token}&ticket={served.ticket()}", "/api/output?run=train"):
            assert served.get(path, Authorization=authorization).status == 401, (authorization, path)
        assert served.post("/api/stop", ACTIONS["/api/stop"], Authorization=authorization).status == 401
    for path, body in ACTIONS.items():
        assert served.post(path, body, Authorization=None).status == 401, path
    for cookie in (token, f"token={token}", f"Bearer {token}"):
        assert served.get("/api/history", Authorization=None, Cookie=cookie).status == 401
    twice = f"GET /api/history HTTP/1.1\r\nHost: {served.host}\r\n" + f"Authorization: Bearer {token}\r\n" * 2 + "\r\n"
    assert served.say(twice.encode()).status == 401
    assert served.post("/api/link", {}).status == 401, "the token of a browser makes no links"
    assert served.player.done == []


def test_another_web_page_can_neither_act_nor_enter_nor_read(served: Served) -> None:
    port = served.page.port
    origins: tuple[str | None, ...] = (
        None,
        "null",
        "http://evil.example",
        f"https://127.0.0.1:{port}",
        f"http://localhost:{port}",
    )
    origins += (
        "http://127.0.0.1",
        f"http://127.0.0.1:{port + 1}",
        f"http://127.0.0.1:{port}/",
        f"http://127.0.0.1:{port}.evil.example",
    )
    actions = {**ACTIONS, "/api/enter": {"ticket": served.ticket()}}
    for path, body in actions.items():
        for origin in origins if path == "/api/stop" else origins[:3]:
            assert served.post(path, body, Origin=origin).status == 403, (path, origin)
        for site in ("cross-site", "same-site", "none", "same-origin, cross-site"):
            assert served.post(path, body, Sec_Fetch_Site=site).status == 403, (path, site)
        for kind in (
            None,
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "application/json;x",
        ):
            assert served.post(path, body, Content_Type=kind).status == 415, (path, kind)
        assert served.post(path, body, Sec_Fetch_Site="same-origin").status in (200, 401)
    for site in ("cross-site", "same-site", "none"):
        assert served.get("/api/history?run=x", Sec_Fetch_Site=site).status == 403
    assert [each[0] for each in served.player.done] == ["checkpoint", "stop", "approve", "deny", "code"]


def test_every_answer_has_the_headers_that_shut_other_pages_out(served: Served) -> None:
    answers = [
        *(served.get(path) for path in FILES),
        served.get("/api/history"),
        served.get("/api/history", Authorization=None),
        served.get("/", Host="evil.example"),
        served.get("/nothing"),
        served.ask("DELETE", "/", served.headers()),
        served.say(b"no http\r\n\r\n"),
        served.post("/api/stop", {"run": "x" * 5000}),
    ]
    assert [each.status for each in answers[len(FILES) :]] == [200, 401, 421, 404, 405, 400, 413]
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers[name.lower()] == value.lower()
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not {"set-cookie", "access-control-allow-origin", "location"} & set(answer.headers)
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in HEADERS["Content-Security-Policy"]


def test_a_ticket_is_worth_the_token_once_and_for_five_minutes(served: Served) -> None:
    assert TICKET_SECONDS == 300.0
    assert UNSEEN_SECONDS == 12 * 3600.0
    used = served.ticket()
    assert served.enter(used) == served.token
    again = served.post("/api/enter", {"ticket": used}, Authorization=None)
    assert (again.status, b"covey ui --link" in again.body) == (401, True)
    late = served.ticket()
    served.clock.now += TICKET_SECONDS - 1
    in_time = served.ticket()
    served.clock.now += 2
    assert served.post("/api/enter", {"ticket": late}, Authorization=None).status == 401
    assert served.enter(in_time) == served.token
    wrong: object
    for wrong in ({"ticket": ""}, {"ticket": 7}, {}, {"ticket": served.ticket(), "more": 1}, [], "x"):
        assert served.post("/api/enter", wrong, Authorization=None).status == 401, wrong
    many = [served.ticket() for _ in range(20)]
    assert [served.page.tickets.enter(each) is not None for each in many] == [False] * 4 + [True] * 16


def test_the_token_ends_after_twelve_hours_without_a_viewer_and_is_new_at_each_start(served: Served) -> None:
    served.clock.now += UNSEEN_SECONDS - 1
    assert served.get("/api/history").status == 200
    served.clock.now += UNSEEN_SECONDS - 1
    assert served.get("/api/history").status == 200, "it was seen in between"
    with served.stream() as stream:
        until(stream, b"north")
        served.clock.now += UNSEEN_SECONDS + 1
        assert served.get("/api/history").status == 401
        wait_until(lambda: stream.recv(1 << 16) == b"" or served.player.show(served.player.newest()) is None)
    old, served.token = served.token, served.enter(served.ticket())
    assert served.token != old
    assert served.get("/api/history").status == 200
    assert served.get("/api/history", Authorization=f"Bearer {old}").status == 401
    assert len({Tickets().enter(each.new_ticket()) for each in (Tickets(), Tickets()) if each}) == 1


def test_the_join_code_is_in_no_overview_and_only_an_action_shows_it(served: Served) -> None:
    with served.stream() as stream:
        seen = until(stream, b"north")
        answer = json.loads(served.post("/api/code", {}).body)
        served.player.show(replace(served.player.newest(), cluster="later"))
        seen += until(stream, b"later")
    assert answer["code"] == JOIN_CODE
    assert len(answer["qr"]) == len(answer["qr"][0]) >= 21
    assert JOIN_CODE.encode() not in seen
    for path in FILES:
        assert JOIN_CODE.encode() not in served.get(path).body


def test_actions_are_one_a_second_and_well_formed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.post("/api/stop", {"run": "train", "kill": True}).status == 200
    served.player.error = "train has ended\x1b[31m"
    refused = served.post("/api/checkpoint", {"run": "train"})
    assert (refused.status, refused.body) == (409, b"train has ended\x1b[31m\n")
    wrong: object
    for wrong in ({}, {"run": 7}, {"run": "train", "more": 1}, [], "train", {"run": "train", "kill": "yes"}):
        assert served.post("/api/stop", wrong).status == 400, wrong
    monkeypatch.setattr(page_server, "ACTION_EVERY", 3600.0)
    assert served.post("/api/stop", {"run": "train"}).status == 429
    assert served.player.done == [("kill", "train")]


def test_streams_keep_no_request_out_and_end_with_their_reader(served: Served) -> None:
    streams = [served.stream() for _ in range(http_server.HTTP_STREAMS)]
    try:
        for stream in streams:
            until(stream, b"north")
        assert served.get("/api/overviews").status == 503
        assert served.get("/api/history").status == 200
        streams.pop().close()
        wait_until(lambda: _first_line(served) == 200, "the place of a closed stream is not free")
    finally:
        for stream in streams:
            stream.close()


def _first_line(served: Served) -> int:
    with served.stream() as stream:
        return int(until(stream, b"\r\n").split()[1])


def test_a_viewer_that_does_not_read_is_dropped_and_others_get_the_newest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http_server.READ_PIECE_SECONDS == 10.0
    monkeypatch.setattr(http_server, "READ_PIECE_SECONDS", 3.0)  # long enough for the one that reads, on a busy machine
    large = tuple(MachineSeen(f"{number:064}", f"machine {number} " + "x" * 900) for number in range(300))
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with slow, served.stream() as good:
        slow.connect(("127.0.0.1", served.page.port))
        head = "\r\n".join(f"{name}: {value}" for name, value in served.headers().items())
        slow.sendall(f"GET /api/overviews HTTP/1.1\r\n{head}\r\n\r\n".encode())
        until(good, b"north")
        wait_until(lambda: _handled() == 2)

        def shown_to_the_other() -> bool:
            """Show one more, which the other gets; tell whether the slow one was dropped."""
            latest = served.player.show(Overview(0, 100.0, machines=large)).serial
            until(good, b'"serial":%d,' % latest)
            return _handled() == 1

        wait_until(shown_to_the_other, "the slow one is kept")
        served.player.show(Overview(0, 100.0, cluster="later"))
        until(good, b"later")


def _handled() -> int:
    """Return how many connections servers of this process handle."""
    return sum(thread.name == "covey-http-client" for thread in threading.enumerate())


def test_bodies_and_heads_are_bounded(served: Served) -> None:
    length = f"POST /api/stop HTTP/1.1\r\nHost: {served.host}\r\nContent-Length: 4097\r\n\r\n".encode()
    assert served.say(length).status == 413
    chunked = f"POST /api/stop HTTP/1.1\r\nHost: {served.host}\r\nTransfer-Encoding: chunked\r\n\r\n1001\r\n".encode()
    assert served.say(chunked + b"x" * 4097 + b"\r\n").status == 413
    both = f"POST /api/stop HTTP/1.1\r\nHost: {served.host}\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}"
    assert served.say(both.encode()).status == 400
    assert served.say(f"GET / HTTP/1.1\r\nHost: {served.host}\r\nX: {'y' * 9000}".encode()).status == 431
    folded = f"GET / HTTP/1.1\r\nHost: {served.host}\r\nHost : evil.example\r\n\r\n"
    assert served.say(folded.encode()).status == 400
    assert served.player.done == []


def test_files_of_the_page_are_the_only_ones(served: Served) -> None:
    for path in (
        "/../server.py",
        "/page/main.js",
        "//main.js",
        "/main.js/",
        "/%6dain.js",
        "/index.html",
        "/.",
        "/etc/passwd",
    ):
        assert served.get(path).status == 404, path


NOBODY = 65534


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell whose the other end is")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_this_machine_is_refused_although_it_has_the_token(served: Served) -> None:
    answers: list[int] = []

    def ask_as_nobody() -> None:
        ctypes.CDLL(None).setfsuid(NOBODY)  # of this thread alone: the kernel notes it as the owner of its sockets
        answers.extend(served.get(path).status for path in ("/", "/api/history"))
        answers.append(served.post("/api/stop", {"run": "train"}).status)

    thread = threading.Thread(target=ask_as_nobody)
    thread.start()
    thread.join(DEADLINE)
    assert answers == [403, 403, 403]
    assert served.player.done == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell whose the other end is")
def test_whose_an_end_is_comes_from_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        for address in ("127.0.0.1", "::ffff:127.0.0.1"):
            with socket.create_connection((address, here[1])) as end:
                accepted, peer = listener.accept()
                with accepted:
                    assert uid_of(peer, here) == os.geteuid()
                    assert uid_of((peer[0], peer[1] ^ 1), here) is None
                assert end


def test_texts_of_other_nodes_never_become_markup() -> None:
    """Every text reaches the page through `textContent` and attributes: nothing there parses markup."""
    folder = resources.files("covey.ui").joinpath("page")
    for path, (name, _) in FILES.items():
        source = folder.joinpath(name).read_text()
        if path.endswith(".js"):
            parsing = (
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|srcdoc|import\("
            )
            assert not re.search(parsing, source), path
        assert not re.search(r"https?://(?!www\.w3\.org/)", source), f"{path} names another host"
        assert not re.search(r"\bon\w+=[\"']|<script(?! type=\"module\" src=\"/main\.js\")|style=\"", source), path
