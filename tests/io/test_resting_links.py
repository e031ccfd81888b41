"""Runs whose members keep few links open: the others rest, wake when there is something to say, and lose nothing."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.support.attackers import call_on_loop, new_cluster, until
from tests.support.runs import SURVIVING, ThreadRun, node_of
from tests.support.waiting import DEADLINE

from covey.base.errors import MismatchError
from covey.base.numbers import Seat
from covey.proto.overlay import Overlay
from covey.runtime.collectives.trouble import ANNOUNCE_SECONDS
from covey.runtime.links.link import Link
from covey.runtime.peers import resting_links
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.group.group import Group
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.runtime.peers.remote_process import RemoteProcess

SIZE = 6


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let links rest after a moment instead of seconds."""
    monkeypatch.setattr(resting_links, "LINK_IDLE_SECONDS", 0.3)
    monkeypatch.setattr(resting_links, "IDLE_CHECK_EVERY", 0.1)
    monkeypatch.setattr(resting_links, "TRY_AGAIN_SECONDS", 0.5)


class Scene:
    """A run of real nodes that wait, each after its first operation, for what the test wants them to do."""

    def __init__(self, thread_run: ThreadRun) -> None:
        self.groups: dict[int, Group] = {}
        self.errors: list[BaseException] = []
        self._go_on = threading.Event()
        self._steps: list[Any] = []
        together = thread_run.steps(SIZE + 1)

        def work(group: Group) -> list[Any]:
            group.barrier()
            self.groups[group.rank] = group
            together()
            assert self._go_on.wait(DEADLINE)
            return [step(group) for step in self._steps]

        self.participants = [thread_run.start(work) for _ in range(SIZE)]
        together()

    def mesh(self, rank: int) -> ClusterMesh:
        id = node_of(self.groups[rank]).card.id
        return next(each for each in self.participants if each.identity.id == id).joiner.mesh

    def remote(self, rank: int, other: int) -> RemoteProcess:
        return self.mesh(rank).met[node_of(self.groups[other]).card.id]

    def leader(self) -> int | None:
        generation = node_of(self.groups[1]).generation
        assert generation is not None
        return generation.view_driver.leader()

    def resting(self) -> set[tuple[int, int]]:
        """Return the pairs whose link rests, as each of the two nodes sees it."""
        pairs = ((rank, other) for rank in self.groups for other in self.groups if rank != other)
        return {(rank, other) for rank, other in pairs if self.remote(rank, other).is_resting}

    def expected(self, topology: Any) -> set[tuple[int, int]]:
        """Return the pairs whose link is to rest, as long as the leader remains; none while no member leads."""
        overlay, leader = Overlay(topology, SIZE, range(SIZE)), self.leader()
        if leader is None:
            return set()
        return {
            (rank, other)
            for rank in range(SIZE)
            for other in set(range(SIZE)) - {rank, leader} - overlay.neighbours(rank)
            if rank != leader
        }

    def await_rest(self, topology: Any = "hypercube") -> set[tuple[int, int]]:
        """Return the pairs whose link rests, once they are those whose links are to rest."""

        def are_resting() -> bool:
            found = self.resting()
            return bool(found) and found == self.expected(topology)

        until(are_resting)
        return call_on_loop(self.resting)

    def go_on(self, *steps: Any) -> list[Any]:
        self._steps = list(steps)
        self._go_on.set()
        return [participant.result() for participant in self.participants]


@pytest.fixture
def thread_run(request: pytest.FixtureRequest) -> Iterator[ThreadRun]:
    topology = getattr(request, "param", "hypercube")
    config = dataclasses.replace(SURVIVING, topology=topology)
    with ThreadRun(new_cluster(), config, size=SIZE) as run:
        yield run


def summed(group: Group) -> Any:
    return group.all_reduce(np.arange(5) * 10**group.rank).tolist()


ALL = (np.arange(5) * sum(10**rank for rank in range(SIZE))).tolist()


@pytest.mark.parametrize(
    "thread_run", ["hypercube", pytest.param("kregular", marks=pytest.mark.thorough)], indirect=True
)
def test_links_rest_between_members_that_are_no_neighbours_and_the_run_goes_on(
    thread_run: ThreadRun,
) -> None:
    scene = Scene(thread_run)
    scene.await_rest(thread_run.config.topology)

    def are_shown() -> bool:
        links = {rank: group.node.links() for rank, group in scene.groups.items()}
        return {(rank, link.rank) for rank in links for link in links[rank] if link.is_resting} == scene.resting()

    until(are_shown)
    assert scene.go_on(summed, summed) == [[ALL, ALL]] * SIZE


