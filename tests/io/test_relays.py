"""Relays: nodes meet through them, links leave them when there is a direct way, and every resource is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.io.test_mesh import Meshes, new_cluster, only_links, run, until
from tests.support.relays import ask, client, listen, open_relay, port_of, register

from covey.base.pace import Growing
from covey.proto import relay_table
from covey.runtime.links import address_race
from covey.runtime.links.relayed import challenged, connect_relay, receive_message, send_message
from covey.runtime.links.sockets import RelayedWay
from covey.runtime.peers import cluster_mesh as mesh_module
from covey.runtime.peers import dialer, relay_registration
from covey.runtime.peers import relays as relays_module
from covey.runtime.peers.hints import DialOutcome, Hint
from covey.runtime.relaying import server as server_module
from covey.runtime.relaying.pipe import Throttle
from covey.runtime.relaying.server import RelayLimits, RelayThread
from covey.testing.proxy import Proxy
from covey.wire.relay import (
    CallJoined,
    IncomingCall,
    ListedTokens,
    RelayEcho,
    RelayKey,
    RelayMessage,
    RelayRefusal,
    StillThere,
    TakeCall,
    TokenRegistered,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from covey.runtime.peers.cluster_mesh import ClusterMesh

pytestmark = pytest.mark.usefixtures("home")

TOKEN, OTHER = b"t" * 16, b"u" * 16


@contextlib.asynccontextmanager
async def relaying_at(port: int = 0, limits: RelayLimits | None = None) -> AsyncIterator[Any]:
    server = open_relay(port, limits)
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def joined(server: Any) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """Return the two ends of a pipe."""
    key, port = RelayKey(new_cluster().secret), port_of(server)
    with await register(port, key, TOKEN) as registration:
        caller, challenge = await client(port)
        with caller:
            await send_message(caller, key.call(challenge, TOKEN))
            told: Any = await receive_message(registration)
            taker, answer = await ask(port, lambda _: TakeCall(told.call))
            with taker:
                assert answer == await receive_message(caller) == CallJoined()
                yield caller, taker


async def registered(*nodes: ClusterMesh) -> None:
    await until(lambda: not any(node.relays.problems for node in nodes))


async def no_direct_way(_mesh: ClusterMesh, _remote: Any) -> None:
    """Look for none."""


def test_two_nodes_meet_through_a_relay_and_each_knows_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer.BetterWays, "seek_direct", no_direct_way)

    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            cluster, where = new_cluster(), f"127.0.0.1:{port_of(server)}"
            one, other = [await meshes.add(new_cluster(secret=cluster.secret, relays=(where,))) for _ in range(2)]
            await registered(one, other)
            assert await one.dial(Hint((), relay=other.card.contact.relay)) is DialOutcome.LINKED
            await until(lambda: only_links(one, other))
            for here, there in ((one, other), (other, one)):
                remote = here.met[there.card.id]
                assert remote.card == there.card
                assert remote.link is not None
                assert remote.link.relay == where
                assert remote.link.acknowledged_seconds_ago() is None
                assert remote.report().relay == where
            assert one.met[other.card.id].is_dialled
            assert not one.endpoint.acceptor.member_ips
            counts = server.counts()
            assert (counts.clusters, counts.registrations) == (1, 2)
            assert counts.copied > 1000

    run(work)


def test_a_link_leaves_the_relay_when_there_is_a_direct_way() -> None:
    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            cluster = new_cluster(relays=(f"127.0.0.1:{port_of(server)}",))
            one, other = await meshes.add(cluster), await meshes.add(cluster)
            await registered(one, other)
            await one.dial(Hint((), relay=other.card.contact.relay))

            def are_direct() -> bool:
                links = only_links(one, other)
                return links is not None and not any(link.relay for link in links)

            await until(are_direct)

    run(work)


def test_a_relay_does_not_replace_a_direct_link() -> None:
    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            cluster = new_cluster(relays=(f"127.0.0.1:{port_of(server)}",))
            one, other = await meshes.add(cluster), await meshes.add(cluster)
            await registered(one, other)
            await one.dial(Hint(other.card.contact.addresses))
            for source, target in ((one, other), (other, one)):
                assert await source.dial(Hint((), relay=target.card.contact.relay)) is DialOutcome.LINKED
            await until(lambda: server.counts().joined == 2)
            await asyncio.sleep(0.1)
            links = [node.met[peer.card.id].link for node, peer in ((one, other), (other, one))]
            assert not any(link.relay for link in links)

    run(work)


def test_nodes_hear_of_each_other_from_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays_module, "NEAR_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(relays_module, "FAR_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(dialer.BetterWays, "seek_direct", no_direct_way)

    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            cluster = new_cluster(relays=(f"127.0.0.1:{port_of(server)}",))
            nodes = [await meshes.add(cluster) for _ in range(3)]
            for node in nodes[:2]:  # the third one is a visitor that others are not told of
                node.relays._is_listed = True
            await until(lambda: all(len(node.met) == 2 for node in nodes[:1]) and len(nodes[2].met) == 2)

    run(work)


def test_a_relay_that_returns_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_registration, "RELAY_PAUSES", Growing(0.2, 0.2))

    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            port = port_of(server)
            cluster = new_cluster(relays=(f"127.0.0.1:{port}",))
            one, other = await meshes.add(cluster), await meshes.add(cluster)
            await registered(one, other)
        await until(lambda: one.relays.problems and other.relays.problems)
        assert set(one.report_problems()) == set(cluster.relays)
        assert await one.dial(Hint((), relay=other.card.contact.relay)) is DialOutcome.NO_NODE
        async with relaying_at(port):
            await registered(one, other)
            assert await one.dial(Hint((), relay=other.card.contact.relay)) is DialOutcome.LINKED

    run(work)


def test_a_relay_that_falls_silent_is_left_and_found_again_when_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine has lost its network: no connection ends, and TCP alone would notice minutes later."""
    monkeypatch.setattr(relay_registration, "ECHO_SECONDS", 0.2)
    monkeypatch.setattr(relay_registration, "ECHO_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(relay_registration, "GREETING_SECONDS", 0.3)

    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            with Proxy(("127.0.0.1", port_of(server))) as proxy:
                where = f"127.0.0.1:{proxy.address[1]}"
                node = await meshes.add(new_cluster(relays=(where,)))
                await registered(node)
                proxy.hold()
                await until(lambda: node.relays.problems.get(where) == "it does not answer")
                before = proxy.connections()
                proxy.resume()
                await registered(node)
                assert proxy.connections() > before, "over a new connection"

    run(work)


def relay_of(node: ClusterMesh, other: ClusterMesh) -> str:
    remote = node.met.get(other.card.id)
    return "" if remote is None or remote.link is None else remote.link.relay


def test_a_link_moves_to_the_relay_that_is_nearer_for_both_nodes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialer.BetterWays, "seek_direct", no_direct_way)
    monkeypatch.setattr(dialer, "RELAY_CHECK_EVERY", 0.05)
    monkeypatch.setattr(mesh_module, "PING_SECONDS", 0.05)
    monkeypatch.setattr(relay_registration, "ECHO_SECONDS", 0.5)
    monkeypatch.setattr(relay_registration, "RELAY_PAUSES", Growing(0.2, 0.2))

    async def work(meshes: Meshes) -> None:
        async with relaying_at() as first:
            spare = listen()  # where the second relay will be
            port = spare.getsockname()[1]
            spare.close()
            with Proxy(("127.0.0.1", port_of(first))) as far, Proxy(("127.0.0.1", port)) as near:
                far.delay, near.delay = 0.1, 0.01
                texts = [f"127.0.0.1:{each.address[1]}" for each in (far, near)]
                secret = new_cluster().secret
                # the first relay is near for one of them, and far for the other
                one = await meshes.add(new_cluster(secret=secret, relays=(f"127.0.0.1:{port_of(first)}", texts[1])))
                other = await meshes.add(new_cluster(secret=secret, relays=(texts[0], f"127.0.0.1:{port}")))
                await until(lambda: first.counts().registrations == 2)
                assert await one.dial(Hint((), relay=other.card.contact.relay)) is DialOutcome.LINKED
                await until(lambda: relay_of(other, one) == texts[0])
                async with relaying_at(port):
                    await until(lambda: relay_of(one, other) == texts[1])
                    await until(lambda: relay_of(other, one) == f"127.0.0.1:{port}")
                    token = other.card.contact.relay
                    assert one.relays.ways(token)[0][:2] == near.address
                    assert one.relays.ways(token)[1][:2] == ("127.0.0.1", port_of(first))
                    trips = [one.relays.round_trip(way) for way in one.relays.ways(token)]
                    assert 0.02 <= trips[0] < trips[1]
                    assert trips[1] >= 0.2
                await until(lambda: relay_of(one, other) in ("", f"127.0.0.1:{port_of(first)}"))
                await registered_with_one(one)
                assert one.relays.ways(token)[0][:2] == ("127.0.0.1", port_of(first))

    run(work)


