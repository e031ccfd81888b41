"""Ranks that close a group, simulated: calls that differ are noticed by those in doubt, and no equal calls are accused.

A rank calls operations: a `send` returns at once, as a broadcast does for its root; a `sum` returns once all others
have entered it. Then the rank closes the group, as `collectives.closure` does with the real core. Links keep the order
and are slow; ranks pause before calls, are stopped for long, or die.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.seeds import batches, seeds

from covey.proto import call_inquiries
from covey.proto.call_inquiries import Parting

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 400
PROMPT = call_inquiries.ASK_PAUSES.most + 0.3
"""Seconds in which a rank knows that the others have called its last operation: a pause, a question and an answer."""
SENDS, SUM = (2, 3, 4), 1
"""Fingerprints of operations: of three in which a rank only sends, and of one in which it hears from all."""


class RankOf:
    """One rank: what it calls, how far it is, what it has heard, and what it knows in the end."""

    def __init__(self, rank: int, calls: list[int]) -> None:
        self.rank, self.calls = rank, calls
        self.entered = 0
        self.is_dead = self.has_failed = self.is_over = self.was_patient = False
        self.core: Parting | None = None
        self.heard: dict[int, tuple[int, dict[int, int]]] = defaultdict(lambda: (0, {}))
        self.parted: dict[int, bool] = {}
        """By rank that has closed the group: whether its program had not failed."""
        self.differs_at = 0
        self.entered_at = [0.0]
        """By number of its calls, when it made them; first when it began."""
        self.closed_at = self.ended_at = 0.0

    @property
    def log(self) -> dict[int, int]:
        return {number: call for number, call in enumerate(self.calls[: self.entered], 1)}

    @property
    def is_in_doubt(self) -> bool:
        return any(call in SENDS for call in self.calls)


class Play:
    """One course of events, which a seed decides."""

    def __init__(self, seed: int, core: Callable[..., Parting] = Parting) -> None:
        self.random, self._core = random.Random(seed), core
        draw = self.random
        self.now, self._events, self._order = 0.0, list[Any](), itertools.count()
        self._arrives: dict[tuple[int, int], float] = defaultdict(float)
        size = draw.randint(2, 5)
        common = [draw.choice((SUM, SUM, *SENDS)) for _ in range(draw.randint(0, 6))]
        self.ranks = [RankOf(rank, list(common)) for rank in range(size)]
        self.is_equal = draw.random() < 0.4
        if not self.is_equal:
            self._confuse(draw.choice(self.ranks))
        self.slowness = draw.choice((0.001, 0.01, 0.1, 1.0))
        self.loses = draw.random() < 0.2
        self.lingers = draw.choice((0.0, 5.0))
        """How long a rank may do something else before it closes the group."""
        for rank in self.ranks:
            self.after(self.pause(), self.step, rank)
        if self.loses:
            self.after(draw.random(), self.die, draw.choice(self.ranks))

    def _confuse(self, rank: RankOf) -> None:
        """Let one rank call something else: one call differs, is missing, or is one too many. Sums stay in step."""
        kind, at = self.random.choice(("other", "missing", "more")), len(rank.calls)
        if kind == "other" and rank.calls and rank.calls[-1] in SENDS:
            rank.calls[-1] = self.random.choice([call for call in SENDS if call != rank.calls[-1]])
        elif kind == "missing" and rank.calls and rank.calls[-1] in SENDS:
            rank.calls.pop()
        else:
            rank.calls.insert(at, self.random.choice(SENDS))

    def pause(self) -> float:
        return self.random.expovariate(1 / self.slowness)

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action, args))

    def send(self, source: RankOf, target: int, action: Callable[..., None], *args: Any) -> None:
        """Let a message arrive, after all that came before it on the same link."""
        key = source.rank, target
        at = max(self.now + self.random.expovariate(1 / 0.005), self._arrives[key] + 1e-9)
        self._arrives[key] = at
        self.after(at - self.now, action, self.ranks[target], source.rank, *args)

    def perform(self) -> None:
        for _ in range(20_000):
            if not self._events:
                break
            self.now, _, action, args = heapq.heappop(self._events)
            if not args[0].is_dead:
                action(*args)
        self.check()

    # What ranks do

    def die(self, rank: RankOf) -> None:
        rank.is_dead = True
        for other in self.ranks:
            if other is not rank:
                self.after(0.1, self.hear_of_loss, other, rank.rank)

    def hear_of_loss(self, rank: RankOf, lost: int) -> None:
        if rank.core is not None and lost not in rank.parted:
            rank.core.gone(lost)
            self.look(rank)
        elif rank.core is None:  # its program fails with PeerLostError
            rank.calls, rank.has_failed = rank.calls[: rank.entered], True
            self.close(rank)

    def step(self, rank: RankOf) -> None:
        """Enter the next call, or close the group."""
        if rank.is_over or rank.core is not None:
            return
        if rank.entered and rank.calls[rank.entered - 1] == SUM and not self._is_summed(rank):
            self.after(self.slowness / 5, self.step, rank)
        elif rank.entered < len(rank.calls):
            rank.entered += 1
            rank.entered_at.append(self.now)
            is_last = rank.entered == len(rank.calls)
            self.after(self.pause() + is_last * self.random.random() * self.lingers, self.step, rank)
        else:
            self.close(rank)

    def _is_summed(self, rank: RankOf) -> bool:
        return all(other.is_dead or other.entered >= rank.entered for other in self.ranks)

    def close(self, rank: RankOf) -> None:
        others = [other.rank for other in self.ranks if other is not rank]
        rank.closed_at = self.now
        for other in others:
            self.send(rank, other, self.hear_calls, rank.entered, rank.log, not rank.has_failed)
        is_in_doubt = rank.is_in_doubt and not rank.has_failed
        rank.core = self._core(rank.log, rank.entered, others, self.now, is_in_doubt=is_in_doubt)
        for each in self.ranks:
            if each.is_dead and each.rank not in rank.parted:
                rank.core.gone(each.rank)
        for source in rank.parted:
            self._report_parted(rank, source)
        self.look(rank)

    def look(self, rank: RankOf) -> None:
        """Perform what the core wants, and end the rank when it is over."""
        core = rank.core
        if core is None or rank.is_over:
            return
        for ask in core.effects():
            for other in ask.ranks:
                self.send(rank, other, self.asked, rank.entered, rank.log.get(rank.entered, 0))
        if core.is_over:
            rank.is_over, rank.ended_at, rank.differs_at = True, self.now, core.differs_at or rank.differs_at
        else:
            self.after(max(0.0, core.next_deadline() - self.now), self.tick, rank)

    def tick(self, rank: RankOf) -> None:
        if rank.core is not None and not rank.is_over:
            rank.was_patient |= self.now >= rank.core._until
            rank.core.tick(self.now)
            self.look(rank)

    # What ranks hear

    def hear_calls(self, rank: RankOf, source: int, entered: int, calls: dict[int, int], in_order: bool) -> None:
        if rank.is_over:
            return
        rank.parted[source] = in_order
        rank.heard[source] = (entered, calls)
        self.compare(rank, calls)
        if rank.core is not None:
            self._report_parted(rank, source)
            self.look(rank)

    def _report_parted(self, rank: RankOf, source: int) -> None:
        if rank.core is not None and not rank.has_failed:  # a program that has failed compares nothing
            rank.core.parted(source, *rank.heard[source], in_order=rank.parted[source])

    def asked(self, rank: RankOf, source: int, number: int, call: int) -> None:
        if rank.is_over:
            return
        self.compare(rank, {number: call})
        self.send(rank, source, self.hear_answer, rank.entered, number, rank.log.get(number, 0))

    def hear_answer(self, rank: RankOf, source: int, entered: int, number: int, call: int) -> None:
        if rank.core is None or rank.is_over:
            return
        rank.core.answered(source, entered, {number: call} if call else {})
        self.look(rank)

    def compare(self, rank: RankOf, calls: dict[int, int]) -> None:
        """Compare as `StallDiagnosis` does: a difference is told to all ranks that are there."""
        differing = [number for number, call in calls.items() if rank.log.get(number, call) != call]
        if differing:
            for other in self.ranks:
                self.send(rank, other.rank, self.hear_of_difference, min(differing))
            self.hear_of_difference(rank, rank.rank, min(differing))

    def hear_of_difference(self, rank: RankOf, _: int, number: int) -> None:
        if not rank.is_over:
            rank.differs_at = rank.differs_at or number
            if rank.core is not None:
                rank.is_over, rank.ended_at = True, self.now

    # What must hold

    def check(self) -> None:
        living = [rank for rank in self.ranks if not rank.is_dead]
        assert all(rank.is_over for rank in living), "a rank hangs"
        if self.is_equal:
            assert not any(rank.differs_at for rank in self.ranks), "equal calls are accused"
            for rank in living if not self.loses else ():
                called_at = max(other.entered_at[rank.entered] for other in self.ranks)
                assert rank.ended_at <= max(rank.closed_at, called_at) + PROMPT, "a rank waits though all have called"
        elif not self.loses:
            for rank in living:
                # That others will call more than it has, a rank that closes the group need not know.
                is_other = any(other.calls[: len(rank.calls)] != rank.calls for other in self.ranks)
                if rank.is_in_doubt and is_other and not rank.was_patient:
                    assert rank.differs_at, f"rank {rank.rank} does not know that its calls differ"


@pytest.mark.parametrize("batch", batches(20))
def test_ranks_in_doubt_learn_that_their_calls_differ_and_no_equal_calls_are_accused(batch: int) -> None:
    noticed = given_up = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        play = Play(seed)
        try:
            play.perform()
        except AssertionError as error:
            error.add_note(f"seed={seed}")
            raise
        noticed += any(rank.differs_at for rank in play.ranks)
        given_up += any(rank.was_patient for rank in play.ranks)
    assert noticed > BATCH / 4, "the simulation has differences to notice"
    assert given_up, "and ranks that come too late"


class Forgets(Parting):
    """Does not ask again."""

    def tick(self, now: float) -> None:
        if now >= self._until:
            super().tick(now)
        else:
            self._ask_at = self._until


class TakesShortLogs(Parting):
    """Is content with ranks that closed the group without its last calls."""

    def parted(self, rank: int, entered: int, calls: Any, *, in_order: bool) -> None:
        super().parted(rank, entered, calls, in_order=False)


class AccusesTheSlow(Parting):
    """Takes a rank that has not called the operation yet for one that never will."""

    def answered(self, rank: int, entered: int, calls: Any) -> None:
        self.parted(rank, entered, calls, in_order=True)


class AccusesTheFailed(Parting):
    """Expects all calls of ranks in a group that has failed."""

    def parted(self, rank: int, entered: int, calls: Any, *, in_order: bool) -> None:
        super().parted(rank, entered, calls, in_order=True)


class TrustsAnyAnswer(Parting):
    """Takes the answer of a rank that has not called the operation for agreement."""

    def answered(self, rank: int, entered: int, calls: Any) -> None:
        super().answered(rank, self._last, calls)


class WaitsForTheDead(Parting):
    """Waits for lost ranks, and without end."""

    def gone(self, rank: int) -> None:
        pass

    def tick(self, now: float) -> None:
        self._until = now + call_inquiries.PARTING_PATIENCE
        super().tick(now)


class TrustsItself(Parting):
    """Never asks."""

    def __init__(self, *args: Any, is_in_doubt: bool) -> None:
        super().__init__(*args, is_in_doubt=False)


@pytest.mark.parametrize(
    "mutant",
    [Forgets, TakesShortLogs, AccusesTheSlow, AccusesTheFailed, TrustsAnyAnswer, WaitsForTheDead, TrustsItself],
)
def test_these_plays_notice_a_core_that(mutant: type[Parting]) -> None:
    for seed in seeds(3000):
        try:
            Play(seed, mutant).perform()
        except AssertionError:
            return
    pytest.fail(f"no play notices a core that is wrong: {mutant.__doc__}")