def test_what_is_sent_over_resting_links_arrives_once_and_in_order(
    thread_run: ThreadRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(thread_run)
    first, second = min(scene.await_rest())
    heard: dict[int, list[int]] = {first: [], second: []}
    said = list(range(1000, 1020))

    def listen() -> None:
        for rank, numbers in heard.items():
            monkeypatch.setattr(node_of(scene.groups[rank]).views.losses, "answered", functools.partial(note, numbers))

    def note(numbers: list[int], _seat: Seat, number: int, _clock: float) -> None:
        if number in said:  # pings have numbers of 32 random bits
            numbers.append(number)

    def talk() -> None:
        for number in said:
            node_of(scene.groups[first]).peers.send(Seat(second), messages.Pong(number, 0.0))
            node_of(scene.groups[second]).peers.send(Seat(first), messages.Pong(number, 0.0))

    call_on_loop(listen)
    call_on_loop(talk)
    until(lambda: len(heard[first]) >= len(said) and len(heard[second]) >= len(said))
    assert heard == {first: said, second: said}
    scene.await_rest()
    assert scene.go_on(summed) == [[ALL]] * SIZE


def test_what_a_member_says_as_it_leaves_reaches_those_whose_links_with_it_rest(thread_run: ThreadRun) -> None:
    scene = Scene(thread_run)
    speaker, listener = min(scene.await_rest())
    leader = call_on_loop(scene.leader)
    assert leader is not None
    goodbye = messages.encode(messages.Goodbye())

    def say_to_the_leader() -> None:
        node = node_of(scene.groups[speaker])
        for message in (messages.encode(messages.Failing("ValueError: too hot")), goodbye):
            link = node.peers[Seat(leader)].link
            assert link is not None
            link.send(message)

    def knows() -> bool:
        peer = node_of(scene.groups[listener]).peers[Seat(speaker)]
        return peer.has_left and peer.failure == "ValueError: too hot"

    call_on_loop(say_to_the_leader)
    until(knows)
    assert scene.go_on(summed) == [[ALL]] * SIZE  # it was not lost: no view is without it


def test_a_stalled_operation_wakes_no_link_and_different_calls_are_found(thread_run: ThreadRun) -> None:
    scene = Scene(thread_run)
    pairs = scene.await_rest()
    late, last = max(pairs)

    def links() -> set[Link]:
        return {link for pair in pairs if (link := scene.remote(*pair).link) is not None and link.is_resting}

    resting, still_resting = call_on_loop(links), set[Link]()

    def come_late(group: Group) -> None:
        if group.rank == late:
            time.sleep(5 * ANNOUNCE_SECONDS)
            still_resting.update(call_on_loop(links) & resting)
        group.barrier()

    def differ(group: Group) -> None:
        with pytest.raises(MismatchError, match="called different things") as error:
            group.all_reduce(np.zeros(5 if group.rank == last else 6))
        assert f"rank {last}" in str(error.value)

    scene.go_on(come_late, differ)
    assert still_resting  # a link that was woken is another one when it rests again; some are if the leader changes


def test_different_calls_of_two_ranks_whose_link_rests_are_found(thread_run: ThreadRun) -> None:
    scene = Scene(thread_run)
    pair = min(scene.await_rest())

    def differ(group: Group) -> None:
        part = group.split(color=group.rank if group.rank not in pair else pair[0])
        part.barrier()  # opens the lane
        if group.rank in pair:
            until(lambda: scene.remote(*pair).is_resting and scene.remote(*reversed(pair)).is_resting)
            with pytest.raises(MismatchError, match="called different things"):
                part.broadcast(np.zeros(5), 1 - part.rank)  # each waits for the other one
        group.barrier()

    scene.go_on(differ)


@pytest.mark.usefixtures("links_are_awaited")
def test_a_link_that_cannot_be_woken_has_ended(thread_run: ThreadRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting_links, "WAKE_LINK_SECONDS", 0.2)
    scene = Scene(thread_run)
    first, second = min(scene.await_rest())
    mesh, link = scene.mesh(first), call_on_loop(scene.remote, first, second).link
    assert link is not None

    async def dial_nothing(*_: object, **__: object) -> None:
        """Reach nothing, as if the network were cut."""

    with monkeypatch.context() as cut:
        for dialling in (mesh, mesh._dialer):
            cut.setattr(dialling, "dial", dial_nothing)
        call_on_loop(link.send, messages.encode(messages.Ping(1)))
        until(lambda: link.ended.is_set() and node_of(scene.groups[second]).card.id not in mesh.met)
    until(lambda: node_of(scene.groups[second]).card.id in mesh.met)  # it is dialled again
    assert scene.go_on(summed) == [[ALL]] * SIZE


def test_a_later_life_of_a_node_gets_a_link_though_that_with_the_earlier_life_rests(
    thread_run: ThreadRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting_links, "WAKE_LINK_SECONDS", 0.2)
    scene = Scene(thread_run)
    first, second = min(scene.await_rest())
    mesh, link = scene.mesh(first), call_on_loop(scene.remote, first, second).link
    hello = scene.mesh(second).hello()
    card = msgspec.structs.replace(hello.card, life=bytes([255]) * len(hello.card.life))
    later = msgspec.structs.replace(hello, card=card)

    def answer() -> messages.Welcome | messages.Refusal:
        return mesh._admission.judge(later, source="127.0.0.1")

    async def dial_nothing(*_: object, **__: object) -> None:
        """Reach nothing, as if the earlier life had been killed."""

    assert link is not None
    with monkeypatch.context() as cut:
        for dialling in (mesh, mesh._dialer):
            cut.setattr(dialling, "dial", dial_nothing)
        refusal = call_on_loop(answer)
        assert isinstance(refusal, messages.Refusal)
        assert "is in use" in refusal.reason
        until(lambda: link.ended.is_set() and card.id not in mesh.met)
        assert isinstance(call_on_loop(answer), messages.Welcome)
    until(lambda: card.id in mesh.met)
    assert scene.go_on(summed) == [[ALL]] * SIZE


def test_a_link_that_only_one_end_can_open_does_not_rest(
    thread_run: ThreadRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = set[tuple[bytes, bytes]]()

    async def reach_nothing(self: resting_links.RestingLinks, remote: RemoteProcess) -> None:
        tried.add((self._id, remote.card.id))
        remote.is_reachable = False

    monkeypatch.setattr(resting_links.RestingLinks, "_try_to_reach", reach_nothing)
    scene = Scene(thread_run)
    ids = {node_of(group).card.id: rank for rank, group in scene.groups.items()}

    def are_all_tried() -> bool:
        expected = set(map(frozenset, scene.expected("hypercube")))
        return bool(expected) and {frozenset((ids[one], ids[other])) for one, other in tried} >= expected

    until(are_all_tried)
    assert call_on_loop(scene.resting) == set()
    assert scene.go_on(summed) == [[ALL]] * SIZE