async def registered_with_one(node: ClusterMesh) -> None:
    await until(lambda: len(node.relays.problems) == 1)


async def only_echoes(sock: socket.socket) -> None:
    while True:
        assert isinstance(await receive_message(sock), RelayEcho)


def test_a_relay_answers_echoes_of_a_registration_within_limits_and_names_itself() -> None:
    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server, relaying_at() as another:
            key = RelayKey(new_cluster().secret)
            names = set()
            for each in (server, server, another):
                with await connect_relay(("127.0.0.1", port_of(each))) as asking:
                    names.add((await challenged(asking)).relay)
            assert len(names) == 2
            with await register(port_of(server), key, TOKEN) as sock:
                burst = int(server_module.ECHO_BURST)
                for number in range(5 * burst):
                    await send_message(sock, RelayEcho(number))
                await send_message(sock, StillThere())
                answers = [await receive_message(sock) for _ in range(burst)]
                assert answers == [RelayEcho(number) for number in range(burst)]
                await send_message(sock, RelayKey(new_cluster().secret).call(bytes(32), TOKEN))
                with pytest.raises(ConnectionError):
                    await only_echoes(sock)

    run(work)


def test_a_relay_is_dialled_after_the_addresses_had_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    relay, addresses = RelayedWay("127.0.0.1", 1, None, TOKEN), [("127.0.0.1", port) for port in (2, 3)]  # type: ignore[arg-type]
    began: dict[Any, float] = {}

    async def open_one(where: Any) -> Any:
        began[where] = time.monotonic()
        if where == addresses[0]:
            raise OSError("refused")
        if where == addresses[1]:
            await asyncio.sleep(address_race.RELAY_HEAD_START / 2)
            raise OSError("refused late")
        return where

    async def work() -> None:
        assert await address_race.first_of([*addresses, relay], open_one, lambda _: None) == (relay, relay)

    asyncio.run(work())
    assert began[relay] - began[addresses[1]] > 0.9 * address_race.RELAY_HEAD_START / 2


