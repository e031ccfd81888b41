"""Ranks that hear of a loss, simulated: bytes that prove a mismatch to any of them make it known to all.

Ranks enter operations, each of which sends a header to some others, and one of them calls something else. A rank is
killed, sometimes a second one. The others hear of it when they do, by themselves or from each other; they look at their
lanes at once between two operations, and when their thread comes to it in one. Links keep the order and are slow.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.seeds import batches, seeds

from covey.proto.call_inquiries import TESTIMONY_PATIENCE, Hearing

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 400
NEWS = 0.1
"""Seconds after which all ranks know of a loss."""
LINK = 0.05
"""Seconds that a message takes at most."""
COMPARE = 0.6
"""Seconds that a comparison takes at most, after which all ranks are told of a mismatch."""


class RankOf:
    """One rank: what it calls, what its lanes hold, and what it comes to know."""

    def __init__(self, rank: int, calls: list[int], core: Hearing) -> None:
        self.rank, self.calls, self.core = rank, calls, core
        self.entered = 0
        self.is_inside = self.is_dead = self.knows = self.has_looked = self.was_patient = False
        self.lanes: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        """By sender: number, call and time of the headers that were not read."""
        self.verdict = ""
        self.ended_at = 0.0

    @property
    def log(self) -> dict[int, int]:
        return {number: call for number, call in enumerate(self.calls[: self.entered], 1)}

    def shown(self, until: float) -> list[tuple[int, int]]:
        """Return the first header of each lane that was not read, if it had arrived by then."""
        return [lane[0][:2] for lane in self.lanes.values() if lane and lane[0][2] <= until]


class Play:
    """One course of events, which a seed decides."""

    def __init__(self, seed: int, core: Callable[..., Hearing] = Hearing) -> None:
        self.random = draw = random.Random(seed)
        self.now, self._events, self._order = 0.0, list[Any](), itertools.count()
        self._arrives: dict[tuple[int, int], float] = defaultdict(float)
        size = draw.randint(2, 5)
        common = [draw.randint(1, 3) for _ in range(draw.randint(1, 6))]
        others = [[other for other in range(size) if other != rank] for rank in range(size)]
        self.ranks = [RankOf(rank, list(common), core(others[rank])) for rank in range(size)]
        self.is_equal = draw.random() < 0.4
        if not self.is_equal:
            odd, at = draw.choice(self.ranks), draw.randrange(len(common))
            odd.calls[at] = 4
        self.slowest = draw.choice((0.0, 0.3, 0.3, 2 * TESTIMONY_PATIENCE))
        """How long the thread of an operation may take until it looks."""
        self.held_up = draw.choice(self.ranks) if draw.random() < 0.1 else None
        """A rank that is alive and looks at nothing."""
        for each in self.ranks:
            self.after(draw.random(), self.enter, each)
        self.killed_at = draw.random()
        victims = draw.sample(self.ranks, 2 if size > 2 and draw.random() < 0.2 else 1)
        self.after(self.killed_at, self.die, victims[0])
        for victim in victims[1:]:
            self.after(self.killed_at + draw.random() * 0.3, self.die, victim)
        self.has_one_loss = len(victims) == 1

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action, args))

    def tell_all(self, source: RankOf, action: Callable[..., None], *args: Any) -> None:
        """Let a message arrive at all others, after all that came before it on the same link."""
        for target in self.ranks:
            key = source.rank, target.rank
            at = max(self.now + self.random.random() * LINK, self._arrives[key] + 1e-9)
            self._arrives[key] = at
            if target is not source:
                self.after(at - self.now, action, target, source.rank, *args)

    def perform(self) -> None:
        while self._events:
            self.now, _, action, args = heapq.heappop(self._events)
            if not args[0].is_dead:
                action(*args)
        self.check()

    # Operations

    def enter(self, rank: RankOf) -> None:
        """Enter the next call: send headers to some, read what arrived from some, and wait or return."""
        if rank.has_looked or rank.knows or rank.verdict or rank.entered == len(rank.calls):
            return
        rank.entered += 1
        header = (rank.entered, rank.calls[rank.entered - 1])
        for target in self.ranks:
            if target is not rank and self.random.random() < 0.5:
                self.after(self.random.random() * 0.02, self.arrive, target, rank.rank, *header)
        for lane in rank.lanes.values():
            if lane and lane[0][:2] == header and self.random.random() < 0.5:
                lane.pop(0)
        rank.is_inside = self.random.random() < 0.3  # it waits for another rank, until it hears of the loss
        if not rank.is_inside:
            self.after(self.random.random() * 0.2, self.enter, rank)

    def arrive(self, rank: RankOf, source: int, number: int, call: int) -> None:
        lane = rank.lanes[source]
        lane.append((number, call, self.now))
        lane.sort()

    def die(self, rank: RankOf) -> None:
        rank.is_dead = True
        for other in self.ranks:
            self.after(self.random.random() * NEWS, self.hear_of_loss, other, rank.rank)

    # The hearing

    def hear_of_loss(self, rank: RankOf, lost: int) -> None:
        rank.core.gone(lost)
        self.suspect(rank)
        self.decide(rank)

    def suspect(self, rank: RankOf) -> None:
        if not rank.knows:
            rank.knows = True
            self.after(self.random.random() * self.slowest if rank.is_inside else 0.0, self.look, rank)

    def look(self, rank: RankOf) -> None:
        if rank.verdict or rank is self.held_up:
            return
        rank.has_looked = True
        rank.core.looked(rank.log, rank.shown(self.now), self.now)
        if not rank.core.differs_at:
            self.tell_all(rank, self.hear_testimony, rank.log, rank.shown(self.now))
            self.after(TESTIMONY_PATIENCE, self.tick, rank)
        self.decide(rank)

    def hear_testimony(self, rank: RankOf, source: int, calls: dict[int, int], found: list[tuple[int, int]]) -> None:
        if rank.verdict:
            return
        rank.core.heard(source, calls, found)
        self.suspect(rank)
        self.decide(rank)

    def tick(self, rank: RankOf) -> None:
        if not rank.verdict:
            rank.was_patient = True
            rank.core.tick(self.now)
            self.decide(rank)

    def decide(self, rank: RankOf) -> None:
        if rank.verdict or not rank.core.is_over:
            return
        if rank.core.differs_at:
            self.after(self.random.random() * COMPARE, self.tell_mismatch, rank)
        self.end(rank, "mismatch" if rank.core.differs_at else "loss")

    def tell_mismatch(self, rank: RankOf) -> None:
        self.tell_all(rank, self.hear_mismatch)

    def hear_mismatch(self, rank: RankOf, _: int) -> None:
        if not rank.verdict:
            self.end(rank, "mismatch")

    def end(self, rank: RankOf, verdict: str) -> None:
        rank.verdict, rank.ended_at = verdict, self.now

    # What must hold

    @property
    def survivors(self) -> list[RankOf]:
        return [rank for rank in self.ranks if not rank.is_dead and rank is not self.held_up]

    @property
    def is_proven(self) -> bool:
        """Whether what the survivors called, and what had arrived at them before the kill, differs."""
        calls = defaultdict(set)
        for rank in self.survivors:
            for number, call in (*rank.log.items(), *rank.shown(self.killed_at)):
                calls[number].add(call)
        return any(len(each) > 1 for each in calls.values())

    def check(self) -> None:
        survivors = self.survivors
        if not survivors:
            return
        assert all(rank.verdict for rank in survivors), "a rank hangs"
        verdicts = {rank.verdict for rank in survivors}
        is_kept = not any(rank.was_patient for rank in survivors)
        if self.is_equal:
            assert verdicts <= {"loss"}, "equal calls are accused"
        if self.is_proven and is_kept:
            assert verdicts == {"mismatch"}, "bytes that prove a mismatch are not heard of"
        if self.has_one_loss and is_kept:
            assert len(verdicts) == 1, "ranks come to different verdicts"
        if not self.slowest and self.held_up is None and self.has_one_loss and verdicts == {"loss"}:
            latest = max(rank.ended_at for rank in survivors) - self.killed_at
            assert latest <= NEWS + 2 * LINK + 1e-3, "a rank waits though all have testified"
        latest = max(rank.ended_at for rank in survivors) - self.killed_at
        assert latest <= 0.3 + NEWS + self.slowest + 2 * LINK + TESTIMONY_PATIENCE + COMPARE, (
            "a rank waits for too long"
        )


@pytest.mark.parametrize("batch", batches(20))
def test_bytes_that_prove_a_mismatch_to_any_rank_make_it_known_to_all(batch: int) -> None:
    proven = given_up = lost = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        play = Play(seed)
        try:
            play.perform()
        except AssertionError as error:
            error.add_note(f"seed={seed}")
            raise
        proven += play.is_proven
        lost += any(rank.verdict == "loss" for rank in play.survivors)
        given_up += any(rank.was_patient for rank in play.survivors)
    assert proven > BATCH / 20, "the simulation has mismatches to prove"
    assert lost > BATCH / 10, "and losses without one"
    assert given_up, "and ranks that do not look in time"


class DecidesAlone(Hearing):
    """Waits for no testimony."""

    def looked(self, calls: Any, found: Any, now: float) -> None:
        super().looked(calls, found, now)
        self._waiting.clear()


class IgnoresWhatOthersFound(Hearing):
    """Compares calls, and takes no notice of what lanes of other ranks have shown."""

    def heard(self, rank: int, calls: Any, found: Any) -> None:
        super().heard(rank, calls, ())


class IgnoresWhatOthersCalled(Hearing):
    """Compares what was found with its own calls only."""

    def heard(self, rank: int, calls: Any, found: Any) -> None:
        super().heard(rank, {}, found)


class DoesNotLook(Hearing):
    """Takes no notice of what its own lanes show."""

    def looked(self, calls: Any, found: Any, now: float) -> None:
        super().looked(calls, (), now)


class BlamesAnyDifference(Hearing):
    """Takes calls of different numbers for one."""

    def heard(self, rank: int, calls: Any, found: Any) -> None:
        super().heard(rank, {0: sum(calls.values())}, found)


class WaitsForTheDead(Hearing):
    """Waits for ranks that are gone."""

    def gone(self, rank: int) -> None:
        pass


class WaitsForEver(Hearing):
    """Does not give up."""

    def tick(self, now: float) -> None:
        pass


@pytest.mark.parametrize(
    "mutant",
    [
        DecidesAlone,
        IgnoresWhatOthersFound,
        IgnoresWhatOthersCalled,
        DoesNotLook,
        BlamesAnyDifference,
        WaitsForTheDead,
        WaitsForEver,
    ],
)
def test_these_plays_notice_a_core_that(mutant: type[Hearing]) -> None:
    for seed in seeds(3000):
        try:
            Play(seed, mutant).perform()
        except AssertionError:
            return
    pytest.fail(f"no play notices a core that is wrong: {mutant.__doc__}")
