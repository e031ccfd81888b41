"""Checkpoints of a simulated run: they begin after the same operation on all members, whatever happens to these."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from tests.support.seeds import batches

from covey.proto import checkpointing
from covey.proto.checkpointing import Begun, Checkpoint, CheckpointEnded, Checkpointing, Named, SendToMember
from covey.wire import checkpoint as wire

BATCH = 250
LEAD = 3
"""How many operations a member may be ahead of the slowest one."""


class Member:
    """A process: its core, and a program that issues operations, looks after each, and saves what it sees."""

    def __init__(self, seat: int) -> None:
        self.core = Checkpointing(seat, lambda: self.issued)
        self.issued, self.generation = 0, -1
        self.views: deque[tuple[int, tuple[int, ...]]] = deque()
        """Views that were agreed on and that it has not installed yet."""
        self.looks: dict[tuple[int, int], str] = {}
        """By generation and number of operations: the checkpoint that the program saw, or ""."""
        self.is_waiting = False
        self.saving = ""
        self.named: list[str] = []
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.begun: list[str] = []


class World:
    """Members with links that keep the order, views that arrive in turn, lost messages, and programs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.members: dict[int, Member] = {}
        self.links: dict[tuple[int, int], deque[tuple[int, bytes]]] = {}
        self.generation, self.view = 0, 0
        self.saved: dict[str, set[int]] = {}
        self.next_seat = self.random.randint(1, 5)
        for seat in range(self.next_seat):
            self.members[seat] = Member(seat)
        self.agree()

    def agree(self) -> None:
        epoch = (self.generation << checkpointing.GENERATION_SHIFT) + self.view
        for member in self.members.values():
            member.views.append((epoch, tuple(sorted(self.members))))

    def lose(self, seat: int) -> None:
        """Exclude a member: from now on no other hears it."""
        del self.members[seat]
        for pair in [pair for pair in self.links if seat in pair]:
            del self.links[pair]
        self.view += 1
        self.agree()

    def next_generation(self) -> None:
        """Begin a generation with a newcomer, if no program is in the middle of something."""
        if any(member.is_waiting or member.saving for member in self.members.values()):
            return
        self.generation, self.view = self.generation + 1, 0
        self.members[self.next_seat] = Member(self.next_seat)
        self.next_seat += 1
        self.agree()

    def install(self, seat: int) -> None:
        """Install the next view; in a new generation, the program begins to count anew."""
        member = self.members[seat]
        epoch, members = member.views.popleft()
        member.core.configure(epoch, members, self.now)
        generation = epoch >> checkpointing.GENERATION_SHIFT
        if generation != member.generation:
            member.issued, member.generation = 0, generation
        self.perform(seat)

    def perform(self, seat: int) -> None:
        member = self.members[seat]
        for effect in member.core.effects():
            match effect:
                case SendToMember(peer, message):
                    if peer in self.members:
                        body = wire.encode_checkpoint(message)
                        self.links.setdefault((seat, peer), deque()).append((member.core._epoch, body))
                case Begun(checkpoint):
                    member.begun.append(checkpoint.id)
                case CheckpointEnded(order, failed):
                    member.ended.append(order.id)
                    assert not failed or order.id.endswith("7")
                case Named(name):
                    member.named.append(name)
                case _:
                    pass
        if member.is_waiting:
            self.look(seat)

    def deliver(self, pair: tuple[int, int]) -> None:
        epoch, body = self.links[pair].popleft()
        if not self.links[pair]:
            del self.links[pair]
        self.members[pair[1]].core.heard(pair[0], epoch, wire.decode_checkpoint(body), self.now)
        self.perform(pair[1])

    def look(self, seat: int) -> None:
        member = self.members[seat]
        state = member.core.state_at(member.issued)
        member.is_waiting = state is False
        if state is False:
            return
        assert member.issued < member.core.limit or isinstance(state, Checkpoint) or state is None
        if isinstance(state, Checkpoint):
            assert state.since <= member.issued
            member.saving = state.id
        seen = state.id if isinstance(state, Checkpoint) else ""
        member.looks[member.generation, member.issued] = seen
        for other, each in self.members.items():  # those that were lost may have been ahead
            known = each.looks.get((member.generation, member.issued), seen)
            assert known == seen, f"after {member.issued} operations {seat} saw {seen!r}, and {other} {known!r}"

    def issue(self, seat: int) -> None:
        """Let the program go on: save what it has seen, or issue an operation and look."""
        member = self.members[seat]
        is_ending = any(epoch >> checkpointing.GENERATION_SHIFT != member.generation for epoch, _ in member.views)
        if member.is_waiting or is_ending:
            return
        if member.saving:
            name, member.saving = member.saving, ""
            assert seat not in self.saved.setdefault(f"{member.generation} {name}", set())
            self.saved[f"{member.generation} {name}"].add(seat)
            assert member.core.end("disk full" if name.endswith("7") and seat % 2 else "", self.now)
            self.perform(seat)
            return
        others = [each.issued for each in self.members.values() if each.generation == member.generation]
        if member.issued - min(others) < LEAD:
            member.issued += 1
            self.look(seat)

    def request(self, seat: int, name: str) -> None:
        member = self.members[seat]
        known = member.core.request(wire.CheckpointOrder(name, f"/checkpoints/{name}"), self.now)
        member.asked.append(name)
        if known is not None:
            member.named.append(known)
        self.perform(seat)

    def tick(self) -> None:
        self.now += checkpointing.LOST_MESSAGE_SECONDS
        for seat, member in self.members.items():
            if member.core.next_deadline() <= self.now:
                member.core.tick(self.now)
                self.perform(seat)

    def step(self) -> None:
        """Do one thing that can happen by itself."""
        choices: list[tuple[str, object]] = [("deliver", pair) for pair in self.links]
        choices += [("install", seat) for seat, member in self.members.items() if member.views]
        choices += [("issue", seat) for seat in self.members]
        kind, what = self.random.choice(choices)
        getattr(self, kind)(what)

    def settle(self) -> None:
        """Go on until no member waits for another."""
        for _ in range(100):
            for _ in range(100):
                self.step()
            self.tick()
            cores = [member.core for member in self.members.values()]
            if not self.links and not any(core.has_begun or core.next_deadline() < math.inf for core in cores):
                return
        raise AssertionError("the members never agree")