def test_after_a_change_of_the_secret_a_node_is_registered_with_both_until_the_old_one_is_over() -> None:
    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            old, new = new_cluster(relays=(f"127.0.0.1:{port_of(server)}",)), new_cluster()
            node = await meshes.add(old)
            await registered(node)
            node.relays.follow(replace(old, secret=new.secret, previous=old.secret, previous_until=time.time() + 60))
            await until(lambda: server.counts().clusters == 2)
            await until(lambda: len(node.relays.ways(OTHER)) == 2)
            assert [way[2].cluster for way in node.relays.ways(OTHER)] == [
                RelayKey(each.secret).cluster for each in (new, old)
            ]
            node.relays.follow(replace(old, secret=new.secret))
            assert [way[2].cluster for way in node.relays.ways(OTHER)] == [RelayKey(new.secret).cluster]
            await until(lambda: server.counts().clusters == 1)

    run(work)


# The relay itself


def test_a_pipe_carries_every_byte_in_both_directions_and_slows_a_fast_sender_down() -> None:
    sizes = (20_000_017, 1_000_003)  # the first is more than the kernel buffers

    def pattern(size: int) -> bytes:
        return bytes(index * 7 + size & 255 for index in range(256)) * (size // 256 + 1)

    async def send(sock: socket.socket, size: int) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, pattern(size)[:size])
        sock.shutdown(1)

    async def receive(sock: socket.socket) -> bytes:
        data = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            data += piece
        return bytes(data)

    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server, joined(server) as ends:
            sending = [asyncio.create_task(send(sock, size)) for sock, size in zip(ends, sizes, strict=True)]
            await until(lambda: sum(len(each.rest) for pipe in server._pipes for each in pipe._directions.values()))
            before = -1
            while (copied := server.counts().copied) != before:  # until the buffers of the kernel are full
                before = copied
                await asyncio.sleep(0.05)
            assert copied < sum(sizes)  # nothing is read that no receiver takes
            assert await receive(ends[0]) == pattern(sizes[1])[: sizes[1]]
            assert await receive(ends[1]) == pattern(sizes[0])[: sizes[0]]
            await asyncio.gather(*sending)
            await until(lambda: server.counts().pipes == 0)
            assert server.counts().copied == sum(sizes)

    run(work)


