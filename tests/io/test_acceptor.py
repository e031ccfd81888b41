"""The acceptor: of too many, unknown diallers go first; idle ones run out of time; those with the key are led on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConnectError
from covey.runtime.links import acceptor as acceptor_module
from covey.runtime.links import probe as probe_module
from covey.runtime.links.acceptor import NODE_STRANGERS_AT_ONCE, Acceptor
from covey.runtime.links.handshake import LinkCredentials, connect, receive_exactly
from covey.runtime.links.limits import SOURCE_CONNECTIONS_BURST, SOURCE_CONNECTIONS_RATE
from covey.runtime.links.probe import best_way, sound, throughput
from covey.wire import door

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CREDENTIALS = LinkCredentials(KEY)
Where = tuple[str, int]


@pytest.fixture(autouse=True)
def _in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dialler is sent away, and no probe gives up, because this machine stands still."""
    monkeypatch.setattr(acceptor_module, "NODE_STRANGER_SECONDS", DEADLINE)
    monkeypatch.setattr(probe_module, "PROBE_SECONDS", DEADLINE)


def run(work: Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE), contextlib.AsyncExitStack() as stack:
            await work(stack)

    asyncio.run(bounded())


def listener(ip: str = "127.0.0.1") -> socket.socket:
    sock = socket.create_server((ip, 0), backlog=256)
    sock.setblocking(False)
    return sock


@contextlib.asynccontextmanager
async def opened(listener: socket.socket, **options: Any) -> AsyncIterator[tuple[Acceptor, Where]]:
    acceptor = Acceptor([listener], KEY, "test", **options)
    where = listener.getsockname()
    acceptor.open()
    try:
        yield acceptor, where
    finally:
        await acceptor.close()


class Visitor:
    """A dialler at the door."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    async def come(cls, stack: contextlib.AsyncExitStack, where: Where, ip: str = "127.0.0.1") -> Visitor:
        """Connect from a loopback address, and stay until the test is over."""
        sock = stack.enter_context(socket.socket())
        sock.setblocking(False)
        sock.bind((ip, 0))
        await asyncio.get_running_loop().sock_connect(sock, where)
        return cls(sock)

    async def challenge(self) -> bytes:
        return await receive_exactly(self.sock, door.CHALLENGE_BYTES)

    async def first(self) -> bytes:
        """Return the first bytes that come; none if the other side hangs up."""
        with contextlib.suppress(ConnectionError):
            return await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        return b""

    async def answer(self, purpose: door.Purpose, key: bytes = KEY) -> None:
        challenge = await self.challenge()
        answer = door.answer(key, challenge, purpose, secrets.token_bytes(door.BOUND_BYTES))
        await asyncio.get_running_loop().sock_sendall(self.sock, answer)

    async def rest(self) -> bytes:
        """Read until the other side closes."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.get_running_loop().sock_recv(self.sock, 4096):
                data += piece
        return data


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for says nothing when it happens
        await asyncio.sleep(0.002)


def test_diallers_with_the_key_are_led_to_the_node_that_they_dialled() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        came: dict[str, bytes] = {}

        async def on_link(sock: socket.socket, said: bytes) -> None:
            came["link"] = said
            with sock:
                await asyncio.get_running_loop().sock_sendall(sock, b"a link")

        async def on_lane(sock: socket.socket) -> None:
            came["lane"] = b""
            with sock:
                await asyncio.get_running_loop().sock_sendall(sock, b"a lane")

        acceptor.give_links(on_link)
        acceptor.give_lanes(on_lane)
        sock, said = await connect(where, CREDENTIALS, door.Purpose.LINK)
        with sock:
            assert await receive_exactly(sock, 6) == b"a link"
        assert came == {"link": said}
        sock, _ = await connect(where, CREDENTIALS, door.Purpose.LANE)
        with sock:
            assert await receive_exactly(sock, 6) == b"a lane"
        assert set(came) == {"link", "lane"}
        assert acceptor.turned_away == 0
        assert acceptor.about_strangers() == ""

    run(work)


