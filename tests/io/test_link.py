"""Links: whole frames in order, bounded queues both ways, and an end that both sides hear of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Any, TypeVarTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.secured import secure_end
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.net.keys.tls import Credentials
from covey.runtime.links.link import BACKLOG_LIMIT, UNREAD_LIMIT, Link
from covey.wire.decoding import CONTROL_LIMIT, frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

Args = TypeVarTuple("Args")
KIB = 1 << 10
both_kinds = pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await work()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def pair(*, secure: bool) -> AsyncIterator[tuple[Link, Link]]:
    """Two ends of one link."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
    if secure:
        sides = [Credentials(b"a" * 32, Ed25519PrivateKey.generate()) for _ in range(2)]
        (dialler, _), (acceptor, _) = await asyncio.gather(
            secure_end(one, sides[0], dialled=True), secure_end(other, sides[1], dialled=False)
        )
    else:
        dialler, acceptor = await Link.plain(one), await Link.plain(other)
    try:
        yield dialler, acceptor
    finally:
        for link in (dialler, acceptor):
            link.abort()
            await link.ended.wait()


@contextlib.asynccontextmanager
async def link_to(sock: socket.socket) -> AsyncIterator[Link]:
    link = await Link.plain(sock)
    try:
        yield link
    finally:
        link.abort()
        await link.ended.wait()


class Owner:
    """Keeps what a link hands over."""

    def __init__(self, link: Link, objection: Callable[[bytes], None] = lambda _body: None) -> None:
        self.frames: list[bytes] = []
        self.ends = 0
        self._objection = objection
        self._changed = asyncio.Event()
        link.attach(self._heard, self._ended)

    def _heard(self, body: bytes) -> None:
        self._objection(body)
        self.frames.append(body)
        self._changed.set()

    def _ended(self) -> None:
        self.ends += 1
        self._changed.set()

    async def until(self, condition: Callable[[*Args], bool], *args: *Args) -> None:
        while not condition(*args):
            self._changed.clear()
            await self._changed.wait()


def transport_of(link: Link) -> asyncio.Transport:
    assert link._transport is not None
    return link._transport


@both_kinds
def test_frames_of_all_sizes_arrive_whole_and_in_order_both_ways(secure: bool) -> None:
    bodies = [bytes([number % 251]) * size for number, size in enumerate((0, 1, 5, 4096, 70_000, CONTROL_LIMIT, 3))]

    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            owners = Owner(dialler), Owner(acceptor)
            for body in bodies:
                dialler.send(body)
                acceptor.send(body[::-1] + b"!"[: CONTROL_LIMIT - len(body)])
            for owner in owners:
                await owner.until(lambda owner: len(owner.frames) == len(bodies), owner)
            assert owners[1].frames == bodies
            assert owners[0].frames == [body + b"!"[: CONTROL_LIMIT - len(body)] for body in bodies]

    run(work)


@both_kinds
def test_a_link_knows_its_addresses(secure: bool) -> None:
    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            assert (dialler.local_ip, dialler.remote_ip) == (acceptor.remote_ip, acceptor.local_ip)
            assert dialler.address.startswith("127.0.0.1:")
            assert dialler.is_open
            assert acceptor.is_open

    run(work)


def test_frames_wait_for_receive_and_then_for_their_owner_however_the_bytes_arrive() -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            async with link_to(near) as link:
                stream = b"".join(frame(body) for body in (b"one", b"", b"three", b"four"))
                for byte in stream[:-2]:
                    far.send(bytes([byte]))
                assert [await link.receive() for _ in range(2)] == [b"one", b""]
                owner = Owner(link)
                far.send(stream[-2:])
                await owner.until(lambda: len(owner.frames) == 2)
                assert owner.frames == [b"three", b"four"]

    run(work)


@both_kinds
def test_the_last_words_of_a_peer_are_heard_before_its_end(secure: bool) -> None:
    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            owner = Owner(acceptor)
            for number in range(100):
                dialler.send(b"%d" % number * 1000)
            dialler.close()
            await owner.until(lambda: owner.ends == 1)
            assert owner.frames == [b"%d" % number * 1000 for number in range(100)]
            assert acceptor.error is None
            assert not acceptor.is_open
            acceptor.send(b"to no peer")

    run(work)


def test_the_last_words_of_a_peer_are_heard_even_if_a_write_fails_first() -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        async with link_to(near) as link:
            owner = Owner(link)
            far.sendall(frame(b"I am closing the group"))
            far.close()
            link.send(b"anyone?")  # fails before the loop has looked whether there is something to read
            await owner.until(lambda: owner.ends == 1)
            assert owner.frames == [b"I am closing the group"]

    run(work)


def test_an_owner_that_comes_after_the_end_gets_what_waited_and_the_end_once() -> None:
    async def work() -> None:
        async with pair(secure=False) as (dialler, acceptor):
            dialler.send(b"goodbye")
            dialler.close()
            await acceptor.ended.wait()
            owner = Owner(acceptor)
            assert (owner.frames, owner.ends) == ([b"goodbye"], 1)

    run(work)


