"""Nothing between two processes can make them speak an older protocol than they would."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.attackers import BROKEN, Insider, Victim, is_hung_up, welcomes_members
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, CoveyError
from covey.lab.fuzz.targets import ODD_VERSIONS
from covey.net.keys.tls import Credentials
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import Greeter, LinkCredentials, RefusedError, admit, dial
from covey.wire import messages
from covey.wire.secret import ClusterSecret
from covey.wire.versions import Agreement, Versions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from covey.runtime.links.link import Link

SECRET = ClusterSecret("lab", bytes(range(32)))
ONE, TWO = (Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (1, 2))
LATER = Versions(3, 7, ("echo", "tide"))
SPOKEN = messages.encode(LATER)
OLDER = SPOKEN.replace(b"\x03\x07", b"\x03\x03")
"""The same number of bytes, with which both would speak protocol 3."""
LESS = SPOKEN.replace(b"\xa4tide", b"\xa4zzzz")
"""And with which they would not use a feature."""


def card_of(private: Ed25519PrivateKey | None) -> messages.Card:
    id = b"" if private is None else private.public_key().public_bytes_raw()
    contact = messages.Contact("host", (messages.Address("127.0.0.1", 1),), "")
    return messages.Card(id, b"l" * 16, "n", "n", 1, contact)


def credentials(kind: str, private: Ed25519PrivateKey) -> LinkCredentials:
    if kind == "token":
        return LinkCredentials.of_token(b"t" * 32)
    return LinkCredentials(SECRET.derive("door"), tls=Credentials(SECRET.derive("node-ca"), private))


class Host:
    """A process that accepts links and speaks LATER; all that becomes of them is kept."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("covey.runtime.links.handshake.OURS", LATER)
        self._kind = kind
        self.links: list[Link] = []
        self.errors: list[BaseException] = []

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[str, int]]:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        own = credentials(self._kind, TWO)
        acceptor = Acceptor([listener], own.door_key, "test")

        async def on_link(sock: socket.socket, said: bytes) -> None:
            card = card_of(TWO if self._kind == "tls" else None)
            welcome = messages.Welcome(-1, card, versions=LATER)
            try:
                admitted = await admit(sock, own, said, Greeter(card, lambda _hello, _id: welcome))
            except (CoveyError, OSError, TimeoutError) as error:
                self.errors.append(error)
                raise
            assert admitted is not None
            self.links.append(admitted[0])

        acceptor.give_links(on_link)
        acceptor.open()
        try:
            yield listener.getsockname()
        finally:
            await acceptor.close()
            for link in self.links:
                link.abort()
                await link.ended.wait()


