"""Shares by speed."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from covey.torch.training.sampler import Pace, by_speed, even

SPEEDS = st.lists(st.floats(1e-6, 1e9) | st.sampled_from([0.0, math.nan, math.inf]), min_size=1, max_size=12)


@given(batch=st.integers(1, 5000), speeds=SPEEDS)
def test_shares_are_the_whole_batch_and_nobody_is_left_out(batch: int, speeds: list[float]) -> None:
    shares = by_speed(batch, speeds)
    assert sum(shares) == batch
    assert len(shares) == len(speeds)
    assert min(shares) >= (batch >= len(speeds))


@given(batch=st.integers(1, 5000), speeds=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=12))
def test_shares_are_in_proportion_to_speed(batch: int, speeds: list[float]) -> None:
    shares = by_speed(batch, speeds)
    ideal = [batch * speed / sum(speeds) for speed in speeds]
    if min(ideal) >= 1:
        assert all(abs(share - wanted) < 1.01 for share, wanted in zip(shares, ideal, strict=True))
    ordered = [share for _, share in sorted(zip(speeds, shares, strict=True))]
    assert all(share <= after + 1 for share, after in pairwise(ordered))


@given(batch=st.integers(1, 5000), count=st.integers(1, 12))
def test_without_speeds_shares_are_even(batch: int, count: int) -> None:
    assert sum(even(batch, count)) == batch
    assert max(even(batch, count)) - min(even(batch, count)) <= 1
    assert sorted(by_speed(batch, [0.0] * count)) == sorted(even(batch, count))


def test_one_whose_speed_is_unknown_counts_as_the_average() -> None:
    assert by_speed(60, [1.0, 0.0, 3.0]) == [10, 20, 30]
    assert by_speed(100, [1.0, 99_999.0, 99_999.0]) == [1, 50, 49]
    assert by_speed(2, [1.0, 3.0, 2.0]) == [0, 1, 1]


def test_a_pace_follows_the_newest_steps_and_ignores_empty_ones() -> None:
    pace = Pace()
    pace.measure(10, 1.0)
    assert pace.speed == 10
    pace.measure(0, 5.0)
    for _ in range(7):
        pace.measure(10, 0.5)
    assert 19 < pace.speed < 20
