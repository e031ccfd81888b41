"""Lanes for messages that are replaced: which one follows which, and when."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.attackers import LOOPBACK, Detour, call_on_loop, new_cluster, run_nodes, until
from tests.support.waiting import DEADLINE

from covey.base.numbers import Seat
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.cluster_links import ClusterLinks
from covey.runtime.joining.node import NodeParts, node_of
from covey.runtime.lanes.table import Epochs, LaneKey
from covey.runtime.peers.peer_table import Routes
from covey.testing import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.group.group import Group
    from covey.runtime.links.link import Link

SURVIVING = replace(LOOPBACK, on_loss="continue")
KEY = LaneKey(7, Seat(1), "messages")


def test_of_two_connections_the_later_one_counts() -> None:
    epochs = Epochs()
    assert epochs.next(KEY) == 0
    epochs.seen(KEY, 0)
    assert epochs.next(KEY) == 1  # an offer that came to nothing is not repeated
    assert not epochs.is_past(KEY, 0)
    epochs.opened(KEY, 3)
    assert [epochs.is_past(KEY, epoch) for epoch in (2, 3, 4)] == [True, True, False]
    epochs.seen(KEY, 1)
    assert epochs.next(KEY) == 4
    assert epochs.next(LaneKey(7, Seat(2), "messages")) == 0
    epochs.forget(7)
    assert epochs.next(KEY) == 0


@pytest.fixture
def detour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Detour]:
    detour = Detour()
    monkeypatch.setattr(Routes, "to", lambda routes, peer, kind="": detour.to(routes, peer, kind))
    try:
        yield detour
    finally:
        detour.close()


def links_with(node: NodeParts, seat: Seat) -> list[Link]:
    """Return all links of a node with another one."""
    assert isinstance(node.links, ClusterLinks)
    return list(node.links._mesh.met[node.peers[seat].id].links)


@pytest.mark.usefixtures("links_are_awaited")
def test_a_lane_that_fell_silent_without_a_sign_is_replaced_when_the_link_is(detour: Detour) -> None:
    """A router forgets both connections; only the link is watched over, and dialled again."""
    turn = threading.Barrier(2, timeout=DEADLINE)

    def rank_main(group: Group) -> Any:
        node, peer = node_of(group), 1 - group.rank
        assert node is not None
        group.barrier()
        detour.fresh()
        turn.wait()
        group.send(np.arange(3.0) + group.rank, dst=peer, tag=1)
        first = group.recv(src=peer, tag=1).tolist()
        turn.wait()
        if group.rank == 0:
            detour.proxy.hold()
            detour.fresh()
        turn.wait()
        group.send(np.arange(4.0) + group.rank, dst=peer, tag=2)  # into a connection that carries nothing any more
        turn.wait()
        if group.rank == 0:
            for link in links_with(node, Seat(peer)):  # the nodes may have dialled each other at the same time
                call_on_loop(link.abort)
        return first, group.recv(src=peer, tag=2, timeout=DEADLINE - 5).tolist()

    assert run_nodes(new_cluster(), rank_main, config=SURVIVING) == [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]),
        ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]),
    ]


def test_an_offer_that_is_not_later_than_what_is_open_is_refused() -> None:
    def rank_main(group: Group) -> list[str]:
        node, peer = node_of(group), 1 - group.rank
        assert node is not None
        group.send(np.ones(1), dst=peer)
        group.recv(src=peer)
        group.barrier()
        heard: list[str] = []
        if node.peers[Seat(peer)].is_dialled:
            refused = node.lanes.dialler.refused

            def note(key: Any, reason: str) -> None:
                heard.append(reason)
                refused(key, reason)

            call_on_loop(setattr, node.lanes.dialler, "refused", note)
            opened = node.lanes.table._epochs._opened[LaneKey(engine_of(group).id, Seat(peer), "messages")]
            for epoch in range(opened + 1):
                offer = messages.Offer(
                    bytes(15) + bytes((epoch,)), bytes(32), engine_of(group).id, "messages", "secure", 0, 1, epoch
                )
                call_on_loop(node.peers.send, peer, offer)
            until(lambda: len(heard) == opened + 1)
        group.send(np.arange(2.0), dst=peer)
        assert group.recv(src=peer).tolist() == [0.0, 1.0]
        return heard

    for heard in run_nodes(new_cluster(), rank_main):
        assert all("open already" in reason for reason in heard)


@pytest.mark.parametrize("lanes", ["unix", "tcp"])
def test_both_ends_come_to_use_the_same_connection_whichever_breaks_and_asks(lanes: str) -> None:
    """Lanes break at random at both ends, and each end asks for others at random; every message arrives once."""
    count = 150

    def body(group: Group) -> list[int]:
        rng, others = random.Random(group.rank), [rank for rank in range(group.size) if rank != group.rank]
        group.barrier()
        messenger = engine_of(group).routing.messenger()
        node, engine = node_of(group), engine_of(group)
        assert node is not None
        got: dict[int, list[int]] = {rank: [] for rank in others}

        def receive(rank: int) -> None:
            got[rank] += [int(group.recv(src=rank, tag=1, timeout=DEADLINE)[0]) for _ in range(count)]

        threads = [threading.Thread(target=receive, args=(rank,)) for rank in others]
        for thread in threads:
            thread.start()
        for number in range(count):
            for rank in others:
                group.send(np.array([number]), dst=rank, tag=1, timeout=DEADLINE)
                lane = messenger._lanes.by_rank.get(rank)
                dice = rng.random()
                if lane is not None and dice < 0.15:
                    call_on_loop(node.lanes.renew, engine.id, engine.members[rank], lane.sock)
                elif lane is not None and dice < 0.3 and lane.sock.fileno() >= 0:
                    try:
                        lane.sock.shutdown(2)
                    except OSError:
                        continue
        for thread in threads:
            thread.join()
        group.barrier()
        return [rank for rank in others if got[rank] != list(range(count))]

    assert run_threads(3, body, lanes=lanes, timeout=DEADLINE) == [[], [], []]
