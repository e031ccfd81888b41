"""Runs of hundreds of members: they form, lose several members at once, and go on, in few messages.

A run of the suite has just more members than the size from which protocols save messages; `make simulate` has runs of
256 members, and some of 1,024: these take minutes.
"""

from __future__ import annotations

import functools
import gc
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.sim.test_formation import perform
from tests.sim.test_membership import perform as perform_views
from tests.support.seeds import batches, seeds

from covey.lab.resting import RestingWorld
from covey.lab.world import SimulatedNode, SimulatedWorld
from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Installed, QuorumLost, SendToNode
from covey.proto.formation import Formation, joiners, proposals
from covey.proto.formation.joiners import rank_order
from covey.proto.membership import Membership, ballots
from covey.proto.overlay import SPARSE, Overlay, Topology
from covey.wire.formation import FoundingMember, Propose, Standing, Terms
from covey.wire.membership import MemberKey, Pulse, Record, State, View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

GROUP = 7
FORMED_WITHIN = 30.0
VIEW_WITHIN = 25.0
"""Virtual seconds from the last fault to the view of exactly the living: members have 15 s to answer a ballot."""


def size_of(seed: int) -> int:
    """Return the members of a run: few in the suite, and most in one of twenty runs."""
    return 132 if seed == 0 else 1024 if seed % 20 == 19 else 256


@pytest.fixture(autouse=True)
def _without_searches_for_garbage() -> Iterator[None]:
    """Keep Python from looking for garbage in millions of objects again and again: a run of 1,024 makes nearly none."""
    gc.disable()
    yield
    gc.enable()


class CountedFormation(Formation):
    """A real formation that counts what it sends."""

    counted: Counter[type]

    def outgoing(self) -> list[tuple[bytes, Any]]:
        messages = super().outgoing()
        self.counted.update(type(message) for _, message in messages)
        return messages


@pytest.mark.parametrize("seed", seeds(1))
def test_hundreds_of_nodes_agree_on_a_run_in_a_few_messages_each(seed: int) -> None:
    chance, size = random.Random(seed), size_of(seed)
    world, counted = SimulatedWorld(seed, delay=0.02, loss=chance.choice([0.0, 0.01])), Counter[type]()
    terms = Terms("a run", "train.py", size, 2, None, "1", "auto")
    for number in range(size):
        me = FoundingMember(chance.randbytes(32), chance.randbytes(16), f"n{number}", f"host {number % 9}", b"")
        core = CountedFormation(me, terms, random.Random(chance.random()), 0.0)
        core.counted = counted
        world.nodes[me.id] = SimulatedNode(me.id, me.life, core)
    world.introduce()
    cores: list[Any] = [node.core for node in world.nodes.values()]
    while any(core.formed is None for core in cores):
        assert world.now < FORMED_WITHIN, [core.report().waiting for core in cores if core.formed is None][:3]
        world.run(world.now + 0.5)
    views = {core.formed.view for core in cores}
    (view,) = views
    assert view == rank_order(view)
    assert {member.id for member in view} == set(world.nodes)
    # Two steps to one member and back, and what was lost is repeated; all to all would be the square.
    assert counted[Propose] < 3 * size
    assert counted[Standing] < 12 * size