def test_what_a_relay_passes_on_in_all_is_limited() -> None:
    rate, size = 1_000_000, 400_000

    async def work(_meshes: Meshes) -> None:
        loop = asyncio.get_running_loop()
        async with relaying_at(limits=RelayLimits(bytes_per_second=rate)) as server, joined(server) as (one, other):
            began, left = time.monotonic(), size
            sending = asyncio.create_task(loop.sock_sendall(one, bytes(size)))
            while left:
                left -= len(await loop.sock_recv(other, 1 << 16))
            await sending
            assert time.monotonic() - began > 0.5 * (size - 100_000) / rate

    run(work)


def test_a_budget_serves_those_that_wait_in_turn() -> None:
    async def work() -> None:
        throttle, order = Throttle(1_000_000), list[int]()
        throttle.spend(throttle.allowed(1 << 30) + 10_000)
        assert throttle.allowed(100) == 0
        for number in range(3):
            throttle.wait(lambda number=number: order.append(number))  # type: ignore[misc]
        assert throttle.allowed(100) == 0
        await until(lambda: len(order) == 3)
        assert order == [0, 1, 2]
        throttle.close()

    asyncio.run(work())


def test_a_pipe_that_carries_nothing_is_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_SECONDS", 0.05)

    async def work(_meshes: Meshes) -> None:
        async with relaying_at(limits=RelayLimits(idle_seconds=0.2)) as server, joined(server) as ends:
            for sock in ends:
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            assert server.counts().pipes == 0

    run(work)


def test_a_side_that_ends_ends_the_other() -> None:
    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server, joined(server) as (one, other):
            one.close()
            assert await asyncio.get_running_loop().sock_recv(other, 1) == b""
            other.close()
            await until(lambda: server.counts().pipes == 0 and len(server._sources) == server._counts.total() == 1)

    run(work)


def test_a_caller_that_waits_for_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_table, "WAITING_CALL_SECONDS", 0.1)

    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server:
            key, port = RelayKey(new_cluster().secret), port_of(server)
            with await register(port, key, TOKEN):
                answers = []
                for token in (OTHER, TOKEN):
                    sock, answer = await ask(port, lambda challenge, token=token: key.call(challenge, token))  # type: ignore[misc]
                    sock.close()
                    answers.append(answer)
                assert answers == [RelayRefusal(relay_table.UNKNOWN_TOKEN), RelayRefusal(relay_table.UNANSWERED)]

    run(work)


def test_connections_of_one_source_are_limited_and_those_of_others_are_not() -> None:
    async def work(_meshes: Meshes) -> None:
        async with relaying_at(limits=RelayLimits(connections=8, of_source=3)) as server:
            port = port_of(server)
            socks = [(await client(port))[0] for _ in range(3)]
            with pytest.raises(AttributeError):  # a refusal instead of a challenge
                await client(port)
            socks.append((await client(port, "127.0.0.2"))[0])
            socks.pop(0).close()
            await until(lambda: server._counts["127.0.0.1"] == 2)
            socks.append((await client(port))[0])
            for sock in socks:
                sock.close()
            assert server.counts().refused == 1

    run(work)


