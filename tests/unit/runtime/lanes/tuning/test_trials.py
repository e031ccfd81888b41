"""More streams are kept where they are faster, and given up where they are not, whatever the network does."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.support.in_turn import in_turn

from covey.base.settings import STREAMS_LIMIT
from covey.runtime.lanes.tuning.trials import (
    CLEAR_GAIN,
    FIRST_REST_SECONDS,
    LEAST_GROWTH,
    LEAST_SENDING_SHARE,
    LOOKS,
    MOST_REST_SECONDS,
    WINDOW_BYTES,
    WINDOW_SECONDS,
    LaneTrial,
    SpeedWindow,
    StreamChoice,
    TrialVerdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1e6


def follow(
    choice: StreamChoice,
    speed: Callable[[int], float],
    seconds: int,
    *,
    most: int = STREAMS_LIMIT,
    start: float = 0.0,
) -> list[int]:
    """Measure once a second, on a lane that is replaced at once; return the numbers of streams."""
    counts = []
    for second in range(seconds):
        counts.append(choice.count)
        choice.take(choice.count, speed(choice.count), start + second, most)
    return counts


def test_streams_that_are_limited_each_are_multiplied_up_to_the_limit() -> None:
    choice = StreamChoice(4)
    assert follow(choice, lambda count: count * MB, 12) == [4] * 3 + [16] * 4 + [64] * 5
    assert not choice.is_trying
    assert choice.reason == "64 MB/s instead of 16 MB/s"


def test_a_full_link_has_its_first_number_again_after_one_speed_and_rests_longer_each_time() -> None:
    choice = StreamChoice(4)
    counts = follow(choice, lambda _: 50 * MB, 2000)
    trials = [at for at, count in enumerate(counts) if count == 16]
    assert trials[0] == LOOKS
    pauses = [later - earlier for earlier, later in pairwise(trials)]
    assert len(trials) == len(set(trials)) == len(pauses) + 1
    assert pauses[:4] == [int(FIRST_REST_SECONDS * 2**turn) + 1 for turn in range(4)], "each trial ends at once"
    assert pauses[-1] == int(MOST_REST_SECONDS) + 1
    assert choice.count == 4
    assert "16 were not faster" in choice.reason


def test_a_gain_of_less_than_a_tenth_is_none() -> None:
    enough = StreamChoice(1)
    follow(enough, lambda count: MB * (1 if count == 1 else 1.11), LOOKS + LOOKS)
    assert (enough.count, enough.is_trying) == (4, False)
    little = StreamChoice(1)
    follow(little, lambda count: MB * (1 if count == 1 else 1.09), LOOKS + 1)
    assert (little.count, little.is_trying) == (1, False)


def test_one_lucky_speed_is_no_gain() -> None:
    choice = StreamChoice(4)
    follow(choice, lambda _: MB, LOOKS)
    verdicts = [choice.take(16, speed, 10.0, STREAMS_LIMIT) for speed in (3 * MB, 3 * MB, MB)]
    assert verdicts == [None, None, TrialVerdict.NOT_FASTER]
    assert choice.count == 4


def test_one_unlucky_speed_before_a_trial_makes_it_no_easier() -> None:
    choice = StreamChoice(4)
    for speed in (MB, 0.2 * MB, 0.2 * MB):
        choice.take(4, speed, 0.0, STREAMS_LIMIT)
    assert choice.take(16, 1.05 * MB, 1.0, STREAMS_LIMIT) is TrialVerdict.NOT_FASTER


def test_nothing_is_tried_that_is_not_at_least_twice_as_much() -> None:
    assert set(follow(StreamChoice(8), lambda count: count * MB, 99, most=15)) == {8}
    assert set(follow(StreamChoice(8), lambda count: count * MB, 99, most=16)) == {8, 16}
    assert set(follow(StreamChoice(40), lambda count: count * MB, 99)) == {40}


def test_speeds_of_a_lane_that_is_still_to_be_replaced_do_not_count() -> None:
    choice = StreamChoice(4)
    follow(choice, lambda _: MB, LOOKS)
    for second in range(20):
        assert choice.take(4, 0.1 * MB, second, STREAMS_LIMIT) is None
    assert (choice.count, choice.is_trying) == (16, True)


def test_streams_that_cannot_be_opened_are_given_up_and_tried_again_later() -> None:
    choice = StreamChoice(4)
    follow(choice, lambda _: MB, LOOKS)
    choice.refused(2.0)
    assert (choice.count, choice.reason) == (4, "16 could not be opened")
    choice.refused(2.0)  # nothing is being tried
    assert set(follow(choice, lambda _: MB, int(FIRST_REST_SECONDS) - 1, start=3.0)) == {4}
    follow(choice, lambda _: MB, 1, start=2.0 + FIRST_REST_SECONDS)
    assert choice.count == 16


@in_turn(seed=range(150))
def test_on_any_network_the_number_is_bounded_and_settles_where_more_gain_nothing(seed: int) -> None:
    rng = random.Random(seed)
    each, link = rng.uniform(0.1, 20) * MB, rng.uniform(0.5, 400) * MB
    first, noise = rng.choice([1, 2, 4, 8]), rng.uniform(0, 0.04)
    most, harm = rng.choice([STREAMS_LIMIT, rng.randrange(1, 65)]), rng.choice([0.0, 0.002])

    def ideal(count: int) -> float:
        return min(count * each, link * (1 - harm * count))

    choice, kept, now = StreamChoice(first), [first], 0.0
    for _ in range(400):
        now += rng.uniform(1, 5)
        if choice.is_trying and rng.random() < 0.05:
            choice.refused(now)
        before, was_trying = choice.count, choice.is_trying
        verdict = choice.take(before, ideal(before) * rng.uniform(1 - noise, 1 + noise), now, most)
        assert first <= choice.count <= max(first, most)
        assert choice.is_trying or choice.count == (before if verdict is TrialVerdict.FASTER else kept[-1])
        if verdict is TrialVerdict.FASTER:
            assert was_trying
            assert ideal(before) > ideal(kept[-1]), "kept without a gain"
            kept.append(before)
    wanted = min(most, 4 * kept[-1])
    may_grow = wanted >= LEAST_GROWTH * kept[-1]
    clear = CLEAR_GAIN * (1 + noise) / (1 - noise) * 1.01
    assert not (may_grow and ideal(wanted) > clear * ideal(kept[-1])), "a clear gain was not found"


@in_turn(seed=range(20))
def test_noise_is_no_gain(seed: int) -> None:
    rng = random.Random(seed)
    choice = StreamChoice(4)
    follow(choice, lambda _: rng.lognormvariate(0, 0.1) * MB, 3600)
    assert choice.count == 4


def test_a_verdict_stays() -> None:
    trial = LaneTrial(100.0)
    assert trial.judge(CLEAR_GAIN * 100.0 + 1) is TrialVerdict.FASTER
    assert trial.judge(0.0) is TrialVerdict.FASTER


def test_a_speed_is_that_of_the_busiest_stream_and_needs_bytes_and_time() -> None:
    window, step = SpeedWindow(), WINDOW_SECONDS / 4
    assert window.take(10 * WINDOW_BYTES, [9.0, 8.0], 0.0) is None, "what was before is not known"
    assert window.take(12 * WINDOW_BYTES, [9.0 + 3 * step, 8.0], 1.0) is None
    assert window.take(14 * WINDOW_BYTES, [9.0 + 4 * step, 8.0 + step], 2.0) == 4 * WINDOW_BYTES / (4 * step)
    assert window.take(14 * WINDOW_BYTES + 1, [20.0, 20.0], 3.0) is None, "it has sent next to nothing"
    assert window.take(16 * WINDOW_BYTES, [20.0, 20.0], 4.0) == 2 * WINDOW_BYTES / (20.0 - 8.0 - step)


def test_a_lane_that_is_hardly_used_has_no_speed() -> None:
    window = SpeedWindow()
    window.take(0, [0.0], 0.0)
    seconds = 2 * WINDOW_SECONDS / LEAST_SENDING_SHARE
    assert window.take(4 * WINDOW_BYTES, [WINDOW_SECONDS], seconds) is None
    assert (
        window.take(8 * WINDOW_BYTES, [2 * WINDOW_SECONDS], seconds + WINDOW_SECONDS)
        == 4 * WINDOW_BYTES / WINDOW_SECONDS
    )
