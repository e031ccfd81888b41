"""Nodes with little memory for arguments, whose functions call further ones: all calls end, and none by its deadline.

A `MemoryWorld` is a function of its seed. The program of each node holds memory too, more or less of it, sometimes all.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import CallEnding
from covey.wire import calls as wire

NODES = 4
ROOM = 1000
HANDLERS = 10_000
"""So many that calls wait for memory only."""


class NodeMemory:
    """The pool of one node; `held` is what its program has."""

    def __init__(self) -> None:
        self.held = self.used = self.waits = self.needed = 0

    def reserve(self, nbytes: int, *, is_needed: bool) -> bool:
        if not is_needed and self.held + self.used + nbytes > ROOM:
            return False
        self.used += nbytes
        self.needed += is_needed
        return True

    def note_wait(self) -> None:
        self.waits += 1


class MemoryWorld:
    """Nodes with their cores, and the messages between them."""

    def __init__(self, seed: int, *, tells_depth: bool = True) -> None:
        self.chance, self._tells_depth = random.Random(seed), tells_depth
        self.now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, Any]] = []
        self._pipes: dict[tuple[int, int], float] = {}
        self.memory = {seat: NodeMemory() for seat in range(NODES)}
        self.cores = {
            seat: Calling(handlers=HANDLERS, message_bytes=1 << 40, memory=self.memory[seat]) for seat in range(NODES)
        }
        self.dead: set[int] = set()
        self.outcomes: dict[tuple[int, int, int], Any] = {}
        self._then: dict[tuple[int, int, int], Any] = {}
        """By caller, peer and number of a call that a function has made: how this function goes on."""
        self._sizes: dict[tuple[int, int, int], int] = {}
        """By callee, caller and number: memory that the arguments of a call have."""
        self.depths: Counter[int] = Counter()

    def after(self, seconds: float, action: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def call(self, caller: int, depth: int, then: Any = None) -> None:
        """Call some node with arguments that fill much of its memory, or more than all of it."""
        if caller in self.dead:
            return
        peer, size = self.chance.choice([s for s in range(NODES) if s != caller]), self.chance.choice([300, 800, 3000])
        told = min(depth, wire.DEPTH_LIMIT - 1) if self._tells_depth else 0
        self.depths[depth] += 1
        number = self.cores[caller].outgoing.call(
            peer, str(depth), wire.CallPayload(sizes=(size,)), 1e6, self.now, parts=(size,), depth=told
        )
        self._then[caller, peer, number] = then
        self.settle(caller)

    def settle(self, seat: int) -> None:
        while effects := self.cores[seat].effects():
            for effect in effects:
                self.perform(seat, effect)

    def perform(self, seat: int, effect: done.CallEffect) -> None:
        match effect:
            case done.SendMessage(peer, message):
                at = max(self._pipes.get((seat, peer), 0.0), self.now + self.chance.uniform(0.001, 0.05))
                self._pipes[seat, peer] = at
                self.after(at - self.now, lambda: self.arrive(seat, peer, message))
            case done.FetchParts(peer, number, sizes):
                self._sizes[seat, peer, number] = sum(sizes)
                self.later(seat, functools.partial(self.fetched, seat, peer, number, sizes))
            case done.RefuseParts():
                pass
            case done.Conclude(peer, number, outcome):
                assert (seat, peer, number) not in self.outcomes, "a call ended twice"
                self.outcomes[seat, peer, number] = outcome
                if (then := self._then.pop((seat, peer, number))) is not None:
                    self.later(seat, then)
            case done.RunHandler(peer, number, request):
                depth, end = int(request.name), functools.partial(self.end, seat, peer, number)
                if depth < wire.DEPTH_LIMIT - 1 and self.chance.random() < 0.7:
                    self.after(0.01, lambda: self.call(seat, depth + 1, end))
                else:
                    self.later(seat, end)
            case done.StopHandler():
                pass
            case _:
                raise AssertionError(effect)
        assert self.memory[seat].used >= 0

    def later(self, seat: int, report: Any) -> None:
        """Report something to a node's core, and settle it."""

        def act() -> None:
            if seat not in self.dead:
                report()
                self.settle(seat)

        self.after(self.chance.uniform(0.001, 0.2), act)

    def fetched(self, seat: int, peer: int, number: int, sizes: tuple[int, ...]) -> None:
        """Report arguments, which are dropped at once if the caller was lost meanwhile."""
        incoming = self.cores[seat].incoming
        self.cores[seat].fetched(peer, number, sizes, self.now, is_answer=False)
        if (peer, number) not in incoming._calls:
            self.memory[seat].used -= self._sizes.pop((seat, peer, number))
            incoming.memory_came()

    def end(self, seat: int, peer: int, number: int) -> None:
        """Return from a function, whose arguments are dropped with it."""
        self.cores[seat].incoming.finished(peer, number, wire.CallResult(number, wire.CallPayload()))
        self.memory[seat].used -= self._sizes.pop((seat, peer, number))
        self.settle(seat)
        self.later(seat, self.cores[seat].incoming.memory_came)

    def arrive(self, source: int, target: int, message: wire.CallMessage) -> None:
        if target not in self.dead and source not in self.dead:
            again = wire.decode_call_message(wire.encode_call_message(message))
            self.cores[target].received(source, again, self.now)
            self.settle(target)

    def hold(self, seat: int, held: int) -> None:
        """Let the program have so much."""
        self.memory[seat].held = held
        self.cores[seat].incoming.memory_came()
        self.settle(seat)

    def kill(self, seat: int) -> None:
        self.dead.add(seat)
        for other in set(range(NODES)) - self.dead:
            self.later(other, functools.partial(self.cores[other].lost, seat, self.now))

    def play(self) -> None:
        """Go on until nothing happens any more, but for deadlines."""
        while self._events:
            at, _, action = heapq.heappop(self._events)
            self.now = max(self.now, at)
            action()


