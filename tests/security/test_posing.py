"""A member cannot pose as another member: seats go by the key that a node proved and its life, never by a word."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.attackers import BROKEN, Insider, Victim, call_on_loop, new_cluster, until
from tests.support.runs import SURVIVING, Participant, ThreadRun, here, ids_of, node_of
from tests.support.waiting import DEADLINE

from covey.net.discovery.interfaces import usable_interfaces
from covey.net.keys.identity import NodeIdentity
from covey.runtime.environment import ClusterOptions, LaunchedRank
from covey.runtime.joining.bootstrap import join_at
from covey.wire import membership, messages

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def revoke() -> messages.Revoke:
    return messages.Revoke(0, "PeerLostError", "the attacker says so", ())


def links_by_rank(group: Group) -> dict[int, bytes]:
    node = node_of(group)
    mesh = node.acceptor._link_taker.__self__  # type: ignore[union-attr]
    return {remote.seat: remote.card.id for remote in mesh.met.values() if remote.seat >= 0}


pytestmark = pytest.mark.usefixtures("links_are_awaited")


def test_a_member_outside_that_says_it_is_the_life_of_another_gets_no_seat_when_a_run_is_formed() -> None:
    identities = {name: NodeIdentity.ephemeral() for name in ("first", "second", "third")}
    attacked, over = threading.Event(), threading.Event()

    def work(group: Group) -> Any:
        group.barrier()
        attacked.set()
        assert over.wait(DEADLINE)
        ids = dict(enumerate(ids_of(group)))
        total = group.all_reduce(np.arange(5.0) + group.rank)
        return links_by_rank(group), ids, total

    with ThreadRun(new_cluster(), size=3) as thread_run, contextlib.ExitStack() as stack:
        first = thread_run.start(work, identities["first"])
        second = thread_run.start(work, identities["second"])
        until(lambda: identities["second"].id in first.joiner.mesh.met)
        poser = stack.enter_context(Insider(first.prey, card={"life": identities["second"].life}))
        lives = (identities["first"].life,)
        poser.say(here(poser, thread_run.terms(), lives))
        poser.ping()
        third = thread_run.start(work, identities["third"])
        assert attacked.wait(DEADLINE)
        poser.say(revoke())
        poser.ping()
        over.set()
        for node in (first, second, third):
            links, ids, total = node.result()
            assert all(ids[rank] == id for rank, id in links.items())
            assert poser.identity.id not in links.values()
            assert total.tolist() == (3 * np.arange(5.0) + 3).tolist()


def everything_about_a_run(lineage: bytes) -> list[messages.Control]:
    """What only members may say to members; a liar that is believed would end the run, or hang it."""
    views: list[membership.Membership] = [
        membership.Decided(membership.View(lineage, 1, (), 0)),
        membership.Trouble(lineage, 0, leaves=True),
        membership.Prepare(lineage, 1, 4),
    ]
    votes = [messages.Agreeing(0, membership.encode_membership(view)) for view in views]
    offer = messages.Offer(bytes(16), bytes(32), 0, "messages", "secure", 0, 1)
    posting = messages.Posting(1, 1, b"\x91\x0e")
    return [revoke(), messages.Goodbye(), messages.Failing("ValueError: I am another"), messages.Dial(0, "messages"),
            offer, posting, messages.Expect(bytes(16)), messages.NoLane(0, "collectives", "no"),
            messages.Announce(0, 3, 1, "barrier()"), *votes]  # fmt: skip


@pytest.mark.usefixtures("links_are_awaited")
@pytest.mark.parametrize("purpose", ["candidate", "visitor", "keeper"])
def test_a_member_outside_that_says_it_is_the_life_of_another_has_no_say_in_a_run(purpose: str) -> None:
    first, second = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    with ThreadRun(new_cluster(), SURVIVING, size=2) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> None:
            for number in range(3):
                together()
                assert group.all_reduce(np.full(4, number + group.rank)).tolist() == [2 * number + 1] * 4
                if group.rank == 0:
                    group.send(np.arange(3) + number, 1)
                else:
                    assert group.recv(0).tolist() == [number, number + 1, number + 2]
                assert set(links_by_rank(group).values()) < {first.id, second.id}
                together()

        nodes = [thread_run.start(work, first), thread_run.start(work, second)]
        together()
        together()
        lineage = call_on_loop(lambda: node_of_participant(nodes[0]).generation.founded.lineage)
        for node, other in ((nodes[0], second), (nodes[1], first)):
            with Insider(node.prey, purpose=purpose, card={"life": other.life}) as poser:
                if purpose == "candidate":
                    poser.say(here(poser, thread_run.terms(), (node.identity.life,)))
                for message in everything_about_a_run(lineage):
                    poser.say(message)
                poser.ping()
        together()
        together()
        with contextlib.ExitStack() as stack:  # with the link of the other gone, for the moment
            for node, other in ((nodes[0], second), (nodes[1], first)):
                call_on_loop(lambda node=node, other=other: abort_links(node, other.id))
                poser = stack.enter_context(Insider(node.prey, purpose=purpose, card={"life": other.life}))
                for message in everything_about_a_run(lineage):
                    poser.say(message)
                poser.ping()
            together()
            together()


def test_a_node_is_welcome_although_another_has_used_its_life_before(prey: Victim) -> None:
    poser, honest = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    for life in (honest.life, later(honest.life)):
        with Insider(prey, poser, card={"life": life}) as insider:
            insider.ping()
        until(lambda: not prey.node.met)
    with Insider(prey, honest) as insider:
        insider.ping()
        assert call_on_loop(lambda: list(prey.node.met)) == [honest.id]


def later(life: bytes) -> bytes:
    return (int.from_bytes(life[:8], "big") + 1).to_bytes(8, "big") + life[8:]


def abort_links(node: Participant, id: bytes) -> None:
    """End the links with a node, if there are any: they have ended here if the node ended them at its side."""
    remote = node.joiner.mesh.met.get(id)
    for link in list(remote.links) if remote is not None else ():
        link.abort()


def origin_of(generation: Any) -> bytes:
    return generation.founded.origin


def node_of_participant(participant: Participant) -> Any:
    member = participant.joiner.member
    return participant.node if member is not None else None


def test_a_newcomer_with_the_life_of_another_newcomer_takes_no_seat_from_it() -> None:
    honest, ready = NodeIdentity.ephemeral(), threading.Event()
    with ThreadRun(new_cluster(), SURVIVING) as thread_run, contextlib.ExitStack() as stack:

        def work(groups: Any) -> list[list[bytes]]:
            seen = []
            for group in groups:
                seen.append(ids_of(group))
                assert ready.wait(DEADLINE)
                if honest.id in seen[-1]:
                    group.barrier()
                    break
                while not group.change_pending:
                    group.barrier()
                    time.sleep(0.02)
            return seen

        members = [thread_run.start(work, elastic=True) for _ in range(2)]
        until(lambda: all(node_of_participant(member) is not None for member in members))
        lineage = call_on_loop(lambda: origin_of(node_of_participant(members[0]).generation))
        newcomer = thread_run.start(work, honest, elastic=True)
        lives = tuple(member.identity.life for member in members)
        identity = NodeIdentity.ephemeral()
        for member in members:
            poser = stack.enter_context(Insider(member.prey, identity, card={"life": honest.life}))
            poser.say(here(poser, thread_run.terms(), lives, lineage=lineage))
            poser.ping()
            threading.Thread(target=leave_when_seated, args=(poser,), daemon=True).start()
        until(lambda: all(len(list(node_of_participant(member).newcomers)) == 2 for member in members))
        ready.set()
        assert honest.id in newcomer.result()[0]
        for member in members:
            assert honest.id in member.result()[1], "the next generation has a seat for it"


def leave_when_seated(poser: Insider) -> None:
    """Go as soon as a generation has a seat for this insider, so that no node waits for it."""
    with contextlib.suppress(*BROKEN):
        poser.hear(messages.Founded)
        poser.link.close()


@pytest.mark.usefixtures("links_are_awaited")
def test_a_member_outside_takes_over_no_rank_of_a_launcher() -> None:
    cluster = new_cluster()
    options = ClusterOptions(cluster.name, cluster.secret.key)
    ip, port = own_address(), free_port()
    config = dataclasses.replace(SURVIVING, interfaces="")
    seats: dict[int, Any] = {}

    def main(rank: int) -> int:
        launched = LaunchedRank(rank=rank, size=2, master=(ip, port), name="launched")
        with join_at(launched, config, timeout=DEADLINE, options=options) as group:
            seats[rank] = node_of(group)
            together()
            together()
            return int(group.all_reduce(rank + 1))

    together = functools.partial(threading.Barrier(3).wait, DEADLINE)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(main, rank) for rank in range(2)]
        together()
        zero, one = seats[0], seats[1]
        prey = Victim(cluster, None, None, ("127.0.0.1", port + 1))  # type: ignore[arg-type]
        hello = {"run": "launched", "rank": 1, "size": 2, "on_loss": "continue"}
        for life in (one.card.life, later(one.card.life)):
            for _ in range(2):
                with Insider(prey, purpose="rank", hello=hello, card={"life": life}) as poser:
                    assert isinstance(poser.greeting, messages.Refusal)
                call_on_loop(lambda: zero.peers[1].link and zero.peers[1].link.abort())  # and while it is not there
        together()
        assert [rank.result(DEADLINE) for rank in ranks] == [3, 3]
    assert zero.peers[1].id == one.card.id


def own_address() -> str:
    """Return an address of this machine that is not its loopback's."""
    own = [address for interface in usable_interfaces("") for address in interface.addresses]
    return next((ip for ip in own if not ip.startswith("127.") and ":" not in ip), "127.0.0.1")


def free_port() -> int:
    """Return a port that is free, and so is the next one; the system gives such ports to no other test."""
    while True:
        port = random.randrange(21_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port