def simulate(seeds: range) -> int:
    """Run the simulations; return how many checkpoints began, counted at each member that was there to the end."""
    began = 0
    for seed in seeds:
        world = World(seed)
        dice = random.Random(seed + 10_000)
        for number in range(dice.randint(10, 150)):
            roll = dice.random()
            seat = dice.choice(sorted(world.members))
            if roll < 0.06:
                world.request(seat, f"c{number}")
            elif roll < 0.09 and len(world.members) > 1:
                world.lose(seat)
            elif roll < 0.11:
                world.next_generation()
            elif roll < 0.14 and world.links:
                world.links.pop(dice.choice(sorted(world.links)))
            elif roll < 0.18:
                world.tick()
            else:
                for _ in range(5):
                    world.step()
        world.settle()
        for seat, member in world.members.items():
            assert not member.core.has_begun
            assert len(member.named) >= (1 if member.asked else 0), f"seed {seed}: a request has no name"
            for name in member.named:
                assert member.core.state_of(name) == "over" or len(member.core._ids) == wire.IDS_LIMIT, (
                    f"seed {seed}: {name}"
                )
            assert sorted(set(member.ended)) == sorted(member.ended), f"seed {seed}: {seat} ended one twice"
            began += len(member.begun)
    return began


@pytest.mark.parametrize("batch", batches(8))
def test_checkpoints_begin_after_the_same_operation_on_all_members(batch: int) -> None:
    assert simulate(range(BATCH * batch, BATCH * batch + BATCH)) > BATCH


class HastyMember(Checkpointing):
    """Accepts numbers that it has passed."""

    def _proposed(self, message: wire.ProposeStart) -> None:
        issued, self._issued = self._issued, lambda: 0
        super()._proposed(message)
        self._issued = issued


class ForgetfulMember(Checkpointing):
    """Drops what it has accepted when the view changes, as if every change aborted a checkpoint."""

    def configure(self, epoch: int, members: tuple[int, ...], now: float) -> None:
        if self._held is not None and not self._held.has_begun:
            self._hold(wire.Held(self._held.id, self._held.path, checkpointing.NO_SEQUENCE, False))
        super().configure(epoch, members, now)


@pytest.mark.parametrize("mutant", [HastyMember, ForgetfulMember])
def test_the_simulation_catches_members_that_break_the_rules(
    mutant: type[Checkpointing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Checkpointing", mutant)
    with pytest.raises(Exception, match=r"saw|not accepted|never agree"):
        simulate(range(500))
