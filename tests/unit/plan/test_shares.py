from __future__ import annotations

import random

import pytest
from tests.support.in_turn import in_turn

from covey.plan import shares


def direct_time(speeds: list[float], parts: list[float]) -> float:
    """Seconds of a direct exchange of one byte: each slot sends 1 + (n - 2) s."""
    return max((1 + (len(speeds) - 2) * part) / speed for speed, part in zip(speeds, parts, strict=True))


def ring_time(speeds: list[float], parts: list[float]) -> float:
    """Seconds of a ring of one byte: each hop carries 2 - s - the next s."""
    return max((2 - parts[p] - parts[(p + 1) % len(parts)]) / speed for p, speed in enumerate(speeds))


def some_parts(rng: random.Random, size: int) -> list[float]:
    weights = [rng.choice([0, rng.random()]) for _ in range(size)]
    return [weight / (sum(weights) or 1) for weight in weights]


@in_turn(seed=range(30))
def test_owners_finish_together_and_no_sooner_time_is_possible(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([1, 3, 10, 10 * rng.random() + 0.1]) for _ in range(rng.randint(3, 12))]
    found = shares.owners(speeds)
    assert sum(found) == shares.WHOLE
    assert min(found) >= 0
    time = direct_time(speeds, [share / shares.WHOLE for share in found])
    least = max(1 / min(speeds), 2 * (len(speeds) - 1) / sum(speeds))
    assert time == pytest.approx(least, rel=1e-3)
    busy = [(1 + (len(speeds) - 2) * share / shares.WHOLE) / speed for speed, share in zip(speeds, found, strict=True)]
    owning = [each for each, share in zip(busy, found, strict=True) if share > 1]
    assert max(owning) == pytest.approx(min(owning), rel=1e-2)


@in_turn(seed=range(30))
def test_no_other_shares_make_a_ring_faster(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([1.0, 3.0, 10.0]) for _ in range(rng.randint(3, 9))]
    found = shares.ring(speeds)
    assert sum(found) == shares.WHOLE
    assert min(found) >= 0
    time = ring_time(speeds, [share / shares.WHOLE for share in found])
    assert 1 / min(speeds) <= time * 1.001
    for _ in range(300):
        assert time <= ring_time(speeds, some_parts(rng, len(speeds))) * 1.001


def test_one_slow_slot_of_a_ring_owns_everything_and_moves_half_as_much() -> None:
    assert shares.ring([10, 10, 1, 1]) == (0, 0, 0, shares.WHOLE)
    assert ring_time([10, 10, 1, 1], [0, 0, 0, 1]) == 1
    assert ring_time([10, 10, 1, 1], [0.25] * 4) == 1.5


def test_a_slow_owner_gets_nothing_and_equal_ones_the_same() -> None:
    assert shares.owners([10, 10, 10, 1]) == (21846, 21845, 21845, 0)
    assert shares.owners([5, 5, 5, 5]) == (shares.WHOLE // 4,) * 4
    assert shares.owners([7, 1]) == (shares.WHOLE // 2,) * 2
    assert shares.owners([7]) == (shares.WHOLE,)
    assert shares.whole([1, 1, 1]) == (21846, 21845, 21845)