@both_kinds
def test_a_peer_that_never_reads_costs_a_bounded_backlog_and_no_waiting(secure: bool) -> None:
    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            transport_of(acceptor).pause_reading()
            body = bytes(64 * KIB)
            for _ in range(400):
                dialler.send(body)
                await asyncio.sleep(0)
            waiting = transport_of(dialler).get_write_buffer_size()
            assert waiting <= BACKLOG_LIMIT + len(frame(body)) + 64 * KIB
            assert dialler.is_open
            owner = Owner(acceptor)
            await owner.until(lambda: len(owner.frames) >= 4)
            assert set(owner.frames) == {body}  # those that were dropped were dropped whole

    run(work)


@both_kinds
def test_frames_that_are_not_taken_stop_the_peer_and_all_arrive_in_the_end(secure: bool) -> None:
    count, body = 3000, bytes(4 * KIB)

    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            sent = 0
            while sent < count:
                if transport_of(dialler).get_write_buffer_size() < BACKLOG_LIMIT // 2:
                    dialler.send(struct.pack("<I", sent) + body)
                    sent += 1
                elif len(acceptor._frames) <= UNREAD_LIMIT:
                    await asyncio.sleep(0)
                else:
                    break
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            in_one_read = (1 << 18) // len(body) + 1
            assert UNREAD_LIMIT < len(acceptor._frames) <= UNREAD_LIMIT + 4 * in_one_read
            owner = Owner(acceptor)
            await owner.until(lambda: len(owner.frames) == sent)
            assert [struct.unpack_from("<I", frame)[0] for frame in owner.frames] == list(range(sent))

    run(work)


@pytest.mark.parametrize("length", [CONTROL_LIMIT + 1, 2**32 - 1])
def test_a_frame_beyond_the_limit_cuts_the_peer_off_at_once(length: int) -> None:
    async def work() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            async with link_to(near) as link:
                owner = Owner(link)
                far.sendall(frame(b"good") + struct.pack("<I", length) + b"never read")
                await owner.until(lambda: owner.ends == 1)
                assert isinstance(link.error, RemoteProtocolError)
                assert not link.is_open
                far.settimeout(DEADLINE)
                with contextlib.suppress(ConnectionResetError):
                    assert far.recv(1) == b""

    run(work)


@both_kinds
def test_an_owner_that_hears_nonsense_cuts_the_peer_off_and_hears_no_more(secure: bool) -> None:
    def objection(body: bytes) -> None:
        if body == b"nonsense":
            raise RemoteProtocolError("not a control message")

    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            owner, other_end = Owner(acceptor, objection), Owner(dialler)
            for body in (b"sense", b"nonsense"):
                dialler.send(body)
            await owner.until(lambda: owner.ends == 1)
            assert owner.frames == [b"sense"]
            assert str(acceptor.error) == "not a control message"
            await other_end.until(lambda: other_end.ends == 1)

    run(work)


def test_receive_after_the_end_is_an_error_that_says_so() -> None:
    async def work() -> None:
        async with pair(secure=False) as (dialler, acceptor):
            dialler.send(b"only this")
            dialler.close()
            assert await acceptor.receive() == b"only this"
            for _ in range(2):
                with pytest.raises(ConnectError, match="the connection ended in the greeting: closed"):
                    await acceptor.receive()

    run(work)


@both_kinds
def test_closing_and_aborting_twice_is_fine(secure: bool) -> None:
    async def work() -> None:
        async with pair(secure=secure) as (dialler, acceptor):
            ends = Owner(dialler), Owner(acceptor)
            dialler.close()
            dialler.close()
            dialler.abort()
            acceptor.abort()
            for end in ends:
                await end.until(lambda end: end.ends == 1, end)
            acceptor.close()

    run(work)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_handshake_that_is_cancelled_at_any_moment_leaves_no_transport_on_a_closed_socket(dialled: bool) -> None:
    """Or else it would go on reading and writing at a number that is another connection's by then."""

    async def work() -> None:
        loop: Any = asyncio.get_running_loop()
        sides = [Credentials(b"a" * 32, Ed25519PrivateKey.generate()) for _ in range(2)]
        for turns in range(100):
            near, far = socket.socketpair()
            for sock in (near, far):
                sock.setblocking(False)
            number = near.fileno()
            shaking = asyncio.create_task(secure_end(near, sides[0], dialled=dialled))
            other = asyncio.create_task(secure_end(far, sides[1], dialled=not dialled))
            for _ in range(turns):
                await asyncio.sleep(0)
            shaking.cancel()
            (end,) = await asyncio.gather(shaking, return_exceptions=True)
            near.close()  # as every caller does that made a socket and got no link for it
            transport = loop._transports.get(number)
            is_alive = transport is not None and not transport.is_closing()
            (far_end,) = await asyncio.gather(other, return_exceptions=True)
            links = [each[0] for each in (end, far_end) if isinstance(each, tuple)]
            for link in links:
                link.abort()
                await link.ended.wait()
            far.close()
            if len(links) == 2:
                return  # it was done before it could be cancelled
            assert not is_alive, f"cancelled in turn {turns}"
        raise AssertionError("the handshake never ended")

    run(work)


def test_a_handshake_with_a_peer_that_says_nothing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.runtime.links.link.HANDSHAKE_SECONDS", 0.2)

    async def work() -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far:
            with pytest.raises(ConnectError, match="TLS handshake"):
                await secure_end(near, Credentials(b"a" * 32, Ed25519PrivateKey.generate()), dialled=False)
            near.close()

    run(work)
