"""What "auto" chooses: never a codec that is predicted to be slower, and never one above the error budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.unit.compress.arrays import around, normal

from covey.compress.choice import CODEC_ERRORS, Speed, choose, codec_seconds, plain_seconds
from covey.compress.quantisers import FP8, Int4, Int8, OneBit

if TYPE_CHECKING:
    from covey.compress.codec import Codec

SPEEDS = {codec: Speed(2e9, 4e9) for codec in CODEC_ERRORS}
SLOW = 12.5e6
"""Bytes per second of a link of 100 Mbit/s."""
LARGE = 64 << 20


@pytest.mark.parametrize("codec", CODEC_ERRORS, ids=str)
def test_the_errors_of_the_table_are_those_of_the_codecs(codec: Codec) -> None:
    x = normal(200_000, 1)
    error = float(np.sqrt(np.mean((around(codec, x) - x) ** 2.0) / np.mean(x**2.0)))
    assert 0.6 * CODEC_ERRORS[codec] <= error <= CODEC_ERRORS[codec]


@pytest.mark.parametrize(("budget", "codec"), [(0.01, Int8()), (0.15, Int4()), (1.0, OneBit())])
def test_on_a_slow_link_the_smallest_within_the_budget_is_chosen(budget: float, codec: Codec) -> None:
    chosen, reason = choose(LARGE, 4, SLOW, 1e-3, SPEEDS, budget)
    assert chosen == codec
    assert reason.startswith(f"{codec}: ")
    assert reason.endswith("at 12.5 MB/s")


def test_the_fastest_of_equal_size_is_chosen() -> None:
    speeds = {**SPEEDS, FP8(): Speed(4e9, 4e9)}
    assert choose(LARGE, 4, SLOW, 1e-3, speeds, 0.05)[0] == FP8()


def test_shared_memory_and_single_ranks_are_not_compressed() -> None:
    assert choose(LARGE, 4, math.inf, 0.0, SPEEDS, 1.0) == (None, "none: the ranks share memory")
    assert choose(LARGE, 1, SLOW, 0.0, SPEEDS, 1.0) == (None, "none: there is no other rank")


def test_a_fast_link_is_not_compressed() -> None:
    chosen, reason = choose(LARGE, 4, 5e9, 1e-5, SPEEDS, 1.0)
    assert chosen is None
    assert reason.startswith("none: ")


def test_nothing_is_chosen_if_nothing_fits_the_budget_or_was_measured() -> None:
    assert choose(LARGE, 4, SLOW, 1e-3, SPEEDS, 1e-5) == (None, "none: no measured codec has an error of at most 1e-05")
    assert choose(LARGE, 4, SLOW, 1e-3, {}, 1.0)[0] is None
    assert choose(LARGE, 4, SLOW, 1e-3, {OneBit(): SPEEDS[OneBit()]}, 0.5)[0] is None


@in_turn(seed=range(300))
def test_the_choice_is_never_slower_than_none_nor_above_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nbytes, ranks = int(10 ** rng.uniform(0, 10)), int(rng.integers(1, 65))
    rate, latency = 10 ** rng.uniform(5, 11), 10 ** rng.uniform(-6, -1)
    budget = 10 ** rng.uniform(-5, 0)
    measured = [codec for codec in CODEC_ERRORS if rng.random() < 0.7]
    speeds = {codec: Speed(10 ** rng.uniform(8, 11), 10 ** rng.uniform(8, 11)) for codec in measured}
    chosen, _ = choose(nbytes, ranks, rate, latency, speeds, budget)
    plain = plain_seconds(nbytes, ranks, rate, latency)
    if chosen is not None:
        assert CODEC_ERRORS[chosen] <= budget
        assert codec_seconds(chosen, nbytes, ranks, rate, latency, speeds[chosen]) < plain
    allowed = [codec for codec in measured if CODEC_ERRORS[codec] <= budget]
    times = [codec_seconds(codec, nbytes, ranks, rate, latency, speeds[codec]) for codec in allowed]
    if ranks > 1 and times and min(times) < 0.94 * plain:
        assert chosen is not None
        assert codec_seconds(chosen, nbytes, ranks, rate, latency, speeds[chosen]) == min(times)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4])
def test_tiny_arrays_are_not_compressed(nbytes: int) -> None:
    assert choose(nbytes, 3, SLOW, 1e-3, SPEEDS, 1.0)[0] is None
