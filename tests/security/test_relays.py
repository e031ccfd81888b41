"""Relays are strangers, and so are others that use them: they can delay and drop, and learn sizes and addresses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.io.test_mesh import Meshes, new_cluster, only_links, run, until
from tests.support.relays import HostileRelay, ask, client, open_relay, port_of, register

from covey.base.errors import AuthError
from covey.base.version import __version__
from covey.runtime.links import handshake
from covey.runtime.links.relayed import receive_message, send_message
from covey.runtime.peers import dialer, relay_registration
from covey.runtime.peers import dialer as dialer_module
from covey.runtime.peers import relays as relays_module
from covey.runtime.peers.hints import HINTS_LIMIT, DialOutcome, Hint
from covey.runtime.relaying.server import NOT_PROVED, RelayLimits
from covey.wire import door, messages
from covey.wire.decoding import FRAME_LENGTH, frame
from covey.wire.relay import (
    RELAY_SPEAKS,
    CallJoined,
    CallToken,
    IncomingCall,
    ListedTokens,
    RegisterToken,
    RelayChallenge,
    RelayKey,
    RelayMismatch,
    RelayRefusal,
    StillThere,
    TokenRegistered,
    decode_relay,
    encode_relay,
)
from covey.wire.versions import Versions, only

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.wire.relay import RelayMessage

PATIENCE = 1.0
"""How long a dial that must fail may take, instead of 5 s."""


async def no_direct_way(_mesh: ClusterMesh, _remote: Any) -> None:
    """Look for none."""


@pytest.fixture(autouse=True)
def _only_relays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer.BetterWays, "seek_direct", no_direct_way)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Give up dials soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialer_module, "HANDSHAKE_SECONDS", PATIENCE)
        patch.setattr(handshake, "HANDSHAKE_SECONDS", PATIENCE)
        yield


@contextlib.asynccontextmanager
async def relayed(
    meshes: Meshes, count: int = 2, *, kind: Any = HostileRelay, limits: RelayLimits | None = None, **of_kind: Any
) -> AsyncIterator[tuple[Any, Cluster, list[ClusterMesh]]]:
    """A relay, a cluster, and nodes of it that are registered there and know each other by no other means."""
    server = open_relay(0, limits, kind, **of_kind)
    try:
        cluster = new_cluster(relays=(f"127.0.0.1:{port_of(server)}",))
        nodes = [await meshes.add(cluster) for _ in range(count)]
        await until(lambda: not any(node.relays.problems for node in nodes))
        yield server, cluster, nodes
    finally:
        await server.close()


async def meet(one: ClusterMesh, other: ClusterMesh) -> DialOutcome:
    return await one.dial(Hint((), relay=other.card.contact.relay))


def call_as_relay(server: Any, cluster: Cluster, node: ClusterMesh) -> socket.socket:
    """Return the end of a connection to a node that the relay itself calls."""
    ours, its = socket.socketpair()
    for sock in (ours, its):
        sock.setblocking(False)
    server._number += 1
    server._socks[server._number], server._sources[its] = its, "evil"
    server._counts["evil"] += 1
    token = node.card.contact.relay
    server._table.called(server._number, RelayKey(cluster.secret).cluster, token, time.monotonic())
    server._driver.settle()
    return ours


async def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await asyncio.get_running_loop().sock_recv(sock, count - len(data))
    return data


# A hostile relay


def test_a_relay_sees_nothing_of_what_it_passes_on() -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes) as (server, cluster, (one, other)):
            assert await meet(one, other) is DialOutcome.LINKED
            await until(lambda: only_links(one, other))
            await until(lambda: len(server.seen) > 6)
            for direction in (0, 1):
                seen = b"".join(data for way, data in server.seen if way == direction)
                assert len(seen) > 500
                for node in (one, other):
                    card = node.card
                    for text in (card.name, card.contact.host):  # a shorter one may be there by chance
                        assert len(text) > 5
                        assert text.encode() not in seen
                    for secret in (card.id, card.life, card.contact.relay):
                        assert secret not in seen
                keys = [cluster.secret.key, *map(cluster.secret.derive, ("door", "node-ca", "relay", "mdns"))]
                assert not any(key in seen for key in (*keys, RelayKey(cluster.secret).cluster))

    run(work)


def test_a_node_that_was_not_asked_for_is_known_as_what_it_is() -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes, 3) as (server, _, (one, other, third)):
            called = server._table.called
            wrong = third.card.contact.relay
            server._table.called = lambda number, cluster, _token, now: called(number, cluster, wrong, now)
            assert await meet(one, other) is DialOutcome.LINKED
            assert {id: remote.card.id for id, remote in one.met.items()} == {third.card.id: third.card.id}
            assert not other.met

    run(work)


@pytest.mark.parametrize("role", [0, 1], ids=["callers", "called"])
def test_two_ends_of_the_same_role_do_not_become_a_link(role: int) -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes) as (server, _, (one, other)):
            waiting: list[socket.socket] = []

            def ends(*given: socket.socket) -> Any:
                waiting.append(given[role])
                return tuple(waiting) if len(waiting) == 2 else None

            server.ends = ends
            with impatient():
                outcomes = await asyncio.gather(meet(one, other), meet(other, one))
            assert set(outcomes) == {DialOutcome.NO_NODE}
            assert not one.met
            assert not other.met
            server.ends = lambda caller, taker: (caller, taker)
            assert await meet(one, other) is DialOutcome.LINKED

    run(work)


def test_what_was_recorded_opens_no_door_when_it_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes) as (server, cluster, (one, other)):
            assert await meet(one, other) is DialOutcome.LINKED
            await until(lambda: only_links(one, other))
            recorded = b"".join(data for direction, data in server.seen if direction == 0)
            refused: list[BaseException] = []
            monkeypatch.setattr(other.endpoint.acceptor, "_refused", lambda _ip, error: refused.append(error))
            with call_as_relay(server, cluster, other) as evil:
                assert await receive_message(evil) == CallJoined()
                await read_exactly(evil, door.CHALLENGE_BYTES)
                await asyncio.get_running_loop().sock_sendall(evil, recorded)
                assert await asyncio.get_running_loop().sock_recv(evil, 1) == b""
            await until(lambda: refused)
            assert isinstance(refused[0], AuthError)
            assert only_links(one, other)

    run(work)


@pytest.mark.parametrize(
    ("direction", "place"), [(1, 3), (0, 20), (0, 200), (1, 300)], ids=["challenge", "answer", "hello", "certificate"]
)
def test_a_changed_byte_ends_the_handshake_and_the_next_one_works(direction: int, place: int) -> None:
    passed, is_hostile = [0, 0], True

    def meddle(way: int, data: bytes) -> bytes:
        begin, passed[way] = passed[way], passed[way] + len(data)
        at = place - begin
        if is_hostile and way == direction and 0 <= at < len(data):
            return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
        return data

    async def work(meshes: Meshes) -> None:
        nonlocal is_hostile
        async with relayed(meshes, meddle=meddle) as (_, _, (one, other)):
            with impatient():
                assert await meet(one, other) is DialOutcome.NO_NODE
            assert passed[direction] > place
            assert not one.met
            is_hostile = False
            assert await meet(one, other) is DialOutcome.LINKED

    run(work)


def test_what_a_relay_adds_to_a_link_ends_it_and_is_not_heard() -> None:
    is_adding = False

    def meddle(way: int, data: bytes) -> bytes:
        return data + frame(b"\x92\x10\x01") if is_adding and way == 0 else data

    async def work(meshes: Meshes) -> None:
        nonlocal is_adding
        async with relayed(meshes, meddle=meddle) as (_, _, (one, other)):
            assert await meet(one, other) is DialOutcome.LINKED
            await until(lambda: only_links(one, other))
            (link,) = other.met[one.card.id].links
            is_adding = True
            one.met[other.card.id].ping()
            await until(lambda: link.ended.is_set())
            assert isinstance(link.error, AuthError)

    run(work)


NOISE: dict[str, Callable[[], list[bytes]]] = {
    "garbage": lambda: [secrets.token_bytes(4096)],
    "a long frame": lambda: [FRAME_LENGTH.pack((1 << 32) - 1)],
    "a challenge": lambda: [frame(encode_relay(RelayChallenge(1, bytes(32))))],
    "many tokens": lambda: [
        frame(encode_relay(ListedTokens(tuple(secrets.token_bytes(16) for _ in range(256))))) for _ in range(20)
    ],
    "many calls": lambda: [frame(encode_relay(IncomingCall(secrets.token_bytes(16)))) for _ in range(2000)],
}


@pytest.mark.parametrize("what", NOISE)
def test_a_registered_node_bears_whatever_a_relay_says(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays_module, "NEAR_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(relays_module, "FAR_WAIT_SECONDS", 0.0)
    came = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if came > 1:  # connections that take calls wait
                await reader.read()
            else:
                writer.write(frame(encode_relay(RelayChallenge(RELAY_SPEAKS.oldest, bytes(32)))))
                await reader.readexactly(FRAME_LENGTH.size)
                writer.write(frame(encode_relay(TokenRegistered())))
                for piece in NOISE[what]():
                    writer.write(piece)
                writer.write(frame(encode_relay(StillThere())))
                await reader.read()
        writer.close()

    async def work(meshes: Meshes) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            cluster = new_cluster(relays=(f"127.0.0.1:{server.sockets[0].getsockname()[1]}",))
            node = await meshes.add(cluster)
            await until(lambda: came > (1 if what != "many tokens" else 0))
            await asyncio.sleep(0.2)
            assert came <= 2 + relay_registration.CALLS_AT_ONCE
            assert len(node.follower._hints) <= HINTS_LIMIT
            member = await meshes.add(new_cluster(secret=cluster.secret))
            assert await member.dial(Hint(node.card.contact.addresses)) is DialOutcome.LINKED
            await node.close()

    run(work)


@pytest.mark.parametrize("spoken", [only(1), Versions(3, 9)], ids=["older", "newer"])
def test_a_relay_of_another_protocol_is_named_with_its_release_and_hears_which_to_update(spoken: Versions) -> None:
    heard: list[RelayMessage] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(frame(encode_relay(RelayChallenge(spoken.oldest, bytes(32), b"", spoken, "9.9"))))
            length = FRAME_LENGTH.unpack(await reader.readexactly(FRAME_LENGTH.size))[0]
            heard.append(decode_relay(await reader.readexactly(length)))
        writer.close()

    async def work(meshes: Meshes) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            text = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            node = await meshes.add(new_cluster(relays=(text,)))
            await until(lambda: any("update the" in problem for problem in node.relays.problems.values()))
            (problem,) = node.relays.problems.values()
            older = "relay" if spoken.newest < 2 else "node"
            assert f"relay protocol {spoken} (covey 9.9), node 2 (covey {__version__}): update the {older}" in problem
            await until(lambda: heard)
            assert heard[0] == RelayMismatch(RELAY_SPEAKS, __version__)
            await node.close()

    run(work)


def test_a_node_that_does_not_negotiate_is_told_by_the_relay_which_to_update() -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes) as (server, cluster, _):
            key = RelayKey(cluster.secret)
            for versions, older in ((None, "node"), (only(9), "relay")):
                sock, answer = await ask(
                    port_of(server),
                    lambda challenge, versions=versions: CallToken(key.cluster, bytes(16), bytes(64), versions),  # type: ignore[misc]
                )
                with sock:
                    assert isinstance(answer, RelayRefusal)
                    assert answer.reason.endswith(f"update the {older}")

    run(work)


# A stranger at an honest relay


def test_a_stranger_registers_and_calls_nothing_of_a_cluster_whose_secret_it_does_not_have() -> None:
    async def work(meshes: Meshes) -> None:
        async with relayed(meshes) as (server, cluster, (one, other)):
            port, its, own = port_of(server), RelayKey(cluster.secret), RelayKey(new_cluster().secret)
            token, recorded = (
                other.card.contact.relay,
                its.register(bytes(32), other.card.contact.relay, is_listed=True),
            )
            attempts: list[Callable[[bytes], Any]] = [
                lambda _: recorded,
                lambda challenge: CallToken(its.cluster, token, own.call(challenge, token).signature, RELAY_SPEAKS),
                lambda challenge: RegisterToken(
                    its.cluster, token, True, own.register(challenge, token, is_listed=True).signature, RELAY_SPEAKS
                ),
                lambda challenge: CallToken(its.cluster, token, its.call(bytes(32), token).signature, RELAY_SPEAKS),
                lambda challenge: RegisterToken(
                    its.cluster, token, False, its.call(challenge, token).signature, RELAY_SPEAKS
                ),
            ]
            for attempt in attempts:
                sock, answer = await ask(port, attempt)
                with sock:
                    assert answer == RelayRefusal(NOT_PROVED)
            with await register(port, own, token) as stranger:  # of its own cluster it may register what it likes
                assert await meet(one, other) is DialOutcome.LINKED
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await receive_message(stranger)

    run(work)


def test_a_flood_from_one_source_keeps_no_node_from_meeting_another() -> None:
    limits = RelayLimits(connections=64, of_source=32)

    async def work(meshes: Meshes) -> None:
        async with relayed(meshes, limits=limits) as (server, _, (one, other)):
            socks, own = list[socket.socket](), RelayKey(new_cluster().secret)
            for number in itertools.count():
                try:
                    sock, challenge = await client(port_of(server), "127.0.0.2")
                except (OSError, AttributeError):  # refused
                    break
                socks.append(sock)
                if number % 2:
                    token = number.to_bytes(16, "big")
                    await send_message(sock, own.register(challenge, token, is_listed=True))
            assert len(socks) == limits.of_source
            assert await meet(one, other) is DialOutcome.LINKED
            for sock in socks:
                sock.close()

    run(work)


def test_lies_about_round_trips_change_which_of_its_relays_a_node_uses_and_no_more() -> None:
    async def work(meshes: Meshes) -> None:
        honest, liar = open_relay(), open_relay()
        third = open_relay()
        try:
            liar._id = third._id
            cluster = new_cluster(relays=tuple(f"127.0.0.1:{port_of(each)}" for each in (honest, liar, third)))
            node = await meshes.add(cluster)
            await until(lambda: len(node.relays.trips()) == 2)
            token, own = b"t" * 16, [each.relay for each in node.relays.trips()]
            known = set(node.relays.ways(token))
            assert len(known) == 3
            for nearest in own:
                trips = [messages.RelayTrip(each, 0.0 if each == nearest else 3600.0) for each in own]
                node.relays.told(token, (messages.RelayTrip(b"x" * 16, 0.0), *trips))
                ways = node.relays.ways(token)
                assert set(ways) == known
                assert (ways[0][1] == port_of(honest)) == (nearest == honest._id)
        finally:
            for each in (honest, liar, third):
                await each.close()

    run(work)