def test_no_dialler_is_led_to_where_no_node_waits() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        _, where = await stack.enter_async_context(opened(listener()))
        for purpose in (door.Purpose.LINK, door.Purpose.LANE):
            visitor = await Visitor.come(stack, where)
            await visitor.answer(purpose)
            assert await visitor.rest() == b""

    run(work)


def test_a_probe_gets_its_words_back_and_can_measure_what_gets_through() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        _, where = await stack.enter_async_context(opened(listener()))
        began = time.perf_counter()
        sounding = await sound(where, CREDENTIALS)
        assert sounding.problem == ""
        assert 0 < sounding.round_trip < time.perf_counter() - began
        began = time.perf_counter()
        rate = await throughput(where, CREDENTIALS, 1 << 20, DEADLINE)
        assert rate > (1 << 19) / (time.perf_counter() - began), "of the second half, in less than the whole time"
        refused = await sound(where, LinkCredentials(OTHER_KEY))
        assert refused.round_trip < 0
        assert refused.problem
        closed = listener()
        dead_end = closed.getsockname()
        closed.close()
        assert (await sound(dead_end, CREDENTIALS)).round_trip < 0
        way, taken = await best_way([dead_end, where], CREDENTIALS, dead_end)
        assert way == where
        assert taken > 0
        assert await best_way([dead_end], CREDENTIALS, where) == (where, -1.0)

    run(work)


def test_the_one_too_many_at_the_door_sends_the_oldest_stranger_away() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        crowd = []
        for _ in range(NODE_STRANGERS_AT_ONCE):
            crowd.append(await Visitor.come(stack, where))
            await crowd[-1].challenge()  # each is at the door before the next one comes
        assert acceptor.turned_away == 0
        await (await Visitor.come(stack, where)).challenge()
        assert await crowd[0].rest() == b""
        assert acceptor.turned_away == 1
        assert len(acceptor._strangers) == NODE_STRANGERS_AT_ONCE
        assert {visitor.sock.getsockname() for visitor in crowd[1:]} <= {
            sock.getpeername() for sock in acceptor._strangers
        }

    run(work)


async def assert_greeted(acceptor: Acceptor, visitor: Visitor, challenge: bytes) -> None:
    """Check that a visitor at the door is still there: it answers its challenge, and is passed on."""
    greeted = asyncio.get_running_loop().create_future()

    async def on_link(sock: socket.socket, said: bytes) -> None:
        sock.close()
        greeted.set_result(said)

    acceptor.give_links(on_link)
    answer = door.answer(KEY, challenge, door.Purpose.LINK, b"s" * door.BOUND_BYTES)
    await asyncio.get_running_loop().sock_sendall(visitor.sock, answer)
    assert await greeted == challenge + answer


def test_in_a_crowd_those_from_a_members_address_stay() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        acceptor.member_ips.add("127.0.0.2")
        member = await Visitor.come(stack, where, "127.0.0.2")
        challenge = await member.challenge()
        for _ in range(4 * NODE_STRANGERS_AT_ONCE):
            await (await Visitor.come(stack, where)).challenge()
        assert acceptor.turned_away == 3 * NODE_STRANGERS_AT_ONCE + 1
        await assert_greeted(acceptor, member, challenge)

    run(work)


def test_in_a_crowd_the_source_with_most_connections_gives_way() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        lonely = await Visitor.come(stack, where, "127.0.0.7")
        challenge = await lonely.challenge()
        for _ in range(4 * NODE_STRANGERS_AT_ONCE):
            await (await Visitor.come(stack, where, "127.0.0.8")).challenge()
        await assert_greeted(acceptor, lonely, challenge)

    run(work)