@contextlib.asynccontextmanager
async def between(where: tuple[str, int], there: Edit, back: Edit) -> AsyncIterator[tuple[str, int]]:
    """A third party that passes bytes on, and changes those of each direction as it likes."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, edit: Edit) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(edit(data))
                await writer.drain()
        writer.close()

    pipes: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection(*where)
        writers.append(far_writer)
        for each in (pass_on(reader, far_writer, there), pass_on(far_reader, writer, back)):
            pipes.append(asyncio.ensure_future(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


if TYPE_CHECKING:
    Edit = Callable[[bytes], bytes]


def swap(old: bytes, new: bytes, seen: list[bool]) -> Edit:
    """Change what both ends say in the clear under the proof of a token; note whether it was seen."""

    def edit(data: bytes) -> bytes:
        seen.append(old in data)
        return data.replace(old, new)

    return edit


def flip(*, after: int) -> Edit:
    """Change one bit of each piece after so many bytes: what TLS protects follows the first messages of a handshake."""
    count = 0

    def edit(data: bytes) -> bytes:
        nonlocal count
        count += len(data)
        return data if count <= after else data[:-1] + bytes((data[-1] ^ 1,))

    return edit


def same(data: bytes) -> bytes:
    return data


def greet(kind: str, monkeypatch: pytest.MonkeyPatch, there: Edit = same, back: Edit = same) -> tuple[Host, Any]:
    """Let one process dial another by way of a third party; return the acceptor, and what the dialler got."""
    host = Host(kind, monkeypatch)

    async def work() -> Any:
        async with host.listening() as where, between(where, there, back) as way:
            card = card_of(ONE if kind == "tls" else None)
            hello = messages.Hello(3, secrets.token_bytes(32), "visitor", "", -1, 0, "", card, versions=LATER)
            try:
                link, _, _ = await dial(way, credentials(kind, ONE), hello)
            except (CoveyError, RefusedError) as error:
                return error
            agreed = link.agreed
            link.abort()
            await link.ended.wait()
            return agreed

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work()

    return host, asyncio.run(bounded())


@pytest.mark.parametrize("kind", ["token", "tls"])
def test_two_processes_that_are_left_alone_speak_the_newest_protocol(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, agreed = greet(kind, monkeypatch)
    assert agreed == Agreement(7, frozenset({"echo", "tide"}))
    assert [link.agreed for link in host.links] == [agreed]


@pytest.mark.parametrize("less", [OLDER, LESS], ids=["version", "feature"])
def test_a_range_that_is_changed_on_the_way_ends_the_greeting_of_ranks(
    less: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    host, outcome = greet("token", monkeypatch, there=swap(SPOKEN, less, seen))
    assert any(seen)
    assert isinstance(outcome, CoveyError)
    assert host.links == []
    assert [type(error) for error in host.errors] == [AuthError]
    seen.clear()
    _, outcome = greet("token", monkeypatch, back=swap(SPOKEN, less, seen))
    assert any(seen)
    assert isinstance(outcome, AuthError)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_a_bit_that_is_changed_under_tls_ends_the_greeting_of_nodes(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    host, outcome = greet("tls", monkeypatch, **{direction: swap(SPOKEN, OLDER, seen)})
    assert not any(seen), "what they speak is not readable on the way"
    assert outcome == Agreement(7, frozenset({"echo", "tide"}))
    host, outcome = greet("tls", monkeypatch, **{direction: flip(after=700)})
    assert isinstance(outcome, CoveyError)
    assert direction == "back" or host.links == []


def test_no_connection_is_tried_again_with_an_older_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party that breaks each greeting gets no second one with less in it: every Hello says the same."""
    said: list[bytes] = []

    def spoil(data: bytes) -> bytes:
        said.append(data)
        return data if SPOKEN not in data else data[:-1] + bytes((data[-1] ^ 1,))

    for _ in range(3):
        _, outcome = greet("token", monkeypatch, there=spoil)
        assert isinstance(outcome, CoveyError)
    assert sum(SPOKEN in data for data in said) == 3


def test_impossible_ranges_and_features_end_the_connection_and_the_node_goes_on(prey: Victim) -> None:
    for said in ODD_VERSIONS[:-1]:
        with contextlib.suppress(*BROKEN), Insider(prey, hello={"versions": said}) as member:
            pytest.fail(f"{said} got an answer: {member.greeting}")
    assert not prey.node.met
    assert welcomes_members(prey)


def test_a_member_can_show_only_a_short_escaped_release_in_a_refusal(prey: Victim) -> None:
    odd = {"host_name": "h" * 100, "version": "~" * 100}
    with Insider(prey, hello={"versions": Versions(60_000, 65_535)}, card=odd) as member:
        assert isinstance(member.greeting, messages.Refusal)
        assert len(member.greeting.reason) < 250
        assert "~" * 41 not in member.greeting.reason
        assert "update covey on" in member.greeting.reason


def test_a_member_is_told_of_a_message_that_may_not_be_skipped_and_others_are_skipped(prey: Victim) -> None:
    with Insider(prey) as member:
        for tag in (1000, 70_000):
            member.say([tag, "whatever"])
        member.ping()
        member.say([900, "\x1b[2J"])
        with pytest.raises(messages.LinkRefusedError, match="a control message of an unknown type, 900, which"):
            member.hear(messages.Tell)
        assert is_hung_up(member.link)
    assert welcomes_members(prey)