def test_a_registration_hears_of_others_and_of_calls() -> None:
    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server:
            key, port = RelayKey(new_cluster().secret), port_of(server)
            with await register(port, key, TOKEN) as one:
                other, first = await ask(port, lambda challenge: key.register(challenge, OTHER, is_listed=True))
                with other:
                    said: list[RelayMessage] = [first, await receive_message(other), await receive_message(one)]
                    assert said == [TokenRegistered(), ListedTokens((TOKEN,)), ListedTokens((OTHER,))]
                    caller, challenge = await client(port)
                    with caller:
                        await send_message(caller, key.call(challenge, OTHER))
                        assert isinstance(await receive_message(other), IncomingCall)
            await until(lambda: server.counts().registrations == 0)

    run(work)


def test_a_connection_that_does_not_say_what_it_wants_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RELAY_STRANGER_SECONDS", 2.0)
    monkeypatch.setattr(server_module, "STRANGERS_OF_SOURCE", 2)

    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server:
            port = port_of(server)
            socks = [(await client(port))[0] for _ in range(2)]
            with pytest.raises(AttributeError):  # one too many
                await client(port)
            for sock in socks:
                with sock:
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            (await client(port))[0].close()

    run(work)


def test_a_message_that_a_client_may_not_send_ends_its_connection() -> None:
    async def work(_meshes: Meshes) -> None:
        async with relaying_at() as server:
            key, port = RelayKey(new_cluster().secret), port_of(server)
            for wrong in (CallJoined(), ListedTokens((TOKEN,)), IncomingCall(TOKEN)):
                sock, _ = await client(port)
                with sock:
                    await send_message(sock, wrong)
                    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            with await register(port, key, TOKEN) as sock:
                await send_message(sock, CallJoined())
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            await until(lambda: server.counts().registrations == 0 and not server._sources)

    run(work)


# Relays that members offer


def test_a_relay_of_a_cluster_refuses_other_clusters() -> None:
    async def work(_meshes: Meshes) -> None:
        own, other = (RelayKey(new_cluster().secret) for _ in range(2))
        thread = RelayThread(listen(), RelayLimits(), lambda: {own.cluster})
        try:
            for key, expected in ((own, TokenRegistered()), (other, RelayRefusal(server_module.NOT_SERVED))):
                sock, answer = await ask(
                    thread.port,
                    lambda challenge, key=key: key.register(challenge, TOKEN, is_listed=True),  # type: ignore[misc]
                )
                sock.close()
                assert answer == expected
        finally:
            thread.close()

    run(work)


def test_a_node_uses_relays_that_linked_nodes_offer_and_a_bounded_number_of_them() -> None:
    async def work(meshes: Meshes) -> None:
        async with relaying_at() as server:
            node, port = await meshes.add(new_cluster()), port_of(server)
            assert node.relays.ways(TOKEN) == []
            for offering in range(3):
                node.relays.offered(bytes([offering]), "127.0.0.1", port)
            await until(lambda: server.counts().registrations == 1)
            await until(lambda: node.relays.ways(TOKEN))
            (way,) = node.relays.ways(TOKEN)
            assert way[:2] == ("127.0.0.1", port)
            for offering in range(2):
                node.relays.withdrawn(bytes([offering]))
            assert node.relays.ways(TOKEN)
            node.relays.withdrawn(bytes([2]))
            assert node.relays.ways(TOKEN) == []
            await until(lambda: server.counts().registrations == 0)
            for offering in range(10):
                node.relays.offered(bytes([offering]), f"127.0.0.{offering + 10}", port)
            assert len(node.relays._registrations) == relays_module.OFFERS_LIMIT
            assert node.relays.problems == {}  # only those of the settings are problems

    run(work)