def test_a_source_that_sends_too_many_strangers_is_not_even_challenged_and_others_are() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        acceptor.member_ips.add("127.0.0.3")
        came = time.monotonic()
        challenged = 0
        for _ in range(2 * int(SOURCE_CONNECTIONS_BURST)):
            with contextlib.closing(socket.socket()) as sock:
                sock.setblocking(False)
                sock.bind(("127.0.0.9", 0))
                await asyncio.get_running_loop().sock_connect(sock, where)
                challenged += bool(await Visitor(sock).first())
        allowed = SOURCE_CONNECTIONS_BURST + SOURCE_CONNECTIONS_RATE * (time.monotonic() - came)
        assert SOURCE_CONNECTIONS_BURST <= challenged <= allowed
        assert acceptor.arrivals.refused == 2 * SOURCE_CONNECTIONS_BURST - challenged
        for ip in ("127.0.0.2", "127.0.0.3"):
            assert await (await Visitor.come(stack, where, ip)).challenge()

    run(work)


def test_nodes_that_hold_the_key_may_come_as_often_as_they_like() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        for _ in range(2 * int(SOURCE_CONNECTIONS_BURST)):
            sock, _ = await connect(where, CREDENTIALS, door.Purpose.PROBE)
            with sock:
                await asyncio.get_running_loop().sock_sendall(sock, b"ping1234")
                assert await receive_exactly(sock, 8) == b"ping1234"
        assert acceptor.arrivals.refused == acceptor.turned_away == 0

    run(work)


def test_a_member_gets_in_while_strangers_keep_coming() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        came = asyncio.Event()

        async def crowd() -> None:
            while True:
                await Visitor.come(stack, where)
                came.set()

        task = asyncio.create_task(crowd())
        try:
            await came.wait()
            for _ in range(5):
                sounding = await sound(where, CREDENTIALS)
                assert sounding.round_trip > 0, sounding.problem
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert len(acceptor._strangers) <= NODE_STRANGERS_AT_ONCE

    run(work)


def test_a_dialler_that_sends_one_byte_at_a_time_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "NODE_STRANGER_SECONDS", 0.3)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        slow = await Visitor.come(stack, where)
        await slow.challenge()
        gone = asyncio.create_task(slow.rest())
        sent = 0
        while not gone.done():
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(slow.sock, b"x")
                sent += 1
            await asyncio.wait([gone], timeout=0.02)
        assert await gone == b""
        assert sent < door.DOOR_ANSWER_BYTES
        await until(lambda: acceptor.turned_away == 1)

    run(work)


def test_wrong_answers_are_refused_with_one_line_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covey")

    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        for _ in range(50):
            visitor = await Visitor.come(stack, where)
            await visitor.answer(door.Purpose.LINK, OTHER_KEY)
            assert await visitor.rest() == b""
        assert acceptor.turned_away == 50
        assert not acceptor._strangers
        assert acceptor.about_strangers().startswith("50 connections were refused because they did not have")

    run(work)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    words = "test has refused a connection: the other end does not have this cluster's key"
    assert lines == [("WARNING", words)]


def test_a_failed_greeting_is_told_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covey")

    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        problems: list[BaseException] = [AuthError("not of this cluster"), OSError("broken"), RuntimeError("a bug")]

        async def on_link(sock: socket.socket, said: bytes) -> None:
            with sock:
                raise problems.pop(0)

        acceptor.give_links(on_link)
        while problems:
            visitor = await Visitor.come(stack, where)
            await visitor.answer(door.Purpose.LINK)
            assert await visitor.rest() == b""
        await until(lambda: not acceptor._guests)
        assert acceptor.turned_away == 2

    run(work)
    assert [record.levelname for record in caplog.records] == [
        "WARNING",
        "INFO",
        "ERROR",
    ]  # a bug of ours is not hidden


def test_the_one_too_many_of_the_guests_sends_the_oldest_away_unless_it_has_a_members_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor_module, "GUESTS_AT_ONCE", 3)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        acceptor.member_ips.add("127.0.0.2")
        came, enough = asyncio.Semaphore(0), asyncio.Event()

        async def on_link(sock: socket.socket, said: bytes) -> None:
            with sock:
                came.release()
                await enough.wait()
                await asyncio.get_running_loop().sock_sendall(sock, b"welcome")

        acceptor.give_links(on_link)
        guests = []
        for ip in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"):
            guests.append(await Visitor.come(stack, where, ip))
            await guests[-1].answer(door.Purpose.LINK)
            await came.acquire()  # each is being greeted before the next one comes
        assert await guests.pop(1).rest() == b""
        assert acceptor.turned_away == 1
        enough.set()
        assert [await guest.rest() for guest in guests] == [b"welcome"] * 3
        await until(lambda: not acceptor._guests)

    run(work)


