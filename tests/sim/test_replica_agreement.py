"""Replicas of a sharded model that lose ranks at any moment of a step: shards of one version are of the same steps.

A `World` is a function of its seed. Sums of a line and exchanges of all ranks are all or nothing: the ranks that are
left get the same from the same contributors. Forward, backward and clipping happen within a replica, which may be torn.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

import covey.proto.replica_agreement as agreement
from covey.proto.replica_agreement import CommonSum, HeldShard, ReplicaLayout

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 2
STEPS = 30
WRONG = "made of zeros"


@dataclass
class Rank:
    """One rank: its shard is the list of the steps that it has taken."""

    number: int
    shard: int
    state: list[Any] = field(default_factory=list)
    is_torn: bool = False

    @property
    def version(self) -> int:
        return len(self.state)


class World:
    """The ranks of a run, which are lost one by one and replaced by newcomers now and then."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.clips = chance.random() < 0.7
        self.ranks = {number: Rank(number, number % SHARDS) for number in range(SHARDS * chance.randint(2, 4))}
        self.loss = chance.choice([0.01, 0.03])
        self.layout = ReplicaLayout((), 0, ())
        self.there: set[int] = set()
        """The ranks in the last exchange."""
        self.ends = Counter[str]()

    def pause(self) -> None:
        """Let ranks be lost between two things that ranks do."""
        if len(self.ranks) > 1 and self.chance.random() < self.loss:
            del self.ranks[self.chance.choice(sorted(self.ranks))]

    def form(self) -> bool:
        """Form replicas of the ranks that are left; return whether there is one with all shards."""
        trained = {rank for ranks in self.layout.replicas for rank in ranks} or set(self.ranks)
        had = {rank.shard for rank in self.ranks.values() if rank.number in trained}
        for rank in self.ranks.values():
            rank.is_torn = False
        places = {
            rank.number: HeldShard(rank.shard, SHARDS, "host", rank.number // SHARDS, rank.version)
            for rank in self.ranks.values()
        }
        layout = self.layout = agreement.form(places)
        versions = [{r.version for r in self.ranks.values() if r.shard == shard} for shard in range(SHARDS)]
        if common := set.intersection(*versions):
            assert layout.version == max(common), "not the newest version that all shards have"
        if layout.lost or not layout.replicas:
            is_late = not all(rank in self.ranks for ranks in self.stepped for rank in ranks)
            assert is_late or len(had) < SHARDS, f"no version is common: {places}"
            self.ends["lost"] += 1
            return False
        assert layout.version >= self.least, "a step that whole replicas took is lost"
        for rank in self.ranks.values():
            if rank.version != layout.version:
                self.ends["healed"] += 1
                donors = [r for r in self.ranks.values() if r.shard == rank.shard and r.version == layout.version]
                rank.state = list(donors[0].state)
        return True

    stepped: tuple[tuple[int, ...], ...] = ()
    """The replicas that took the last step with clipping while another one had lost a rank."""
    least = 0
    """The version that some replica with all of its ranks has."""

    def exchange(self, tell: Callable[[Rank], None]) -> set[int]:
        """Let each rank tell something; return who is in the exchange."""
        for number in sorted(self.ranks):
            self.pause()
            if number in self.ranks:
                tell(self.ranks[number])
        self.pause()
        there = set(self.ranks)
        if self.chance.random() < 0.5:
            self.pause()  # after the exchange, before anything is done about it
        return there

    def within_replicas(self) -> set[int]:
        """Let each rank compute with the others of its replica; return the ranks that got zeros."""
        wrong = set()
        for ranks in self.layout.replicas:
            for number in ranks:
                self.pause()
                if number in self.ranks and not all(mate in self.ranks for mate in ranks):
                    self.ranks[number].is_torn = True
                if number in self.ranks and self.ranks[number].is_torn:
                    wrong.add(number)
        return wrong

    def sum_line(self, shard: int, wanted: set[int]) -> set[int]:
        """Return the replicas in the sum of a line."""
        found = set()
        for replica, ranks in enumerate(self.layout.replicas):
            self.pause()
            rank = self.ranks.get(ranks[shard])
            if rank is not None and not rank.is_torn and replica in wanted:
                found.add(replica)
        return found

    def judge(self, by_line: list[list[bool]]) -> CommonSum:
        torn: set[int] = set()
        there = self.exchange(lambda rank: torn.add(rank.number) if rank.is_torn else None)
        self.there = there
        return agreement.judge(self.layout, by_line, torn, there)

    def step(self, number: int) -> bool:
        """Make one step; return whether all replicas are whole afterwards."""
        before = {rank.number: list(rank.state) for rank in self.ranks.values()}
        self.within_replicas()
        everything = set(range(len(self.layout.replicas)))
        counted = [self.sum_line(shard, everything) for shard in range(SHARDS)]
        while True:
            by_line = [[replica in line for replica in sorted(everything)] for line in counted]
            common = self.judge(by_line)
            if common.is_decided:
                break
            counted = [
                line if line == set(common.counted) else self.sum_line(shard, set(common.counted))
                for shard, line in enumerate(counted)
            ]
        assert all(line == set(common.counted) for line in counted), "lines step with other gradients"
        wrong: set[int] = set()
        whole, self.stepped = common.whole, ()
        steppers = {rank for rank in self.ranks if self.layout.replica_of(rank) is not None}
        if self.clips:
            wrong = self.within_replicas()
            common = self.judge([[True] * len(everything)] * SHARDS)
            whole = common.whole
            if len(whole) < len(everything):
                self.stepped = tuple(ranks for ranks in self.layout.replicas if self.there.issuperset(ranks))
            steppers = {rank for rank in self.ranks if may_step(self, rank, common)}
        for rank in self.ranks.values():
            if rank.number in steppers:
                rank.state = [*before[rank.number], (number, tuple(sorted(counted[rank.shard])), rank.number in wrong)]
        whole_now = [ranks for ranks in self.layout.replicas if all(rank in self.ranks for rank in ranks)]
        self.least = max((min(self.ranks[rank].version for rank in ranks) for ranks in whole_now), default=0)
        self.check()
        return len(whole) == len(everything) and self.there <= set(self.ranks)

    def check(self) -> None:
        by_version: dict[int, Any] = {}
        for rank in self.ranks.values():
            assert not any(is_wrong for *_, is_wrong in rank.state), "a rank steps with gradients that are " + WRONG
            assert by_version.setdefault(rank.version, rank.state) == rank.state, "shards are of different steps"

    def play(self) -> World:
        if not self.form():
            return self
        for number in range(STEPS):
            is_whole = self.step(number)
            if not is_whole and not self.form():
                return self
        self.ends["done"] += 1
        return self


def may_step(world: World, rank: int, common: CommonSum) -> bool:
    """As `Replicas.may_step`."""
    return world.layout.replica_of(rank) in common.whole


@in_turn(seed=seeds(300))
def test_replicas_step_as_a_whole_and_leave_a_version_that_all_shards_have(seed: int) -> None:
    World(seed).play()


def test_the_courses_heal_ranks_lose_shards_and_come_to_an_end() -> None:
    ends = sum((World(seed).play().ends for seed in range(200)), Counter[str]())
    assert min(ends[kind] for kind in ("healed", "lost", "done")) > 10, ends


def step_unless_torn(world: World, rank: int, common: CommonSum) -> bool:
    """Step if this rank itself has noticed nothing."""
    return not world.ranks[rank].is_torn


def always_step(world: World, rank: int, common: CommonSum) -> bool:
    return True


def take_any(layout: ReplicaLayout, by_line: Any, torn: Any, there: Any) -> CommonSum:
    """Take what each line has in its sum."""
    return REAL_JUDGE(layout, by_line, torn, there)._replace(is_decided=True)


def believe_the_silent(layout: ReplicaLayout, by_line: Any, torn: Any, there: Any) -> CommonSum:
    """Take a replica as whole if no rank of it says that it is torn."""
    everybody = {rank for ranks in layout.replicas for rank in ranks}
    return REAL_JUDGE(layout, by_line, torn, everybody)


def newest_of_any(places: Any, count: int) -> tuple[int, tuple[int, ...]]:
    """Take the newest version of any rank."""
    newest = max(place.version for place in places.values())
    there = {place.shard for place in places.values() if place.version == newest}
    return newest, tuple(sorted(set(range(count)) - there))


REAL_JUDGE = agreement.judge
MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "step unless they have noticed a loss themselves": ("here", "may_step", step_unless_torn),
    "step whatever happened while they clipped": ("here", "may_step", always_step),
    "step with what their line has": (agreement, "judge", take_any),
    "believe that silent ranks are there": (agreement, "judge", believe_the_silent),
    "want the newest version of any rank": (agreement, "_newest", newest_of_any),
}


def play_all(courses: range) -> None:
    for seed in courses:
        World(seed).play()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_ranks_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, function = MUTANTS[mutant]
    if owner == "here":
        monkeypatch.setitem(globals(), name, function)
    else:
        monkeypatch.setattr(owner, name, function)
    with pytest.raises(AssertionError):
        play_all(range(1000))
