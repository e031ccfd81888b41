"""Copies of a store among processes that come and go: no answered change is lost or applied twice."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import pytest
from tests.support.seeds import batches

from covey.proto.replication import Answered, Replica, Send
from covey.wire import store as wire

if TYPE_CHECKING:
    from covey.wire.store import Answer

STORE = 5
KEYS = ("a", "b")


class World:
    """Processes 0, 1, 2, ... with a replica each, links that keep the order, and views that arrive in turn."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.replicas: dict[int, Replica] = {}
        self.links: dict[tuple[int, int], deque[Send]] = {}
        self.config = 0
        self.members: tuple[int, ...] = ()
        self.pending_views: dict[int, deque[tuple[int, tuple[int, ...], bool]]] = {}
        """By process: the views that were agreed on and that it has not installed yet."""
        self.asked: dict[tuple[int, int], wire.Question | wire.Open] = {}
        self.answers: dict[tuple[int, int], Answer] = {}
        self.numbers = 0
        self.given_up: list[tuple[int, int]] = []
        """Questions of processes that are gone: they may have had an effect or not."""

    def start(self, count: int) -> None:
        for process in range(count):
            self.replicas[process] = Replica(process)
            self.pending_views[process] = deque()
        self.agree(tuple(range(count)), is_first=True)

    def agree(self, members: tuple[int, ...], *, is_first: bool = False) -> None:
        self.config, self.members = self.config + 1, members
        for process in list(self.replicas):
            if process in members:
                self.pending_views[process].append((self.config, members, is_first))
            else:
                self.remove(process)

    def remove(self, process: int) -> None:
        """The process is excluded: from now on no member hears it."""
        del self.replicas[process]
        self.given_up += [key for key in self.asked if key[0] == process and key not in self.answers]
        for pair in [pair for pair in self.links if process in pair]:
            del self.links[pair]

    def add(self) -> None:
        process = max([*self.replicas, *(key[0] for key in self.asked)]) + 1
        self.replicas[process] = Replica(process)
        self.pending_views[process] = deque()
        self.agree((*self.members, process))

    def ask(self, process: int, question: wire.Question | wire.Open) -> None:
        self.numbers += 1
        self.asked[process, self.numbers] = question
        self.replicas[process].ask(STORE, self.numbers, question)
        self.perform(process)

    def perform(self, process: int) -> None:
        for effect in self.replicas[process].effects():
            if isinstance(effect, Answered):
                assert (process, effect.number) not in self.answers, "answered twice"
                self.answers[process, effect.number] = effect.answer
            elif effect.peer in self.replicas:
                wire.decode_body(wire.encode_body(effect.body))
                self.links.setdefault((process, effect.peer), deque()).append(effect)

    def deliver(self, pair: tuple[int, int]) -> None:
        sent = self.links[pair].popleft()
        if not self.links[pair]:
            del self.links[pair]
        self.replicas[pair[1]].heard(pair[0], sent.store, sent.number, sent.body)
        self.perform(pair[1])

    def install(self, process: int) -> None:
        config, members, is_first = self.pending_views[process].popleft()
        self.replicas[process].configure(config, members, is_first=is_first)
        self.perform(process)

    def break_link(self, one: int, other: int) -> None:
        """All that is on its way between two processes is lost; both notice, one after the other."""
        for pair in ((one, other), (other, one)):
            self.links.pop(pair, None)
        for process, peer in ((one, other), (other, one)):
            self.replicas[process].repeat(peer)
            self.perform(process)

    def step(self) -> bool:
        """Do one thing that can happen; False if nothing is left to happen by itself."""
        choices: list[tuple[str, object]] = [("deliver", pair) for pair in self.links]
        choices += [("install", process) for process, views in self.pending_views.items()
                    if views and process in self.replicas]  # fmt: skip
        if not choices:
            return False
        kind, what = self.random.choice(sorted(choices, key=str))
        if kind == "deliver":
            self.deliver(what)  # type: ignore[arg-type]
        else:
            self.install(what)  # type: ignore[arg-type]
        return True

    def settle(self) -> None:
        for _ in range(200_000):
            if not self.step():
                return
        raise AssertionError("the messages never end")


