"""Only members of a run may say that it is over; only a process's own keeper is believed about it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.attackers import LOOPBACK, Insider, Victim, call_on_loop, new_cluster, until
from tests.support.runs import SURVIVING, Participant, ThreadRun, here, node_of, say
from tests.support.waiting import DEADLINE

from covey.base.errors import GroupChangedError
from covey.base.numbers import Seat
from covey.net.keys.identity import NodeIdentity
from covey.proto.health import ProcessState
from covey.runtime.group.internals import engine_of
from covey.runtime.keeper.cluster_keeper import ClusterKeeper
from covey.runtime.keeper.service import ClusterKeeperService
from covey.wire import formation, membership, messages
from covey.wire.formation import Ending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.group.group import Group


def origin_of(participant: Participant) -> bytes:
    generation = call_on_loop(lambda: participant.node.generation)
    assert generation is not None
    return generation.founded.origin


def claims(lineage: bytes, insider: Insider, terms: formation.Terms, members: list[NodeIdentity]) -> list[Any]:
    """Every way to say that a run is over."""
    over = Ending(lineage, True)
    lives = [(insider.card.id, insider.card.life), *((member.id, member.life) for member in members)]
    generation = membership.Successor(0, lineage, tuple(
        membership.MemberKey(id, life) for id, life in lives), 0)  # fmt: skip
    seated = membership.encode_membership(membership.Seated(lineage, generation))
    empty = membership.encode_membership(membership.Decided(membership.View(lineage, 1, (), 0, is_finished=True)))
    return [
        messages.Ended("run", lineage, True),
        here(insider, terms, (), endings=(over,)),
        here(insider, terms, (), phase=formation.Phase.LOCKED, endings=(over,)),
        messages.Agreeing(0, seated),
        messages.Agreeing(0, empty),
    ]


@pytest.mark.parametrize("purpose", ["candidate", "visitor", "keeper"])
def test_no_node_outside_of_a_run_can_say_that_it_is_over(purpose: str) -> None:
    first, second = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    with ThreadRun(new_cluster(), SURVIVING, size=2) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> Any:
            group.barrier()
            together()
            together()
            total = group.all_reduce(np.arange(3) + group.rank).tolist()
            joiner = node_of(group).acceptor._link_taker.__self__.listener  # type: ignore[union-attr]
            return total, joiner.records.lineages().ended

        nodes = [thread_run.start(work, first), thread_run.start(work, second)]
        together()
        lineage = origin_of(nodes[0])
        for node in nodes:
            with Insider(node.prey, purpose=purpose) as liar:
                for claim in claims(lineage, liar, thread_run.terms(), [first, second]):
                    liar.say(claim)
                liar.ping()
        together()
        for node in nodes:
            assert node.result() == ([1, 3, 5], ())


def test_a_member_alone_cannot_say_that_the_run_is_over() -> None:
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> Any:
            group.barrier()
            generation = engine_of(group).generation
            assert generation is not None
            if group.rank == 2:
                lineage, view = generation.founded.origin, generation.view
                end = membership.View(view.lineage, view.number + 1, (), 0, is_finished=True)
                ballot = 2 + 4 * 10
                for rank in (0, 1):
                    say(group, rank, messages.Ended("run", lineage, True))
                    for vote in (membership.Decided(end), membership.Prepare(view.lineage, view.number + 1, ballot),
                                 membership.Accept(ballot, end)):  # fmt: skip
                        say(group, rank, messages.Agreeing(0, membership.encode_membership(vote)))
            together()
            try:
                total = group.all_reduce(np.arange(3) + 1).tolist()
            except GroupChangedError:
                assert group.rank == 2, "the one that lied may lose its place"
                return None
            finally:
                together()
            joiner = node_of(group).acceptor._link_taker.__self__.listener  # type: ignore[union-attr]
            assert joiner.records.lineages().ended == ()
            return total, group.contributors

        nodes = [thread_run.start(work) for _ in range(3)]
        results = [node.result() for node in nodes]
    honest = [result for result in results if result is not None]
    assert len(honest) >= 2
    for total, contributors in honest:
        assert {0, 1} <= set(contributors)
        assert total == (len(contributors) * (np.arange(3) + 1)).tolist()


def test_nothing_that_an_excluded_member_says_reaches_the_groups_of_the_others() -> None:
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(3)

        def work(group: Group) -> Any:
            group.barrier()
            node, generation = node_of(group), engine_of(group).generation
            assert generation is not None
            if group.rank == 2:
                call_on_loop(generation.withdraw)
            until(lambda: generation.is_over if group.rank == 2 else node.peers[Seat(2)].is_excluded)
            together()
            if group.rank == 2:
                for rank in (0, 1):
                    for message in (
                        messages.Revoke(0, "PeerLostError", "an excluded member says so", ()),
                        messages.Announce(0, 2, 99, "broadcast()"),
                        messages.Position(0, 7, 2, 99, "broadcast()"),
                        messages.NoLane(0, "collectives", "no", 1),
                        messages.Dial(0, "collectives", 1),
                    ):
                        say(group, rank, message)
                    until(lambda rank: node.peers[Seat(rank)].link is not None, rank)
            together()
            if group.rank == 2:
                together()
                return None
            total = group.all_reduce(np.arange(3) + group.rank).tolist()
            together()
            return total, group.contributors

        results = [node.result() for node in [thread_run.start(work) for _ in range(3)]]
    assert [result for result in results if result is not None] == [([1, 3, 5], (0, 1))] * 2


# Keepers


class AttackedKeeper:
    """A keeper in a cluster."""

    def __init__(self, service: ClusterKeeperService, prey: Victim) -> None:
        self.service, self.prey = service, prey

    def own(self, identity: NodeIdentity, pid: int = 1) -> Insider:
        """Link with it as a process that it started."""
        card = {"keeper": self.service.id, "contact": self.prey.node.card.contact, "pid": pid}
        return Insider(self.prey, identity, card=card)

    def vouched(self, life: bytes) -> int | None:
        vouch = call_on_loop(lambda: self.service._cluster_keeper._process_table.vouch())  # type: ignore[union-attr]
        return dict(vouch.processes).get(life)


@pytest.fixture
def attacked() -> Iterator[AttackedKeeper]:
    cluster = new_cluster()
    service = ClusterKeeperService(cluster, LOOPBACK)
    service.start()
    try:
        until(lambda: service._endpoint is not None)
        seat, cluster_keeper = service._endpoint, service._cluster_keeper
        assert seat is not None
        assert cluster_keeper is not None
        address = ("127.0.0.1", seat.card.contact.addresses[0].port)
        yield AttackedKeeper(service, Victim(cluster, seat, cluster_keeper.mesh, address))
    finally:
        service.close()


def founded(lineage: bytes, *insiders: Insider) -> messages.Founded:
    members = tuple(messages.SeatedMember(Seat(seat), insider.card) for seat, insider in enumerate(insiders))
    return messages.Founded(0, lineage, False, members, "continue", 30.0, lineage)


def test_a_keeper_believes_only_members_of_its_run_that_the_work_is_done(attacked: AttackedKeeper) -> None:
    lineage = bytes(15) + b"x"
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(attacked.own(NodeIdentity.ephemeral()))
        member, liar = (stack.enter_context(Insider(attacked.prey)) for _ in range(2))
        liar.say(founded(lineage, liar))
        liar.say(messages.Ended("run", lineage, True))
        liar.ping()
        own.say(founded(lineage, own, member))
        own.ping()
        liar.say(messages.Ended("run", lineage, True))
        liar.ping()
        assert not attacked.service.is_over
        member.say(messages.Ended("run", bytes(16), True))
        member.ping()
        assert not attacked.service.is_over
        member.say(messages.Ended("run", lineage, True))
        member.ping()
        assert attacked.service.is_over
        assert own.hear(messages.Ended).lineage == lineage


def test_a_node_on_another_machine_cannot_say_that_it_is_a_process_of_this_keeper(
    attacked: AttackedKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage, honest = bytes(15) + b"x", NodeIdentity.ephemeral()
    far: set[bytes] = set()
    is_own = ClusterKeeper._is_own

    def from_where_it_is(cluster_keeper: Any, remote: Any) -> bool:
        address = "203.0.113.9" if remote.card.id in far else "127.0.0.1"
        monkeypatch.setattr(remote.link, "remote_ip", address)
        return is_own(cluster_keeper, remote)

    monkeypatch.setattr(ClusterKeeper, "_is_own", from_where_it_is)
    with contextlib.ExitStack() as stack:
        poser = NodeIdentity.ephemeral()
        poser.life = honest.life
        far.add(poser.id)
        liar = stack.enter_context(attacked.own(poser, pid=1 << 22))
        liar.say(founded(lineage, liar))
        liar.say(messages.Ended("run", lineage, True))
        liar.ping()
        assert attacked.vouched(honest.life) is None
        assert (attacked.service.survives, attacked.service.is_over) == (False, False)
        process = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(process.kill)
        own = stack.enter_context(attacked.own(honest, process.pid))
        own.ping()
        assert attacked.vouched(honest.life) == ProcessState.BUSY


def test_a_keeper_speaks_for_no_process_whose_life_another_one_of_its_own_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member may choose its life: a keeper that it names is believed about it, and not about the true owner."""
    keeper = NodeIdentity.ephemeral()
    watcher, thief, owner = sorted((NodeIdentity.ephemeral() for _ in range(3)), key=lambda identity: identity.id)
    thief.life = owner.life
    over = threading.Event()
    with ThreadRun(new_cluster(), SURVIVING, size=3) as thread_run:
        together = thread_run.steps(4)

        def work(group: Group) -> Any:
            group.barrier()
            together()
            together()
            try:
                return group.all_reduce(1), group.contributors
            except GroupChangedError:
                return None
            finally:
                together()
                assert over.wait(DEADLINE)

        monkeypatch.setenv("COVEY_KEEPER_ID", keeper.id.hex())
        nodes = {thief.id: thread_run.start(work, thief)}
        monkeypatch.delenv("COVEY_KEEPER_ID")
        nodes |= {identity.id: thread_run.start(work, identity) for identity in (watcher, owner)}
        together()
        with Insider(nodes[watcher.id].prey, keeper, purpose="keeper") as speaker:
            speaker.say(messages.Vouch(((owner.life, int(ProcessState.EXITED)),)))
            speaker.ping()
            node = call_on_loop(lambda: nodes[watcher.id].node)
            generation = node.generation
            assert generation is not None
            until(lambda: generation.view.number > 0)
            together()
            together()
            over.set()
            ids = [member.card.id for member in generation.founded.members]
            assert {ids[rank] for rank in generation.view.ranks} == {watcher.id, owner.id}
