"""Newcomers that follow a training as shadows, while ranks are lost: only equal states train, and it always ends.

A `World` is a function of its seed. In an exchange, all remaining ranks hear the same from the same ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.proto.shadowing import AdmissionOrder, ShadowAdmission, ShadowPhase, ShadowReplay, ShadowReport

if TYPE_CHECKING:
    from collections.abc import Callable

PIECES = 3
MOST_STEPS = 400
"""After so many steps an admission must be over."""


class Rank:
    """One rank: its state is the list of the steps that it has taken."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.world = number, world
        self.admission = ShadowAdmission(world.holders, world.shadows)
        self.follower = ShadowReplay[int](world.most) if number in world.shadows else None
        self.state: list[int] = list(world.before)
        self.coming: tuple[list[int], list[int]] | None = None
        """The snapshot that is on its way, and the donors that still have to send their part."""
        self.is_odd = False
        """Whether it takes kept steps in another way than the others did."""
        if self.follower is not None:
            self.state = [-1]
            self.is_odd = world.chance.random() < 0.15
            self.coming = (list(world.before), list(world.holders))

    def step(self, number: int) -> None:
        if self.follower is not None and self.follower.phase is not ShadowPhase.READY:
            self.follower.keep(number, 1)
        else:
            self.state.append(number)

    def report(self) -> ShadowReport:
        chance, follower = self.world.chance, self.follower
        if follower is None:
            phase = ShadowPhase.HOLDS
        else:
            if self.coming is not None:
                state, donors = self.coming
                if donors and donors[-1] in self.world.live and chance.random() < self.world.speed:
                    donors.pop()
                if not donors and follower.phase is ShadowPhase.RECEIVES:
                    self.state, self.coming = list(state), None
                    follower.complete()
            for _ in range(chance.choice([1, 2, 2, 3])):
                if (step := follower.next()) is not None:
                    self.state.append(-step if self.is_odd else step)
            phase = follower.phase
        piece = self.admission.piece_of(self.number)
        if piece is None:
            return ShadowReport(phase)
        part = self.state[piece::PIECES]
        return ShadowReport(phase, PIECES, hash(tuple(part)))