@pytest.mark.parametrize("batch", batches(2))
def test_answered_changes_survive_any_losses_and_are_applied_once(batch: int) -> None:
    for seed in range(40 * batch, 40 * batch + 40):
        world = World(seed)
        dice = random.Random(seed + 10_000)
        world.start(dice.randint(1, 5))
        world.ask(0, wire.Open())
        world.settle()
        assert isinstance(world.answers[0, 1], wire.Done)
        for _ in range(dice.randint(20, 120)):
            roll = dice.random()
            process = dice.choice(sorted(world.replicas))
            if roll < 0.35:
                world.ask(process, wire.Add(dice.choice(KEYS), 1))
            elif roll < 0.45:
                world.ask(process, wire.Push("q", b"%d" % world.numbers))
            elif roll < 0.5:
                world.ask(process, wire.Pop("q", waits=True))
            elif roll < 0.56 and len(world.replicas) > 1:
                one, other = dice.sample(sorted(world.replicas), 2)
                world.break_link(one, other)
            elif roll < 0.62 and len(world.members) > 1:
                lost = dice.choice(world.members)
                if not any(world.replicas[member].has_copy for member in world.members if member != lost):
                    continue  # nothing can survive that
                world.agree(tuple(member for member in world.members if member != lost))
            elif roll < 0.66 and len(world.members) < 6:
                world.add()
            else:
                for _ in range(dice.randint(1, 30)):
                    world.step()
        world.settle()
        check(world, seed)


def check(world: World, seed: int) -> None:
    for key in KEYS:
        sums = [
            answer.number
            for at, answer in world.answers.items()
            if world.asked[at] == wire.Add(key, 1) and isinstance(answer, wire.Done)
        ]
        lost = sum(1 for at in world.given_up if world.asked[at] == wire.Add(key, 1))
        assert len(set(sums)) == len(sums), (seed, key, "two processes got the same sum")
        assert max(sums, default=0) <= len(sums) + lost, (seed, key, "an addition was applied twice")
    popped = [
        answer.values[0]
        for at, answer in world.answers.items()
        if isinstance(world.asked[at], wire.Pop) and isinstance(answer, wire.Done)
    ]
    assert len(set(popped)) == len(popped), (seed, "a value was taken twice")
    pops_lost = sum(1 for at in world.given_up if isinstance(world.asked[at], wire.Pop))
    pushed = [at for at in world.answers if isinstance(world.asked[at], wire.Push)]
    waiting = [at for at in world.asked if at not in world.answers and at not in world.given_up]
    assert all(isinstance(world.asked[at], wire.Pop) for at in waiting), (seed, "a question has no answer", waiting)
    if waiting:  # then the queue is empty: all that was pushed was taken, but for what is lost with processes
        assert len(popped) >= len(pushed) - pops_lost, (seed, "a value is lost")
    # All copies are equal: a process that asks now is answered the same, whichever member answers.
    survivor = min(world.replicas)
    world.ask(survivor, wire.Add("end", 1))
    world.settle()
    assert world.answers[survivor, world.numbers] == wire.Done(number=1), seed


def test_an_owner_that_was_excluded_answers_nothing() -> None:
    world = World(1)
    world.start(3)
    world.ask(0, wire.Open())
    world.settle()
    old = world.replicas[0]
    world.members, world.config = (1, 2), world.config + 1
    for process in (1, 2):  # the owner does not hear of the view
        world.replicas[process].configure(world.config, (1, 2))
        world.perform(process)
    old.ask(STORE, 99, wire.Add("a", 1))
    world.asked[0, 99] = wire.Add("a", 1)
    world.perform(0)
    world.settle()
    assert (0, 99) not in world.answers
    world.ask(2, wire.Add("a", 1))
    world.settle()
    assert world.answers[2, world.numbers] == wire.Done(number=1)


def test_a_store_of_one_process_answers_at_once() -> None:
    replica = Replica(7)
    replica.ask(STORE, 1, wire.Open())
    assert replica.effects() == []
    replica.configure(0, (7,), is_first=True)
    replica.ask(STORE, 2, wire.Add("n", 41))
    assert replica.effects() == [Answered(1, wire.Done()), Answered(2, wire.Done(number=41))]
