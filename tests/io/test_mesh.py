"""Meshes: nodes of a cluster find each other, keep one link a pair, and pass on the nodes that they know."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVarTuple

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.errors import AuthError, ConnectError, DeadlineError
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity, short_id
from covey.net.keys.tls import Credentials
from covey.proto.formation import Formed
from covey.runtime.joining import joiner as joiner_module
from covey.runtime.joining.joiner import Joiner
from covey.runtime.links.handshake import LinkCredentials, RefusedError, dial
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.hints import DialOutcome, Hint
from covey.runtime.peers.reach import NOT_TRIED, TOO_OFTEN
from covey.wire import messages
from covey.wire.formation import Terms
from covey.wire.secret import ClusterSecret
from covey.wire.versions import only

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from covey.runtime.peers.remote_process import RemoteProcess

Args = TypeVarTuple("Args")
CONFIG = GroupConfig(interfaces="lo")
TERMS = Terms(run="r", program="p.py", size=2, min_size=2, max_size=2, version="1", lanes="auto")


pytestmark = pytest.mark.usefixtures("home")


def new_cluster(**changes: Any) -> Cluster:
    return replace(Cluster(ClusterSecret("lab", secrets.token_bytes(32))), **changes)


class Meshes:
    """Nodes in one process. They find each other only by what a test tells them, unless they announce themselves."""

    def __init__(self) -> None:
        self.nodes: list[ClusterMesh] = []

    async def add(
        self, cluster: Cluster, *, identity: NodeIdentity | None = None, announce: bool = False, **node: Any
    ) -> Any:
        """Open a node: a joiner if there are `terms`, else a visitor."""
        identity = identity if identity is not None else NodeIdentity.ephemeral()
        endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=identity)
        made: ClusterMesh
        if "terms" in node:
            made = Joiner(cluster, CONFIG, endpoint, node["terms"]).mesh
        else:
            made = ClusterMesh(cluster, CONFIG, endpoint, announce=announce)
        self.nodes.append(made)
        await made.open()
        return made

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()
            node.endpoint.on_close()


def run(work: Callable[[Meshes], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        meshes = Meshes()
        try:
            async with asyncio.timeout(DEADLINE):
                await work(meshes)
        finally:
            await meshes.close()
            for _ in range(5):
                await asyncio.sleep(0)  # connections that were aborted close in the next turns of the loop
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(bounded())
    gc.collect()  # so that what this test leaks fails this test


async def until(condition: Callable[[*Args], Any], *args: *Args) -> None:
    while not condition(*args):  # noqa: ASYNC110 - nodes do not tell when they meet
        await asyncio.sleep(0.005)


def seed_of(node: ClusterMesh) -> str:
    return f"127.0.0.1:{node.card.contact.addresses[0].port}"


def know_each_other(*nodes: ClusterMesh) -> bool:
    ids = {node.card.id for node in nodes}
    return all(set(node.met) == ids - {node.card.id} for node in nodes)


def only_links(one: ClusterMesh, other: ClusterMesh) -> list[Any] | None:
    """Return the two ends of the one link between two nodes, or None as long as there is not exactly one."""
    ends = [list(a.met[b.card.id].links) for a, b in ((one, other), (other, one)) if b.card.id in a.met]
    return [end[0] for end in ends] if [len(end) for end in ends] == [1, 1] else None


def ports(link: Any) -> tuple[int, int]:
    transport = link._transport
    return transport.get_extra_info("sockname")[1], transport.get_extra_info("peername")[1]


# Finding and keeping


def test_two_nodes_on_one_host_find_each_other_and_meet_once() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one, other = await meshes.add(cluster, announce=True), await meshes.add(cluster, announce=True)
        await until(lambda: know_each_other(one, other) and only_links(one, other))
        assert one.met[other.card.id].card == other.card
        assert one.problems.refusals == other.problems.refusals == {}

    run(work)


def test_nodes_of_different_clusters_do_not_meet_though_they_announce_themselves() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, another = new_cluster(), new_cluster()
        nodes = [await meshes.add(each, announce=True) for each in (cluster, another, cluster, another)]
        await until(lambda: know_each_other(*nodes[::2]) and know_each_other(*nodes[1::2]))

    run(work)


@pytest.mark.parametrize("attempt", seeds(4))
def test_two_nodes_that_dial_each_other_at_the_same_time_end_with_one_link(attempt: int) -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one, other = await meshes.add(cluster), await meshes.add(cluster)
        dials = [one.dial(Hint(other.card.contact.addresses)), other.dial(Hint(one.card.contact.addresses))]
        await asyncio.gather(*dials[:: -1 if attempt % 2 else 1])
        await until(lambda: only_links(one, other))
        ends = only_links(one, other)
        assert ends is not None
        at_one, at_other = ends
        assert ports(at_one) == ports(at_other)[::-1]
        first, second = one.met[other.card.id], other.met[one.card.id]
        assert (first.link, second.link) == (at_one, at_other)
        assert first.is_dialled is not second.is_dialled  # one of them is known to reach the other, and opens lanes
        answers = await asyncio.gather(first.ask(messages.Ask(), 5.0), second.ask(messages.Ask(), 5.0))
        assert [answer.peers[0].card.id for answer in answers] == [one.card.id, other.card.id]

    run(work)


def test_nothing_is_lost_while_two_nodes_exchange_their_link_for_another() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        small, large = sorted([await meshes.add(cluster), await meshes.add(cluster)], key=lambda node: node.card.id)
        heard: list[bytes] = []
        small.listener.heard = lambda _, message: heard.append(message.body)
        await large.dial(Hint(small.card.contact.addresses))
        await until(lambda: know_each_other(small, large))
        first = large.met[small.card.id].link
        dialling = asyncio.ensure_future(small.dial(Hint(large.card.contact.addresses)))
        sent = 0
        while not small.met[large.card.id].is_dialled or large.met[small.card.id].link is first or sent < 100:
            for _ in range(10):
                large.met[small.card.id].send(messages.Forming(sent.to_bytes(4, "big")))
                sent += 1
            await asyncio.sleep(0)
        await dialling
        await until(lambda: len(heard) == sent and only_links(small, large))
        assert sorted(heard) == [number.to_bytes(4, "big") for number in range(sent)]

    run(work)


def test_a_seed_that_all_know_makes_all_known_to_each_other_without_multicast() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        first = await meshes.add(cluster)
        others = [await meshes.add(replace(cluster, seeds=(seed_of(first),))) for _ in range(2)]
        await until(lambda: know_each_other(first, *others))
        assert others[0].report_problems() == others[1].report_problems() == {}

    run(work)


def test_a_seed_that_only_one_side_knows_is_enough() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        first = await meshes.add(cluster)
        second = await meshes.add(replace(cluster, seeds=(seed_of(first),)))
        third = await meshes.add(replace(cluster, seeds=(seed_of(second),)))
        await until(lambda: know_each_other(first, second, third))

    run(work)


def test_a_seed_that_is_a_node_itself_is_no_problem() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster)
        await one.dial(Hint(one.card.contact.addresses), seed=seed_of(one))
        assert one.met == {}
        assert one.report_problems() == {}
        assert not one.problems.hung_up

    run(work)


def test_a_seed_that_does_not_answer_is_named_and_found_later() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        gone = await meshes.add(cluster)
        seed, port = seed_of(gone), gone.card.contact.addresses[0].port
        await gone.close()
        gone.endpoint.on_close()
        one = await meshes.add(replace(cluster, seeds=(seed,)))
        await until(lambda: seed in one.report_problems())
        assert one.report_problems()[seed].startswith(f"cannot be reached: {seed}: ")
        endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(port,), identity=NodeIdentity.ephemeral())
        back = ClusterMesh(cluster, CONFIG, endpoint, announce=False)
        meshes.nodes.append(back)
        await back.open()
        await until(lambda: know_each_other(one, back))
        assert one.report_problems() == {}

    run(work)


def test_a_visitor_that_has_left_is_not_looked_for_and_no_problem() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        waiting = await meshes.add(cluster, terms=TERMS)
        visitor = await meshes.add(cluster, announce=True)
        port = visitor.card.contact.addresses[0].port
        here = Hint((messages.Address("127.0.0.1", port, "lo"),), same_host=True)
        there = Hint(visitor.card.contact.addresses)
        await until(lambda: len(waiting.visitors) > 0)  # two, if each dialled the other: every link of a visitor counts
        await visitor.close()
        visitor.endpoint.on_close()
        await until(lambda: len(waiting.visitors) == 0)
        assert waiting.follower._hints.due(time.monotonic() + 1000, 100, lambda _hint: False) == []
        for hint in (here, there):  # as if an announcement of it came late
            assert await waiting.dial(hint) is DialOutcome.NO_NODE
        assert waiting.report_problems() == {}
        seed = f"127.0.0.1:{port + 1}"
        await waiting.dial(Hint((messages.Address("127.0.0.1", port + 1, "lo"),)), seed=seed)
        assert list(waiting.report_problems()) == [seed]  # other places are reported as ever

    run(work)


def test_a_node_that_leaves_is_forgotten_and_may_come_again_as_a_new_life() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, private = new_cluster(), Ed25519PrivateKey.generate()
        stays = await meshes.add(cluster)
        for incarnation in (1, 2):
            seeded = replace(cluster, seeds=(seed_of(stays),))
            comes = await meshes.add(seeded, identity=NodeIdentity(private, incarnation))
            await until(lambda comes: know_each_other(stays, comes), comes)
            assert stays.met[comes.card.id].card.life == comes.card.life
            await comes.close()
            await until(lambda: not stays.met)
        assert stays.problems.refusals == {}

    run(work)


def test_a_measured_way_and_a_clock_are_known_of_every_node_met() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster)
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)))
        await until(lambda: know_each_other(one, other))
        at_one, at_other = one.met[other.card.id], other.met[one.card.id]
        await until(lambda: at_one.round_trip > 0 and at_other.round_trip > 0 and at_other.way is not None)
        assert abs(at_one.clock_offset) < 1
        state = at_other.report("secure")
        assert (state.card.id, state.lane, state.local, state.interface) == (one.card.id, "secure", "127.0.0.1", "lo")
        assert state.remote == seed_of(one)

    run(work)


# Nodes that are not wanted


def test_a_denied_node_is_refused_and_named_on_both_sides() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, denied = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(replace(cluster, denied=frozenset({denied.id})))
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)), identity=denied)
        short = short_id(denied.id)
        reason = f"node {other.card.name} ({short}) is denied on {one.card.name}; "
        reason += f"`covey deny {short} --undo` there lets it in"
        await until(lambda: reason in one.problems.refusals.values() and other.report_problems())
        assert other.report_problems() == {seed_of(one): f"says: {reason}"}
        assert one.met == other.met == {}
        await one.dial(Hint(other.card.contact.addresses))  # nor does it help to be dialled
        await until(lambda: not other.met)
        assert one.met == {}

    run(work)


def test_an_identity_in_use_elsewhere_is_refused_and_the_later_one_is_told() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, private = new_cluster(), Ed25519PrivateKey.generate()
        early = await meshes.add(cluster, identity=NodeIdentity(private, 1))
        late = await meshes.add(replace(cluster, seeds=(seed_of(early),)), identity=NodeIdentity(private, 2))
        in_use = f"identity {short_id(early.card.id)} is in use by process {early.card.pid}"
        await until(lambda: any(in_use in reason for reason in late.report_problems().values()))
        assert any(in_use in reason for reason in early.problems.refusals.values())
        await early.dial(Hint(late.card.contact.addresses))
        assert "Was the configuration folder copied from there?" in late.problems.refusals["this node"]
        assert "this node" not in early.problems.refusals
        assert early.met == late.met == {}

    run(work)


def test_two_living_nodes_with_one_identity_are_not_both_met_by_a_third() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, private = new_cluster(), Ed25519PrivateKey.generate()
        third = await meshes.add(cluster)
        seeded = replace(cluster, seeds=(seed_of(third),))
        early = await meshes.add(seeded, identity=NodeIdentity(private, 1))
        await until(lambda: know_each_other(third, early))
        late = await meshes.add(seeded, identity=NodeIdentity(private, 2))
        await until(lambda: any("is in use by process" in reason for reason in late.report_problems().values()))
        assert third.met[early.card.id].card.life == early.card.life

    run(work)


def test_a_later_life_takes_over_from_one_that_does_not_answer_any_more() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, private = new_cluster(), Ed25519PrivateKey.generate()
        third = await meshes.add(cluster)
        seeded = replace(cluster, seeds=(seed_of(third),))
        early = await meshes.add(seeded, identity=NodeIdentity(private, 1))
        await until(lambda: know_each_other(third, early))
        links = list(early.met[third.card.id].links)
        for link in links:
            link._transport.pause_reading()  # as if its cable had been pulled
        third.met[early.card.id].pings = {1: time.monotonic() - 5}
        late = await meshes.add(seeded, identity=NodeIdentity(private, 2))
        await until(lambda: late.met)
        assert third.met[late.card.id].card.life == late.card.life
        for link in links:
            link.abort()

    run(work)


def hello_of(mesh: ClusterMesh, identity: NodeIdentity) -> messages.Hello:
    card = msgspec.structs.replace(mesh.card, id=identity.id, life=identity.life, name=identity.name)
    return msgspec.structs.replace(mesh.hello(), card=card)


def credentials_of(cluster: Cluster, identity: NodeIdentity) -> LinkCredentials:
    return LinkCredentials(
        cluster.secret.derive("door"), tls=Credentials(cluster.secret.derive("node-ca"), identity.private)
    )


def where_of(mesh: ClusterMesh) -> tuple[str, int]:
    return "127.0.0.1", mesh.card.contact.addresses[0].port


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"versions": only(99)}, rf"speaks protocol 99 .*, .* speaks {messages.VERSION} .*: update covey on "),
        ({"purpose": "rank"}, "a launcher cannot set them"),
        ({"contact": messages.Contact("h", (), "")}, "the card is not filled in"),
        ({"life": b"short"}, "the card is not filled in"),
        ({"id": b"i" * 32}, "your key does not fit the id you gave"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_hello_that_cannot_be_is_refused_with_the_reason(changes: dict[str, Any], text: str) -> None:
    async def work(meshes: Meshes) -> None:
        cluster, identity = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(cluster)
        hello = hello_of(one, identity)
        on_card = {name: value for name, value in changes.items() if name in ("id", "life", "contact")}
        rest = {name: value for name, value in changes.items() if name not in on_card}
        hello = msgspec.structs.replace(hello, card=msgspec.structs.replace(hello.card, **on_card), **rest)
        with pytest.raises(RefusedError, match=text):
            await dial(where_of(one), credentials_of(cluster, identity), hello)
        assert one.met == {}
        if "versions" in changes:
            (reason,) = one.problems.refusals.values()
            assert "speaks protocol 99" in reason
            assert one.card.version in reason

    run(work)


@pytest.mark.parametrize(
    "contact",
    [
        messages.Contact("h", (messages.Address("10.0.0.1", 1),) * 65, ""),
        messages.Contact("h", (messages.Address("1" * 101, 1),), ""),
        messages.Contact("h\x1b[2J", (messages.Address("10.0.0.1", 1),), ""),
        messages.Contact("h\n", (messages.Address("10.0.0.1", 1),), ""),
    ],
    ids=["addresses", "long", "escape", "newline"],
)
def test_a_card_beyond_measure_ends_the_greeting(contact: messages.Contact) -> None:
    async def work(meshes: Meshes) -> None:
        cluster, identity = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(cluster)
        hello = hello_of(one, identity)
        hello = msgspec.structs.replace(hello, card=msgspec.structs.replace(hello.card, contact=contact))
        with pytest.raises(ConnectError, match="ended in the greeting"):
            await dial(where_of(one), credentials_of(cluster, identity), hello)
        assert one.met == {}

    run(work)


def test_a_member_that_talks_nonsense_is_cut_off_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    async def work(meshes: Meshes) -> None:
        cluster, identity = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(cluster)
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)))
        await until(lambda: know_each_other(one, other))
        for nonsense in (b"", b"\xc1", messages.encode(hello_of(one, identity)), secrets.token_bytes(1000)):
            link, _, _ = await dial(where_of(one), credentials_of(cluster, identity), hello_of(one, identity))
            await until(lambda: identity.id in one.met)
            link.send(nonsense)
            await link.ended.wait()
            await until(lambda: identity.id not in one.met)
        assert know_each_other(one, other)

    run(work)
    cut_off = [record for record in caplog.records if "the link was ended" in record.getMessage()]
    assert len(cut_off) == 1  # one line for all


def test_gossip_about_no_node_and_about_ourselves_does_no_harm() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, identity = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(cluster)
        link, _, _ = await dial(where_of(one), credentials_of(cluster, identity), hello_of(one, identity))
        strange = [
            messages.Contact("", (), ""),
            messages.Contact("", tuple(messages.Address(ip, 1) for ip in ("", "abc", "::::", "255.255.255.255")), ""),
            messages.Contact("", (messages.Address("127.0.0.1", 0), messages.Address("127.0.0.1", 1 << 40)), ""),
            messages.Contact("", (messages.Address("127.0.0.1", -5),), "\0"),
            one.card.contact,
        ]
        cards = [
            msgspec.structs.replace(one.card, id=secrets.token_bytes(32), life=secrets.token_bytes(16), contact=contact)
            for contact in strange
        ]
        link.send(messages.encode(messages.Known((one.card, *cards))))
        link.send(messages.encode(messages.Ask()))  # is answered after the gossip was heard
        while not isinstance(messages.decode_control(await link.receive()), messages.Tell):
            pass
        await until(lambda: not one.follower.dialling)
        assert set(one.met) == {identity.id}
        link.abort()
        await link.ended.wait()

    run(work)


# Visitors and questions


def test_a_visitor_meets_joiners_asks_how_things_stand_and_takes_part_in_nothing() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        joiner = await meshes.add(cluster, terms=TERMS)
        visitor = await meshes.add(replace(cluster, seeds=(seed_of(joiner),)))
        await until(lambda: visitor.met and joiner.visitors)
        remote: RemoteProcess = visitor.met[joiner.card.id]
        assert remote.purpose == "candidate"
        told = await remote.ask(messages.Ask(), 5.0)
        assert isinstance(told, messages.Tell)
        assert (told.run, told.state, told.leader, told.peers) == ("r", "joining", b"", ())
        assert joiner.met == {}
        await visitor.close()
        await until(lambda: not joiner.visitors)

    run(work)


def test_a_question_without_an_answer_ends_in_time_and_answers_that_came_too_late_are_dropped() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, identity = new_cluster(), NodeIdentity.ephemeral()
        one = await meshes.add(cluster)
        link, _, _ = await dial(where_of(one), credentials_of(cluster, identity), hello_of(one, identity))
        await until(lambda: one.met)
        with pytest.raises(TimeoutError):
            await one.met[identity.id].ask(messages.Ask(), 0.1)
        for _ in range(100):
            link.send(messages.encode(messages.SecretKept("late")))
        await until(one.met[identity.id].answers.full)
        asking = asyncio.create_task(one.met[identity.id].ask(messages.Reach(()), 5.0))
        while not isinstance(messages.decode_control(await link.receive()), messages.Reach):
            pass
        link.send(messages.encode(messages.Reached((), ())))
        answer = await asking
        assert isinstance(answer, messages.Reached), answer
        link.abort()
        await link.ended.wait()

    run(work)


def test_a_node_tells_by_which_of_its_own_addresses_a_visitor_is_reached_and_tries_no_others() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster)
        visitor = await meshes.add(replace(cluster, seeds=(seed_of(one),)))
        await until(lambda: know_each_other(one, visitor))
        (own,) = visitor.card.contact.addresses
        with socket.create_server(("127.0.0.1", 0)) as trap:
            trap.setblocking(False)
            others = (messages.Address("203.0.113.9", own.port), messages.Address("127.0.0.1", trap.getsockname()[1]))
            answer = await visitor.met[one.card.id].ask(messages.Reach((own, *others)), 10.0)
            assert isinstance(answer, messages.Reached)
            assert answer.problems == ("", NOT_TRIED, NOT_TRIED)
            assert answer.round_trips[0] > 0 > max(answer.round_trips[1:])
            with pytest.raises(BlockingIOError):
                trap.accept()

    run(work)


def test_a_node_tries_the_addresses_of_others_only_so_often() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster)
        visitor = await meshes.add(replace(cluster, seeds=(seed_of(one),)))
        await until(lambda: know_each_other(one, visitor))
        question = messages.Reach(visitor.card.contact.addresses)
        answers = [await visitor.met[one.card.id].ask(question, 10.0) for _ in range(20)]
        tried = [answer for answer in answers if isinstance(answer, messages.Reached) and answer.problems == ("",)]
        assert 1 <= len(tried) <= 10
        assert isinstance(answers[-1], messages.Reached)
        assert answers[-1].problems == (TOO_OFTEN,)

    run(work)


def test_nodes_that_were_met_are_remembered_by_name(home: Path) -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        clusters.save(cluster)
        one = await meshes.add(cluster, terms=TERMS)
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)), terms=TERMS)
        await until(lambda: len(clusters.known("lab")) == 2)
        assert clusters.known("lab") == {node.card.id: node.card.name for node in (one, other)}

    run(work)


# Joiners


def test_two_joiners_agree_on_one_view_and_on_which_one_reaches_the_other() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster, terms=TERMS)
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)), terms=TERMS)
        formed, formed_there = await asyncio.gather(one.listener.form(10.0), other.listener.form(10.0))
        assert isinstance(formed, Formed)
        assert isinstance(formed_there, Formed)
        by_rank, by_rank_there = one.listener.seated(formed), other.listener.seated(formed)
        assert formed.view == formed_there.view
        assert [member.id for member in formed.view] == sorted((one.card.id, other.card.id))
        rank = [member.id for member in formed.view].index(one.card.id)
        assert set(by_rank) == {1 - rank}
        assert set(by_rank_there) == {rank}
        assert by_rank[1 - rank].is_dialled is not by_rank_there[rank].is_dialled

    run(work)


def test_a_joiner_whose_identity_is_in_use_gives_up_and_says_where() -> None:
    async def work(meshes: Meshes) -> None:
        cluster, private = new_cluster(), Ed25519PrivateKey.generate()
        early = await meshes.add(cluster, identity=NodeIdentity(private, 1), terms=TERMS)
        seeded = replace(cluster, seeds=(seed_of(early),))
        late = await meshes.add(seeded, identity=NodeIdentity(private, 2), terms=TERMS)
        with pytest.raises(AuthError, match=f"identity is in use by process {early.card.pid}"):
            await late.listener.form(10.0)

    run(work)


def test_a_joiner_whose_seeds_all_hang_up_believes_that_its_secret_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joiner_module, "WRONG_SECRET_SECONDS", 0.3)

    async def work(meshes: Meshes) -> None:
        other = await meshes.add(new_cluster())
        mine = await meshes.add(new_cluster(seeds=(seed_of(other),)), terms=TERMS)
        with pytest.raises(AuthError, match="the secret of cluster 'lab' differs there"):
            await mine.listener.form(10.0)

    run(work)


def test_a_joiner_with_other_terms_is_refused_with_the_reason_and_named_at_the_deadline() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        one = await meshes.add(cluster, terms=TERMS)
        terms = msgspec.structs.replace(TERMS, program="another.py")
        other = await meshes.add(replace(cluster, seeds=(seed_of(one),)), terms=terms)
        results = await asyncio.gather(one.listener.form(1.5), other.listener.form(1.5), return_exceptions=True)
        for result, peer in zip(results, (other, one), strict=True):
            assert isinstance(result, DeadlineError)
            assert peer.card.name in str(result)
            assert "another.py" in str(result)

    run(work)


def test_closing_at_any_moment_of_a_handshake_leaves_nothing_behind() -> None:
    async def work(meshes: Meshes) -> None:
        cluster = new_cluster()
        for turns in (0, 1, 3, 10, 30):
            nodes = [await meshes.add(cluster, announce=True) for _ in range(3)]
            dials = [
                asyncio.create_task(one.dial(Hint(other.card.contact.addresses)))
                for one in nodes
                for other in nodes
                if one is not other
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.gather(*(node.close() for node in nodes))
            for node in nodes:
                await node.close()
            for task in dials:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*dials, return_exceptions=True)

    run(work)


def test_a_second_link_takes_nothing_away_from_a_run_that_goes_on() -> None:
    """A node that got another address is dialled there, too. What the others say must not vanish in that link."""

    async def work() -> None:
        cluster = new_cluster()
        nodes = []
        try:
            for _ in range(2):
                endpoint = cluster_endpoint(cluster, CONFIG, run="r", ports=(0,), identity=NodeIdentity.ephemeral())
                nodes.append(Joiner(cluster, CONFIG, endpoint, TERMS))
            smaller, larger = sorted(nodes, key=lambda node: node.card.id)
            for node in nodes:
                await node.mesh.open()
            formed, _ = await asyncio.gather(larger.form(10), smaller.form(10))
            (remote,) = larger.seated(formed).values()
            used: list[object] = []
            in_use = remote.link
            link_changed = larger.links.link_changed

            def note(changed: RemoteProcess) -> None:
                used.append(changed.link)
                link_changed(changed)

            larger.links.link_changed = note  # type: ignore[method-assign,assignment]
            port = smaller.card.contact.addresses[0].port
            await larger.mesh.dial(Hint((messages.Address("127.0.0.1", port),), same_host=True))
            assert all(link is in_use for link in used), "a link that the smaller one is about to close was used"
        finally:
            for node in nodes:
                await node.mesh.close()
                node.endpoint.on_close()

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE):
            await work()

    asyncio.run(bounded())