class World:
    """The ranks of a generation, and the losses among them."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        size = chance.randint(2, 7)
        ranks = list(range(size))
        chance.shuffle(ranks)
        cut = chance.randint(1, size - 1)
        self.holders, self.shadows = ranks[:cut], ranks[cut:]
        self.most = chance.choice([2, 5, 50])
        self.speed = chance.choice([0.0, 0.2, 0.6, 1.0])
        self.before = [100, 101]
        self.live = set(ranks)
        self.ranks = {number: Rank(number, self) for number in ranks}
        self.ends = Counter[str]()

    def lose_some(self, number: int) -> None:
        if number < 40 and self.chance.random() < 0.05 and len(self.live) > 1:
            self.live.remove(self.chance.choice(sorted(self.live)))

    def play(self) -> World:
        for number in range(1, MOST_STEPS):
            self.lose_some(number)
            for rank in sorted(self.live):
                self.ranks[rank].step(number)
            told = {rank: self.ranks[rank].report() for rank in sorted(self.live)}
            self.lose_some(number)  # after the exchange, before anything is done about it
            orders = {rank: self.ranks[rank].admission.settle(told) for rank in told}
            assert len(set(orders.values())) == 1, "the ranks do different things"
            admissions = [self.ranks[rank].admission for rank in told]
            assert len({(a.holders, a.shadows, a.compared, a.donors) for a in admissions}) == 1
            common, order = admissions[0], next(iter(orders.values()))
            self.check(common, number)
            if order is AdmissionOrder.TRAIN:
                coming = [self.ranks[rank].coming for rank in common.shadows]
                lost = {donor for each in coming if each is not None for donor in each[1] if donor not in told}
                assert not lost, "a shadow waits for a rank that is lost"
            if order is AdmissionOrder.SNAPSHOT:
                self.ends["snapshots"] += 1
                state = self.state_of(common, number)
                for rank in common.shadows:
                    if common.receives(told[rank].phase):
                        follower = self.ranks[rank].follower
                        assert follower is not None
                        follower.begin()
                        self.ranks[rank].coming = (list(state), list(common.donors))
            elif order is AdmissionOrder.ALONE:
                assert not set(told) & set(self.holders) - set(self.shadows)
                for rank in told:
                    follower = self.ranks[rank].follower
                    assert follower is not None
                    if follower.is_complete and not self.ranks[rank].is_odd:
                        while (step := follower.next()) is not None:
                            self.ranks[rank].state.append(step)
                        assert self.ranks[rank].state == self.truth(number), "a step is missing"
            if order not in (AdmissionOrder.TRAIN, AdmissionOrder.SNAPSHOT):
                self.ends[order.value] += 1
                if order is AdmissionOrder.WAIT and "differs" in common.reason:
                    assert any(self.ranks[rank].is_odd for rank in told), "a step is missing, or taken twice"
                return self
        raise AssertionError("the admission does not end")

    def truth(self, number: int) -> list[int]:
        return [*self.before, *range(1, number + 1)]

    def state_of(self, common: ShadowAdmission, number: int) -> list[int]:
        found = self.ranks[common.donors[0]].state
        assert found == self.truth(number), "a snapshot is of another state"
        return found

    def check(self, common: ShadowAdmission, number: int) -> None:
        for rank in common.holders:
            assert self.ranks[rank].state == self.truth(number), f"rank {rank} trains with another state"
            if rank in common.entered:
                self.ranks[rank].follower = None
                self.ends["entered"] += 1


@in_turn(seed=seeds(200))
def test_only_ranks_with_the_same_state_train_and_the_admission_ends(seed: int) -> None:
    World(seed).play()


def test_the_courses_end_in_all_ways() -> None:
    ends = sum((World(seed).play().ends for seed in range(150)), Counter[str]())
    for kind in ("entered", "snapshots", "wait", "alone", "over"):
        assert ends[kind] > 3, ends


def enter_at_once(admission: ShadowAdmission, told: Any) -> bool:
    """Let shadows in after the first piece."""
    first = told[admission.holders[0]]
    if any(told[rank][1:] != first[1:] for rank in (*admission.holders, *admission.compared)):
        return False
    admission.entered, admission.compared = admission.compared, ()
    admission.holders = tuple(sorted({*admission.holders, *admission.entered}))
    admission.shadows = tuple(rank for rank in admission.shadows if rank not in admission.entered)
    return True


def compare_nothing(admission: ShadowAdmission, told: Any) -> bool:
    admission.entered, admission.compared = admission.compared, ()
    admission.holders = tuple(sorted({*admission.holders, *admission.entered}))
    admission.shadows = tuple(rank for rank in admission.shadows if rank not in admission.entered)
    return True


def keep_after_a_hit(follower: ShadowReplay[int], average: int, nbytes: int) -> None:
    """Drop the oldest average at the bound, and say nothing."""
    follower._kept.append((average, nbytes))
    if len(follower._kept) > follower._most:
        follower._kept.popleft()


def begin_without_forgetting(follower: ShadowReplay[int]) -> None:
    follower._is_complete = follower._is_full = False


def forget_losses(admission: ShadowAdmission, told: Any) -> AdmissionOrder:
    """Go on without looking which donors are left."""
    admission.donors = tuple(rank for rank in admission.donors if rank in told)
    return REAL_SETTLE(admission, told)


def never_hit(admission: ShadowAdmission, told: Any) -> AdmissionOrder:
    admission._hits.clear()
    return REAL_SETTLE(admission, told)


REAL_SETTLE = ShadowAdmission.settle
MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "compare one piece only": (ShadowAdmission, "_agrees", enter_at_once),
    "compare nothing": (ShadowAdmission, "_agrees", compare_nothing),
    "drop averages at the bound": (ShadowReplay, "keep", keep_after_a_hit),
    "keep averages of before the snapshot": (ShadowReplay, "begin", begin_without_forgetting),
    "wait for a part of a lost donor": (ShadowAdmission, "settle", forget_losses),
    "ask for snapshots without end": (ShadowAdmission, "settle", never_hit),
}


def play_all(courses: range) -> None:
    for seed in courses:
        World(seed).play()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_ranks_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        play_all(range(300))
