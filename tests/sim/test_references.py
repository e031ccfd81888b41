"""Handles that nodes pass on while nodes come and are lost: none is of no use, and no object stays without one.

A `World` is a function of its seed. Messages of a pair arrive in order, those of different pairs in any. Nodes learn
of newcomers at different times, in the order of their seats, and read nothing of them before.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.base.errors import RemoteProtocolError
from covey.proto.references import ReferenceCounts

if TYPE_CHECKING:
    from collections.abc import Callable

NODES = 5
NEWCOMERS = 2
STEPS = 500
KEY = b"key"


@dataclass(eq=False)
class Held:
    """A handle that a node holds."""

    owner: int
    target: int
    givers: frozenset[int]
    """The nodes that have passed it on, from its owner to its holder; the loss of one may make it useless."""


class World:
    """Nodes with the counts of their objects, the handles that they hold, and the messages between them."""

    def __init__(self, seed: int, *, expects_newcomers: bool = True) -> None:
        """`expects_newcomers` tells whether owners count handles for nodes that they do not know yet."""
        self.seed, self.chance = seed, random.Random(seed)
        self.known = {node: NODES - NEWCOMERS for node in range(NODES - NEWCOMERS)}
        """By node: it knows the nodes below this one."""
        self.known |= dict.fromkeys(range(NODES - NEWCOMERS, NODES), NODES)
        self.expects_newcomers = expects_newcomers
        self.counts = {node: ReferenceCounts(node, functools.partial(self.may_be_node, node)) for node in range(NODES)}
        self.objects: dict[int, set[int]] = {node: set() for node in range(NODES)}
        """By owner: objects that are not freed."""
        self.held: dict[int, list[Held]] = {node: [] for node in range(NODES)}
        self.pipes: dict[tuple[int, int], deque[tuple[Any, ...]]] = {}
        self.dead: set[int] = set()
        self.notices: list[tuple[int, int]] = []
        """Node and peer: losses that the node has not noticed."""
        self.lost: set[tuple[int, int]] = set()
        """Node and peer: losses that it has noticed."""
        self.used = self.passed = 0

    def may_be_node(self, node: int, seat: int) -> bool:
        return seat < (NODES if self.expects_newcomers else self.known[node])

    # What nodes do

    def send(self, source: int, target: int, *message: Any) -> None:
        if (source, target) not in self.lost:
            self.pipes.setdefault((source, target), deque()).append(message)

    def freed(self, owner: int, targets: list[int]) -> None:
        for target in targets:
            assert target in self.objects[owner], "an object is freed twice"
            self.objects[owner].remove(target)

    def export(self, node: int) -> None:
        target = self.counts[node].export(KEY)
        self.objects[node].add(target)
        self.held[node].append(Held(node, target, frozenset()))

    def pass_on(self, node: int, peer: int, handle: Held) -> None:
        """As `ValueConverter` and `CallService` do: tell the owner, then send; or give it up, for some reason."""
        self.passed += 1
        if handle.owner == node:
            assert self.counts[node].give(handle.target, peer)
        elif handle.owner != peer:
            self.send(node, handle.owner, "share", handle.target, peer)
        if self.chance.random() < 0.1:  # the call is cancelled before it is sent
            if handle.owner == node:
                if (node, peer) not in self.lost:
                    self.freed(node, self.counts[node].dropped(handle.target, peer))
            elif handle.owner != peer:
                self.send(node, handle.owner, "withdraw", handle.target, peer)
        else:
            self.send(node, peer, "value", handle.owner, handle.target, handle.givers | {node})

    def drop(self, node: int, handle: Held) -> None:
        self.held[node].remove(handle)
        if handle.owner == node:
            self.freed(node, self.counts[node].dropped(handle.target, node))
        else:
            self.send(node, handle.owner, "drop", handle.target)

    def receive(self, source: int, node: int, kind: str, *rest: Any) -> None:
        counts = self.counts[node]
        match kind:
            case "value":
                owner, target, givers = rest
                if owner == node:
                    if not counts.returned(target, source):
                        assert self.may_be_refused(givers), "a handle is of no use at home"
                        return
                elif owner != source:
                    self.send(node, owner, "claim", target, source)
                self.held[node].append(held := Held(owner, target, givers))
                if self.chance.random() < 0.1:  # the call was refused, and no value is made of it
                    self.drop(node, held)
            case "share":
                counts.shared(rest[0], source, rest[1])
            case "withdraw":
                self.freed(node, counts.withdrawn(rest[0], source, rest[1]))
            case "claim":
                counts.claimed(rest[0], rest[1], source, KEY)
            case "drop":
                self.freed(node, counts.dropped(rest[0], source, key=KEY))
            case "use":
                target, givers = rest
                self.used += 1
                if not counts.holds(target, source):
                    assert self.may_be_refused(givers), "a handle is of no use to its holder"
                else:
                    assert target in self.objects[node], "an object is used after it was freed"

    def may_be_refused(self, givers: frozenset[int]) -> bool:
        return bool(givers & self.dead)

    def kill(self, node: int) -> None:
        self.dead.add(node)
        for other in set(range(NODES)) - self.dead:
            self.notices.append((other, node))

    def learn(self, node: int) -> None:
        self.known[node] = min(NODES, self.known[node] + 1)

    def notice(self, node: int, peer: int) -> None:
        """As calls do: once all that has arrived from a peer is read. What is still on the way is lost."""
        self.known[node] = max(self.known[node], peer + 1)
        self.pipes.pop((peer, node), None)
        self.pipes.pop((node, peer), None)
        self.lost.add((node, peer))
        self.freed(node, self.counts[node].lost(peer))
        self.held[node] = [each for each in self.held[node] if each.owner != peer]

    # The course

    def step(self) -> None:
        live = sorted(set(range(NODES)) - self.dead)
        chance, node = self.chance, self.chance.choice(live)
        held = self.held[node]
        kinds, weights = ["export", "pass", "drop", "use", "receive", "notice", "learn"], [1, 6, 3, 3, 12, 3, 0.2]
        match chance.choices(kinds, weights)[0]:
            case "export":
                self.export(node)
            case "learn":
                self.learn(node)
            case "pass" if held:
                peer = chance.randrange(self.known[node])
                if fit := [handle for handle in held if handle.owner < self.known[peer]]:  # else it could not claim it
                    self.pass_on(node, peer, chance.choice(fit))
            case "drop" if held:
                self.drop(node, chance.choice(held))
            case "use" if held:
                handle = chance.choice(held)
                if handle.owner == node:
                    self.receive(node, node, "use", handle.target, handle.givers)
                else:
                    self.send(node, handle.owner, "use", handle.target, handle.givers)
            case "receive":
                self.receive_one()
            case "notice" if self.notices:
                self.notice(*self.notices.pop(chance.randrange(len(self.notices))))

    def receive_one(self) -> bool:
        waiting = [
            (source, node)
            for (source, node), pipe in self.pipes.items()
            if pipe and node not in self.dead and source < self.known[node]
        ]
        if not waiting:
            return False
        source, node = self.chance.choice(sorted(waiting))
        self.receive(source, node, *self.pipes[source, node].popleft())
        return True

    def play(self) -> World:
        deaths = {self.chance.randrange(STEPS): node for node in self.chance.sample(range(NODES), self.seed % 3)}
        for step in range(STEPS):
            self.step()
            if step in deaths:
                self.kill(deaths[step])
        for node in range(NODES):
            self.known[node] = NODES
        while self.receive_one() or self.notices:
            if self.notices:
                self.notice(*self.notices.pop())
        for node in set(range(NODES)) - self.dead:
            for handle in list(self.held[node]):
                self.drop(node, handle)
        while self.receive_one():
            pass
        for node in set(range(NODES)) - self.dead:
            assert (len(self.counts[node]), self.objects[node]) == (0, set()), "an object stays without a handle"
            assert not +self.counts[node]._refused, "a refused claim is not forgotten"
        return self


@in_turn(seed=seeds(150))
def test_a_handle_can_be_used_by_its_holder_and_no_object_stays_without_one(seed: int) -> None:
    World(seed).play()


def test_the_simulation_notices_an_owner_that_counts_nothing_for_newcomers_it_does_not_know() -> None:
    with pytest.raises((AssertionError, RemoteProtocolError)):
        play_all(range(300), expects_newcomers=False)


def test_the_courses_pass_and_use_many_handles() -> None:
    worlds = [World(seed).play() for seed in range(30)]
    assert sum(world.used for world in worlds) > 300
    assert sum(world.passed for world in worlds) > 1500


def in_run(seat: int) -> bool:
    return seat < NODES


def ignore(*_: Any) -> None:
    """Do nothing."""


def free_nothing(*_: Any) -> list[int]:
    return []


def claim_without_share(counts: ReferenceCounts, target: int, giver: int, taker: int, key: bytes) -> None:
    if (found := counts._objects.get(target)) is not None:
        found.held[taker] += 1


def forgetful_claim(counts: ReferenceCounts, target: int, giver: int, taker: int, key: bytes) -> None:
    """Refuse a claim, and forget it."""
    if (found := counts._objects.get(target)) is not None:
        found.held[taker] += 1
        found.on_way[giver, taker] -= giver not in counts._gone


def claim_from_holders_only(counts: ReferenceCounts, target: int, giver: int, taker: int, key: bytes) -> None:
    """Refuse what comes before the claim of the giver."""
    found = counts._objects.get(target)
    if found is None or not (found.held[giver] > 0 or found.on_way[giver, taker] > 0):
        counts._refused[taker] += 1
    else:
        found.held[taker] += 1
        found.on_way[giver, taker] -= 1


def keep_what_was_on_its_way(counts: ReferenceCounts, peer: int) -> list[int]:
    counts._gone.add(peer)
    for each in counts._objects.values():
        each.held.pop(peer, None)
    return counts._free(list(counts._objects))


def keep_what_was_held(counts: ReferenceCounts, peer: int) -> list[int]:
    counts._gone.add(peer)
    for each in counts._objects.values():
        for key in [key for key in each.on_way if peer in key]:
            del each.on_way[key]
    return counts._free(list(counts._objects))


def give_to_the_lost(counts: ReferenceCounts, target: int, peer: int) -> bool:
    counts._objects[target].held[peer] += 1
    return True


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "does not count what is on its way": ("shared", ignore),
    "does not hear that a handle is not passed on": ("withdrawn", free_nothing),
    "does not count claims": ("claimed", ignore),
    "counts a claim beside what was shared": ("claimed", claim_without_share),
    "wants to know the giver first": ("claimed", claim_from_holders_only),
    "forgets that it has refused a claim": ("claimed", forgetful_claim),
    "keeps what a lost node was passing on": ("lost", keep_what_was_on_its_way),
    "keeps the handles of a lost node": ("lost", keep_what_was_held),
    "counts handles of a node that is gone": ("give", give_to_the_lost),
}


def play_all(courses: range, *, expects_newcomers: bool = True) -> None:
    for seed in courses:
        World(seed, expects_newcomers=expects_newcomers).play()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_an_owner_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceCounts, *MUTANTS[mutant])
    with pytest.raises((AssertionError, RemoteProtocolError)):
        play_all(range(300))


def test_a_node_that_drops_what_it_never_had_breaks_the_protocol() -> None:
    counts = ReferenceCounts(0, in_run)
    target = counts.export(KEY)
    for key in (b"", KEY, b"guess"):
        with pytest.raises(RemoteProtocolError, match="so many never were"):
            counts.dropped(target, 1, key=key)
    assert counts.give(target, 1)
    with pytest.raises(RemoteProtocolError, match="so many never were"):
        counts.dropped(target, 1, 2)
    counts.shared(target, 3, 2)  # node 3 holds none: nothing is kept for it
    assert counts.dropped(target, 0) == []
    assert counts.dropped(target, 1) == [target]


def test_a_claim_with_a_wrong_key_is_refused_and_harms_no_other_handle() -> None:
    counts = ReferenceCounts(0, in_run)
    target = counts.export(KEY)
    assert counts.give(target, 2)
    for number, key in ((target, b"guess"), (target + 1, KEY)):
        counts.claimed(number, 1, 3, key)
        counts.claimed(number, 1, 2, key)
        assert not counts.holds(number, 3)
    assert counts.dropped(target, 3, key=b"guess") == counts.dropped(target + 1, 2, key=KEY) == []
    assert counts.dropped(target, 2, key=b"guess") == []
    assert counts.holds(target, 2)
    assert counts.dropped(target, 0) == []
    assert counts.dropped(target, 2, key=KEY) == [target]


def test_seats_that_no_node_of_the_run_can_have_get_no_entries() -> None:
    counts = ReferenceCounts(0, in_run)
    target = counts.export(KEY)
    counts.claimed(target, 1000, 2, KEY)
    assert counts.holds(target, 2)
    counts.shared(target, 2, 1000)
    counts.withdrawn(target, 2, 1000)
    assert not counts._objects[target].on_way
    assert counts.dropped(target, 0) == []
    assert counts.dropped(target, 2, key=KEY) == [target]


def test_what_a_node_said_before_it_was_lost_may_be_read_after_that() -> None:
    counts = ReferenceCounts(0, in_run)
    target = counts.export(KEY)
    assert counts.give(target, 2)
    assert counts.lost(2) == []
    counts.claimed(target, 1, 2, KEY)
    counts.claimed(target, 1, 2, b"guess")
    assert not counts.holds(target, 2), "nothing would drop this handle any more"
    assert counts.dropped(target, 2, key=KEY) == []
    assert counts.dropped(target, 0) == [target]
