"""Whole formations in a world with a virtual clock: whatever the network does, a run has one first view.

A failing seed prints its story; `Play(seed, hard=...).story()` tells it again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.hash_seeds import printed_with_another_hash_seed
from tests.support.seeds import batches

from covey.lab.world import SimulatedWorld
from covey.proto.decision import Decision
from covey.proto.formation import Formation, Formed
from covey.proto.formation.joiners import rank_order
from covey.wire.formation import (
    FoundingMember,
    Here,
    Outcome,
    Propose,
    Standing,
    Terms,
    decode_formation,
    encode_formation,
)

if TYPE_CHECKING:
    from collections.abc import Callable

AGREED_WITHIN = 30.0
"""Virtual seconds from when the network is good to when all nodes have a view, in the worst case."""


class BrokenError(AssertionError):
    """An invariant does not hold."""


class RecordedFormation(Formation):
    """A real formation; its play is told when it has proposed something."""

    on_proposal: Callable[[], None]
    travels = False
    """Messages are encoded and decoded on their way."""

    def outgoing(self) -> list[tuple[bytes, Any]]:
        messages = super().outgoing()
        if self.travels:
            messages = [(to, decode_formation(encode_formation(message))) for to, message in messages]
        if any(type(message) is Propose for _, message in messages):
            self.on_proposal()
        return messages


class Play:
    """One formation: its nodes, the faults, and what the nodes returned."""

    def __init__(self, seed: int, *, hard: bool, tell: bool = False) -> None:
        """Plan everything from the seed."""
        self.seed, self.hard = seed, hard
        self.chance = chance = random.Random(seed)
        self.world = SimulatedWorld(
            seed,
            delay=chance.choice([0.002, 0.02, 0.1, 0.3]),
            loss=chance.choice([0.0, 0.05, 0.2, 0.4 if hard else 0.1]),
            duplicate=0.1 * hard * chance.randrange(2),
            reorder=0.1 * hard * chance.randrange(2),
            notice=chance.choice([0.3, 1.0, 3.0]),
            describe=self.describe if tell else None,
        )
        size = chance.randint(2, 9)
        low = chance.choice([1, (size + 1) // 2, chance.randint(1, size - 1)])
        high = chance.choice([None, None, chance.randint(low, size)])
        # Safety may not depend on patience; without it, all nodes interfere with each other.
        self.patience = (
            chance.choice([2.0, *(max(0.05, k * self.world.delay) for k in (0.3, 1.0, 3.0))]) if hard else 2.0
        )
        self.settle = chance.choice([0.2, 1.0]) if hard else 1.0
        self.terms = Terms("a run", "train.py", None if hard else size, low if hard else 2, high, "1", "auto")
        self.ids = [chance.randbytes(32) for _ in range(size)]
        self.hosts = [chance.choice(["north", "south", "west"]) for _ in self.ids]
        self.names: dict[bytes, str] = {}
        self.lives: list[tuple[bytes, RecordedFormation]] = []
        self.returned: list[tuple[FoundingMember, Formed]] = []
        self.dead: set[bytes] = set()
        self.proposals = 0
        spread = chance.choice([0.5, 5.0])
        for index in range(size):
            self.world.at(chance.uniform(0, spread), self.begin, index)
        self.faults_end_at = 5.0
        for _ in range(chance.randint(0, 4)):
            self.plan_fault(chance.uniform(0, 7), ["crash", "partition", "cut", "flap"] if hard else ["flap"])

    def begin(self, index: int) -> None:
        id, life = self.ids[index], self.chance.randbytes(16)
        if id in self.world.nodes:
            return
        self.names[life] = name = "abcdefghi"[index] + "'" * sum(known == id for known, _ in self.lives)
        me = FoundingMember(id, life, name, self.hosts[index], b"")
        seeded = random.Random(self.chance.random())
        core = RecordedFormation(me, self.terms, seeded, self.world.now, settle=self.settle, patience=self.patience)
        core.on_proposal = self.on_proposal
        self.lives.append((life, core))
        self.world.start(name, id, life, core)

    # Faults

    def plan_fault(self, at: float, kinds: list[str]) -> None:
        world, chance = self.world, self.chance
        one, other = chance.sample(self.ids, 2)
        lasts = chance.uniform(0.1, 3)
        kind = chance.choice(kinds)
        if kind == "crash":
            world.at(at, self.crash, one, chance.random() < 0.3)
            if chance.random() < 0.5:
                world.at(at + lasts, self.begin, self.ids.index(one))
        elif kind == "flap":
            for _ in range(chance.randint(1, 4)):
                world.at(at + chance.uniform(0, lasts), world.flap, one, other)
        else:
            side = set(chance.sample(self.ids, chance.randint(1, len(self.ids) - 1)))
            separate = (world.partition, side, set(self.ids) - side) if kind == "partition" else (world.cut, one, other)
            world.at(at, *separate)
            world.at(at + lasts, world.heal)
        self.faults_end_at = max(self.faults_end_at, at + lasts)

    def on_proposal(self) -> None:
        """The interesting moments come just after a proposal: let many plays go wrong there."""
        if self.hard and self.proposals < 4 and self.chance.random() < 0.5:
            at = self.world.now + self.chance.uniform(0, 3 * self.world.delay)
            self.plan_fault(at, ["crash", "crash", "partition", "partition", "partition"])
        self.proposals += 1

    def crash(self, id: bytes, silently: bool) -> None:
        if id in self.world.nodes:
            self.dead.add(self.world.nodes[id].life)
            self.world.crash(id, silently=silently)

    # Invariants

    def perform(self) -> None:
        """Run to the end; BrokenError as soon as an invariant does not hold."""
        world = self.world
        while world.now < self.faults_end_at:  # a proposal may bring more faults
            world.run(self.faults_end_at, self.check)
        world.heal()
        if self.hard:
            world.loss = world.duplicate = world.reorder = 0.0
            world.delay = min(world.delay, self.patience / 10)
        good_at = world.now
        while (unserved := self.unserved()) and world.now < good_at + AGREED_WITHIN:
            world.run(world.now + 0.5, self.check)
        self.check_outcomes()
        if unserved:
            raise BrokenError(f"{[f'{name}: {why}' for name, why in unserved]} after {AGREED_WITHIN:g} good seconds")

    def check(self) -> bool:
        """Look at views that were returned since the last look."""
        for life, core in self.lives:
            if core.formed is not None and life not in self.dead and core.formed is not self.seen(life):
                self.check_view(life, core)
        return False

    def seen(self, life: bytes) -> Formed | None:
        return next((formed for member, formed in self.returned if member.life == life), None)

    def check_view(self, life: bytes, core: RecordedFormation) -> None:
        formed = core.formed
        assert formed is not None
        names = [member.name for member in formed.view]
        self.world.tell(f"{self.names[life]} RETURNS {names}, lost {[id.hex()[:4] for id in formed.lost]}")
        if life not in {member.life for member in formed.view}:
            raise BrokenError(f"{self.names[life]} returned {names} without being in it")
        if formed.view != rank_order(formed.view):
            raise BrokenError(f"{self.names[life]} returned {names}, which is not in rank order")
        if not self.terms.smallest <= len(names) <= self.terms.largest:
            raise BrokenError(f"{self.names[life]} returned {names}; the terms are {self.terms}")
        me = next(member for member in formed.view if member.life == life)
        for member, other in self.returned:
            is_alive = member.life not in self.dead
            if is_alive and other.view != formed.view and (me in other.view or member in formed.view):
                raise BrokenError(f"{me.name} returned {names}, {member.name} {[one.name for one in other.view]}")
        self.returned.append((me, formed))

    def check_outcomes(self) -> None:
        """A proposal has one outcome among the living."""
        outcomes: dict[bytes, dict[Outcome, str]] = {}
        for life, core in self.lives:
            for proposal, decision in core._deciding.decisions.items():
                if life not in self.dead and decision.outcome is not Outcome.OPEN:
                    outcomes.setdefault(proposal, {})[decision.outcome] = self.names[life]
        for proposal, found in outcomes.items():
            if len(found) > 1:
                raise BrokenError(f"proposal {proposal.hex()[:4]} has two outcomes: {found}")

    def unserved(self) -> list[tuple[str, str]]:
        """Return the living that should have a view and have none."""
        living = {node.life for node in self.world.nodes.values()}
        cores = [core for life, core in self.lives if life in living]
        waiting = [core for core in cores if core.formed is None]
        if not waiting:
            return []
        stuck = [
            core
            for core in waiting
            if core._deciding.lock is not None and not self.is_in_doubt(core._deciding.lock, living)
        ]
        # A joiner that knows of a run which lost its members waits for them: tests/sim/test_lineages.py has disks.
        free = [core for core in waiting if core._deciding.lock is None and not core.lineages.current]
        if len(free) >= self.terms.smallest:
            stuck += free
        return [(core._me.name, core.report().waiting) for core in stuck]

    def is_in_doubt(self, lock: Decision, living: set[bytes]) -> bool:
        """Tell whether a proposal must stay undecided: a quorum of it is dead, and not all of the dead are back."""
        alive = {rank for rank, member in enumerate(lock.members) if member.life in living}
        is_quorum = 2 * len(alive) > len(lock.members) or (2 * len(alive) == len(lock.members) and 0 in alive)
        return not is_quorum and any(member.id not in self.world.nodes for member in lock.members)

    # Transcripts

    def describe(self, message: Any) -> str:
        name = self.names.__getitem__
        match message:
            case Here():
                hears = ",".join(sorted(name(life) for life in message.hears))
                return f"{message.phase.name.lower()}, hears {hears or 'no node'}"
            case Propose():
                return f"propose {message.proposal.hex()[:4]}: {','.join(one.name for one in message.members)}"
            case Standing():
                rows = " ".join(
                    "-" if row.answer == 0 else "no" if row.answer == 2 else f"ok/{row.promised}"
                    + ("" if row.voted < 0 else f":{'commit' if row.commit else 'abort'}@{row.voted}")
                    for row in message.rows
                )  # fmt: skip
                ended = f", ended {message.ended}" if message.ended else ""
                return f"standing {message.proposal.hex()[:4]}: {rows} = {message.outcome.name.lower()}{ended}"
        raise AssertionError(message)

    def story(self) -> str:
        """Perform the same play again, and return its messages, with their times, and how it ended."""
        again = Play(self.seed, hard=self.hard, tell=True)
        try:
            again.perform()
            end = "all well"
        except BrokenError as broken:
            end = f"BROKEN: {broken}"
        return "\n".join([f"seed {self.seed}, {again.terms}", *again.world.story, end])


def perform(seed: int, *, hard: bool) -> Play:
    play = Play(seed, hard=hard)
    try:
        play.perform()
    except BrokenError as broken:
        pytest.fail(f"Play({seed}, hard={hard}): {broken}\n{play.story()[-20_000:]}")
    return play


@pytest.mark.parametrize("batch", batches(3))
def test_a_hundred_formations_of_a_known_size_all_agree(batch: int) -> None:
    for seed in range(100 * batch, 100 * batch + 100):
        play = perform(seed, hard=False)
        assert len(play.returned) == play.terms.size
        assert len({formed.view for _, formed in play.returned}) == 1
        assert {member.id for member, _ in play.returned} == set(play.ids)


@pytest.mark.parametrize("batch", batches(4))
def test_fifty_formations_among_crashes_restarts_and_cuts_keep_the_invariants(batch: int) -> None:
    plays = [perform(seed, hard=True) for seed in range(50 * batch, 50 * batch + 50)]
    assert sum(len(play.returned) for play in plays) > 100, "so little was agreed that nothing was shown"
    assert any(play.dead for play in plays)


def test_formations_agree_when_messages_travel_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedFormation, "travels", True)
    for seed in range(20):
        perform(seed, hard=seed % 2 == 1)


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "accepts another proposal while locked": (Formation, "_refusal", lambda self, proposal, members: ""),
    "votes in ballot 0 after it promised a later one": (Decision, "_may_confirm", lambda self: self._all_accepted()),
    "gives up a proposal without a quorum": (Decision, "_is_quorum", lambda self, ranks: bool(ranks)),
    "takes any half for a quorum": (Decision, "_is_quorum", lambda self, ranks: 2 * len(ranks) >= len(self.rows)),
    "votes before all have accepted": (Decision, "_may_confirm", lambda self: self.rows[self.rank].promised == 0),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_a_joiner_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, rule = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, rule)
    for seed in range(500):
        try:
            Play(seed, hard=True).perform()
        except BrokenError:
            return
    pytest.fail(f"500 plays with a joiner that {mutant}, and nothing was noticed")


def test_a_play_is_the_same_whatever_the_hash_seed_is() -> None:
    story = Play(11, hard=True).story()
    code = "from tests.sim.test_formation import Play; print(Play(11, hard=True).story())"
    there = printed_with_another_hash_seed("-c", code)
    assert there == story + "\n"
    assert "RETURNS" in story
    assert story.endswith("all well")
