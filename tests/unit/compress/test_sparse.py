"""Which elements are sent: against a sort by hand, with ties and with what is not a number."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.unit.compress.arrays import finite_arrays, gradient, normal

from covey.base.errors import ConfigError
from covey.compress.sparse import RandomK, Threshold, TopK, selected_count

ARRAYS = finite_arrays()
RATIOS = [1e-9, 0.001, 0.01, 0.1, 0.5, 0.99, 1.0]


def by_sorting(x: np.ndarray, count: int) -> list[int]:
    bits = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).tolist()
    return sorted(sorted(range(x.size), key=lambda index: (-bits[index], index))[:count])


@in_turn(name=ARRAYS)
def test_topk_selects_what_a_sort_selects(name: str) -> None:
    x = ARRAYS[name][:5000]
    for ratio in RATIOS:
        chosen = TopK(ratio).select(x)
        assert chosen.dtype == np.int64
        assert chosen.tolist() == by_sorting(x, selected_count(ratio, x.size))


def test_topk_takes_nan_first_then_infinities_and_the_lowest_index_among_equals() -> None:
    x = np.array([1, 5, -5, np.inf, 5, np.nan, -np.inf, -5], np.float32)
    assert [TopK(k / 8).select(x).tolist() for k in range(1, 9)] == [
        [5],
        [3, 5],
        [3, 5, 6],
        [1, 3, 5, 6],
        [1, 2, 3, 5, 6],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize("period", [1, 2, 64, 128])
def test_topk_is_exact_if_the_sample_is_not_like_the_rest(period: int) -> None:
    """It looks at every 64th element first: these are all large here, or all small."""
    for factor in (1e-3, 1e3):
        x = gradient(9000, period)
        x[::period] *= np.float32(factor)
        for ratio in (0.001, 0.01, 0.2):
            assert TopK(ratio).select(x).tolist() == by_sorting(x, selected_count(ratio, x.size))


def test_topk_selects_at_least_one_and_nothing_of_nothing() -> None:
    assert TopK(1e-9).select(normal(1)).tolist() == [0]
    assert TopK(0.5).select(normal(0)).tolist() == []
    assert RandomK(0.5).select(normal(0)).tolist() == []
    assert selected_count(0.01, 250) == 2, "half to even, as Python rounds"


def test_threshold_selects_magnitudes_from_the_value_on_and_nan() -> None:
    x = np.array([0.5, -0.5, 0.49, np.nan, -np.inf, 0, -0.6], np.float32)
    assert Threshold(0.5).select(x).tolist() == [0, 1, 3, 4, 6]
    assert Threshold(0).select(x).tolist() == list(range(7))
    assert Threshold(1e30).select(normal(100)).tolist() == []


def test_randomk_selects_one_element_of_each_part() -> None:
    for count in (1, 2, 7, 1000, 4099):
        for ratio in RATIOS:
            chosen = RandomK(ratio, seed=3).select(normal(count), salt=8)
            parts = selected_count(ratio, count)
            assert chosen.size == parts
            for j, index in enumerate(chosen.tolist()):
                assert j * count // parts <= index < (j + 1) * count // parts


def test_randomk_depends_on_seed_and_salt_and_not_on_the_elements() -> None:
    one, other = normal(4096, 1), normal(4096, 2)
    assert RandomK(0.1).select(one, 5).tolist() == RandomK(0.1).select(other, 5).tolist()
    selections = {tuple(RandomK(0.1, seed).select(one, salt).tolist()) for seed in (0, 1) for salt in (0, 1, 1 << 40)}
    assert len(selections) == 6
    assert RandomK(0.1).is_shared
    assert not TopK(0.1).is_shared


def test_randomk_gives_every_element_the_same_chance() -> None:
    """Each of 20 elements is drawn 1000 times out of 4000, with a standard deviation of 27.4."""
    x = np.zeros(20, np.float32)
    drawn = np.bincount(np.concatenate([RandomK(0.25).select(x, salt) for salt in range(4000)]), minlength=20)
    assert np.abs(drawn - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)


@in_turn(kind=[TopK, RandomK])
@in_turn(ratio=[0, -0.1, 1.1, float("nan"), "0.1", True, None])
def test_a_ratio_must_be_above_0_and_at_most_1(kind: type, ratio: object) -> None:
    with pytest.raises(ConfigError, match="give the part of all elements to send"):
        kind(ratio)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), "1", False])
def test_a_threshold_must_be_a_magnitude(value: object) -> None:
    with pytest.raises(ConfigError, match="give the smallest magnitude to send"):
        Threshold(value)  # type: ignore[arg-type]