def test_the_last_descriptors_are_not_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialler that comes when few are left is sent away at once, and let in again when there are more."""

    async def work(stack: contextlib.AsyncExitStack) -> None:
        acceptor, where = await stack.enter_async_context(opened(listener()))
        with monkeypatch.context() as patched:
            patched.setattr("covey.runtime.links.acceptor.is_scarce", lambda _descriptor: True)
            for _ in range(100):
                visitor = await Visitor.come(stack, where)
                assert await visitor.rest() == b""
        assert acceptor.turned_away == 100
        assert (await sound(where, CREDENTIALS)).round_trip > 0

    run(work)


def test_connections_by_an_excluded_interface_are_not_even_challenged() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        allows = functools.partial(str.__eq__, "127.0.0.1")
        acceptor, where = await stack.enter_async_context(opened(listener("0.0.0.0"), allows=allows))
        unwanted = await Visitor.come(stack, ("127.0.0.3", where[1]))
        assert await unwanted.rest() == b""
        assert acceptor.turned_away == 1
        assert (await sound(("127.0.0.1", where[1]), CREDENTIALS)).round_trip > 0

    run(work)


@pytest.mark.parametrize("moment", ["connected", "at the door", "greeted", "probed"])
def test_closing_ends_whatever_is_going_on_and_leaves_no_socket(moment: str) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        listening = listener()
        acceptor, where = await stack.enter_async_context(opened(listening))
        began, forever = asyncio.Event(), asyncio.Event()

        async def on_link(sock: socket.socket, said: bytes) -> None:
            with sock:
                began.set()
                await forever.wait()

        acceptor.give_links(on_link)
        crowd = [await Visitor.come(stack, where) for _ in range(10)]
        for visitor in crowd:
            if moment == "at the door":
                await visitor.challenge()
            elif moment != "connected":
                await visitor.answer(door.Purpose.LINK if moment == "greeted" else door.Purpose.PROBE)
        if moment == "greeted":
            await began.wait()
        await acceptor.close()
        await acceptor.close()
        assert listening.fileno() == -1
        for visitor in crowd:
            assert len(await visitor.rest()) in (0, door.CHALLENGE_BYTES)
        assert not acceptor._strangers
        assert not acceptor._guests
        with pytest.raises(ConnectError):
            await connect(where, CREDENTIALS, door.Purpose.LINK)

    run(work)


def test_a_unix_socket_has_a_door_too() -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="t-", dir="/tmp"))
        local = socket.socket(socket.AF_UNIX)
        local.bind(f"{folder}/node.sock")
        local.listen(8)
        local.setblocking(False)
        await stack.enter_async_context(opened(local))
        assert (await sound(f"{folder}/node.sock", CREDENTIALS)).round_trip > 0
        assert (await sound(f"{folder}/node.sock", LinkCredentials(OTHER_KEY))).round_trip < 0

    run(work)


def test_a_wrong_key_is_told_although_something_harmless_was_told_just_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        acceptor = Acceptor([listener], secrets.token_bytes(32), "the run")
        acceptor.open()
        try:
            address = listener.getsockname()
            _, scanner = await asyncio.open_connection(*address)
            scanner.close()
            await scanner.wait_closed()
            while not acceptor.turned_away:  # noqa: ASYNC110 - the counter has no event to wait for
                await asyncio.sleep(0.005)
            reader, writer = await asyncio.open_connection(*address)
            await reader.readexactly(door.CHALLENGE_BYTES)
            writer.write(bytes(door.DOOR_ANSWER_BYTES))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        finally:
            await acceptor.close()

    with caplog.at_level(logging.INFO, "covey"):
        asyncio.run(asyncio.wait_for(work(), DEADLINE))
    assert any(
        record.levelno == logging.WARNING and "does not have this cluster's key" in record.message
        for record in caplog.records
    )