def play(seed: int, *, tells_depth: bool = True) -> MemoryWorld:
    """Let all nodes call all others; AssertionError if something is left over."""
    world = MemoryWorld(seed, tells_depth=tells_depth)
    for _ in range(60):
        caller = world.chance.randrange(NODES)
        world.after(world.chance.uniform(0, 3), functools.partial(world.call, caller, 0))
    for seat in range(NODES):
        for _ in range(10):
            held = world.chance.choice([0, ROOM // 2, ROOM, 10 * ROOM])
            world.after(world.chance.uniform(0, 5), functools.partial(world.hold, seat, held))
    if seed % 3 == 0:
        world.after(world.chance.uniform(1, 4), functools.partial(world.kill, world.chance.randrange(NODES)))
    world.play()
    for seat in set(range(NODES)) - world.dead:
        core = world.cores[seat]
        assert (len(core.outgoing), len(core.incoming)) == (0, 0), f"calls wait for each other at {seat}"
        assert world.memory[seat].used == 0
        assert not any(core.incoming._with_memory)
    return world


@in_turn(seed=seeds(30))
def test_calls_that_wait_for_memory_never_wait_for_each_other_whatever_programs_hold(seed: int) -> None:
    world = play(seed)
    assert world.depths[3], "few functions called others"
    assert sum(memory.waits for memory in world.memory.values()) > 20, "there was room all the time"
    for outcome in world.outcomes.values():
        assert isinstance(outcome, wire.CallResult) or (outcome is CallEnding.LOST and world.dead)


def test_without_the_rule_that_deeper_calls_go_first_they_do() -> None:
    for seed in range(1, 4):
        with pytest.raises(AssertionError, match="wait for each other"):
            play(seed, tells_depth=False)


@pytest.mark.parametrize("depth", [0, 3])
def test_calls_of_one_depth_that_always_wait_hold_up_none_of_another(depth: int) -> None:
    memory = NodeMemory()
    memory.held = ROOM
    core = Calling(memory=memory)
    large = wire.CallPayload(sizes=(300,))

    def fetched() -> list[int]:
        return [effect.number for effect in core.effects() if isinstance(effect, done.FetchParts)]

    for number in range(1, 20):
        core.received(1, wire.CallRequest(number, "f", 10.0, large, depth=wire.DEPTH_LIMIT - 1), 0.0)
    assert fetched() == [1]
    core.received(2, wire.CallRequest(7, "f", 10.0, large, depth=depth), 0.0)
    assert fetched() == [7]
    core.received(2, wire.CallRequest(8, "f", 10.0, large, depth=depth), 0.0)
    assert fetched() == [], "one of each depth gets memory that there is not"