@pytest.mark.parametrize("batch", batches(2))
def test_formations_in_which_one_member_tells_all_keep_the_invariants(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules for hundreds of members, played with a few and all faults: that member is lost, cut off, or late."""
    monkeypatch.setattr(proposals, "TELL_ALL", 2)
    monkeypatch.setattr(joiners, "CROWD_OF_JOINERS", 2)
    plays = [perform(seed, hard=seed % 2 == 1) for seed in range(40 * batch, 40 * batch + 40)]
    assert sum(len(play.returned) for play in plays) > 80
    assert any(play.dead for play in plays)


@pytest.mark.parametrize("batch", seeds(1))
def test_views_in_which_changes_are_told_together_keep_the_invariants(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules for hundreds of members, played with a few, all faults, and operations in several groups."""
    monkeypatch.setattr(ballots, "CROWD_OF_MEMBERS", 1)
    totals = sum((perform_views(seed).count() for seed in range(60 * batch, 60 * batch + 60)), Counter[str]())
    assert totals["views"] > 20, totals
    assert totals["operations that returned"] > 300, totals


class ViewMember:
    """One member, or the keeper, of a run: its views, with operations that stop at once."""

    def __init__(self, core: Membership, size: int, counted: Counter[type]) -> None:
        self.core, self.counted = core, counted
        self.state = State(GROUP, tuple(range(size)), 0)
        self.now = 0.0
        self.views: list[View] = []
        self.end: Excluded | QuorumLost | None = None

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        self.now = now
        return self.core.link_up(peer_id, peer_life, now)

    def link_down(self, peer_id: bytes, now: float) -> None:
        self.now = now
        self.core.link_down(peer_id, now)

    def received(self, peer_id: bytes, message: Any, now: float) -> None:
        self.now = now
        self.core.received(peer_id, message, now)

    def tick(self, now: float) -> None:
        self.now = now
        self.core.tick(now)

    def next_deadline(self) -> float:
        return self.core.next_deadline()

    def outgoing(self) -> list[tuple[bytes, Any]]:
        sent: list[tuple[bytes, Any]] = []
        while effects := self.core.effects():
            for effect in effects:
                match effect:
                    case SendToNode(peer, message):
                        sent.append((peer, message))
                    case Freeze(number):
                        self.core.frozen(number, [self.state], self.now)
                    case Installed(view):
                        self.views.append(view)
                    case Excluded() | QuorumLost():
                        self.end = effect
        self.counted.update(type(message) for _, message in sent)
        return sent


def start(
    world: SimulatedWorld, size: int, chance: random.Random, counted: Counter[type], *, has_keeper: bool = False
) -> list[bytes]:
    """Add the members of a run to a world, all with links, and last the keeper; return their ids by rank."""
    keys = [MemberKey(chance.randbytes(32), chance.randbytes(16)) for _ in range(size)]
    record: Record = first_record(keys, chance.randbytes(16), anchor=chance.randrange(size), has_keeper=has_keeper)
    keeper = MemberKey(chance.randbytes(32), chance.randbytes(16)) if has_keeper else None
    for key in [*keys, *([keeper] if keeper else [])]:
        seeded = random.Random(chance.random())
        core = Membership(record, key.id, key.life, seeded, 0.0, keeper=keeper.id if keeper else None)
        world.nodes[key.id] = SimulatedNode(key.id, key.life, ViewMember(core, size, counted))
        world._names[key.id] = key.id.hex()[:4]
    world.introduce()
    return [key.id for key in keys]


@pytest.mark.parametrize("has_keeper", [True, False])
@pytest.mark.parametrize("seed", seeds(1))
def test_hundreds_of_members_go_on_without_those_that_are_lost_and_lose_no_other(seed: int, has_keeper: bool) -> None:
    """Members die in two waves, the second while the first is decided, and links between the others break."""
    chance, size = random.Random(seed), size_of(seed)
    counted = Counter[type]()
    world = SimulatedWorld(seed, delay=0.02, loss=chance.choice([0.0, 0.01]), notice=0.3)
    ids = start(world, size, chance, counted, has_keeper=has_keeper)
    living = lose_many(world, ids, chance)
    for _ in range(chance.randint(0, 20)):
        world.at(1.0 + chance.uniform(0.0, 2.0), world.flap, *chance.sample(ids, 2))
    world.run(3.0)
    views = agreed_views(world, ids, living)
    # A ballot takes four messages for each member, and some start at the same time or have to be repeated.
    assert sum(counted.values()) - counted[Pulse] < 60 * size * len(views)


def lose_many(
    world: SimulatedWorld, ids: list[bytes], chance: random.Random, *, with_leader: bool = False
) -> tuple[int, ...]:
    """Crash members in two waves, half of them silently; return the ranks of the others."""
    size, first = len(ids), world.nodes[ids[0]].core
    assert isinstance(first, ViewMember)
    lost = chance.sample(range(size), chance.randint(2, size // 4))
    if with_leader and (leader := first.core.view.tie_breaker) not in lost:
        lost[0] = leader
    second_at = 1.0 + chance.uniform(0.0, 1.5)
    for number, rank in enumerate(lost):
        world.at(
            1.0 if number % 2 else second_at, lambda id: world.crash(id, silently=chance.random() < 0.5), ids[rank]
        )
    return tuple(rank for rank in range(size) if rank not in set(lost))


def agreed_views(world: SimulatedWorld, ids: list[bytes], living: tuple[int, ...]) -> dict[int, View]:
    """Wait for the view of exactly the living members; return all views, which have lost no living one."""
    began_at = world.now
    members: list[Any] = [world.nodes[ids[rank]].core for rank in living]
    while any(not member.views or member.views[-1].ranks != living for member in members):
        late = [member.views[-1].ranks if member.views else () for member in members]
        assert world.now < began_at + VIEW_WITHIN, [sorted(set(living) - set(ranks)) for ranks in late][:3]
        world.run(world.now + 0.25)
    views: dict[int, set[View]] = {}
    for member in members:
        assert member.end is None, "a living member is in no view"
        for view in member.views:
            views.setdefault(view.number, set()).add(view)
    assert all(len(same) == 1 for same in views.values()), "members have different views of one number"
    assert all(set(living) <= set(view.ranks) for (view,) in views.values()), "a view is without a living member"
    return {number: view for number, (view,) in views.items()}


class AwakeLinks:
    """The links that members keep awake: with their neighbours in an overlay, and with the leader."""

    def __init__(self, topology: Topology) -> None:
        self.world: SimulatedWorld | None = None
        self.ids: list[bytes] = []
        self._topology = topology

    def of(self, id: bytes) -> Collection[bytes]:
        assert self.world is not None
        member = self.world.nodes[id].core
        assert isinstance(member, ViewMember)
        view, me = member.core.view, self._rank(id)
        leader = member.core.leader(self.world.now)
        near = self._neighbours(view.ranks, me) if me in view.ranks else frozenset()
        return near if leader in (None, me) else near | {self.ids[leader]}

    @functools.cache  # noqa: B019  lives as long as its test
    def _rank(self, id: bytes) -> int:
        return self.ids.index(id)

    @functools.cache  # noqa: B019
    def _overlay(self, ranks: tuple[int, ...]) -> Overlay:
        return Overlay(self._topology, len(self.ids), ranks)

    @functools.cache  # noqa: B019
    def _neighbours(self, ranks: tuple[int, ...], rank: int) -> frozenset[bytes]:
        return frozenset(self.ids[other] for other in self._overlay(ranks).neighbours(rank))


@pytest.mark.parametrize("seed", seeds(1))
def test_hundreds_of_members_whose_links_rest_go_on_without_those_that_are_lost(seed: int) -> None:
    """Few links are awake, and few are woken, although most members notice no loss; the leader is lost in half of all
    runs."""
    chance, size = random.Random(seed), size_of(seed)
    counted, awake = Counter[type](), AwakeLinks(SPARSE[seed % 2])
    world = awake.world = RestingWorld(
        seed,
        wants_awake=awake.of,
        rest_after=5.0,
        wake_within=3.0,
        dial=0.3,
        streams_wake=False,
        delay=0.02,
        loss=chance.choice([0.0, 0.01]),
        notice=0.3,
    )
    ids = awake.ids = start(world, size, chance, counted)
    world.rest()
    world.run(0.9)
    living = lose_many(world, ids, chance, with_leader=seed % 4 in (0, 3))
    counted.clear()
    woken_before = world.wakes
    world.run(3.0)
    views = agreed_views(world, ids, living)
    assert sum(counted.values()) - counted[Pulse] < 20 * size * len(views)
    # Each ballot wakes the links of its proposer; all to all would be half of the square.
    assert world.wakes - woken_before < 15 * size * len(views)
    world.run(world.now + 12.0)
    links = sum(world.is_awake(one, other) for one in (ids[rank] for rank in living) for other in ids)
    assert links < len(living) * (3 * size.bit_length() + 3), "links rest again"
