"""Rates: so many at once, so many a second, and no more whatever is asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from covey.base.pace import PACED_KEYS_LIMIT, Bucket, Buckets, Seldom

times = st.lists(st.floats(0, 100, allow_nan=False), max_size=300).map(sorted)


@given(times, st.floats(0.1, 20), st.integers(1, 20))
def test_no_stretch_of_time_has_more_than_the_burst_and_the_rate(at: list[float], rate: float, burst: int) -> None:
    bucket = Bucket(rate, burst)
    taken = [now for now in at if bucket.take(now)]
    for i, since in enumerate(taken):
        for j, until in enumerate(taken[i:], i):
            assert j - i + 1 <= burst + rate * (until - since) + 1e-6


def test_what_is_not_used_is_kept_up_to_the_burst_and_comes_when_it_is_said_to() -> None:
    bucket = Bucket(2.0, 3.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait(1000.0) == 0.5
    assert bucket.take(1000.5)
    assert not bucket.take(1000.5)
    assert [bucket.take(9999.0) for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(1.0, 1.0)
    assert bucket.take(10.0)
    assert not bucket.take(5.0)
    assert bucket.take(11.0)


def test_every_key_has_its_own_and_only_so_many_are_remembered() -> None:
    buckets = Buckets(0.001, 1.0)
    assert buckets.take("one", 0.0)
    assert not buckets.take("one", 1.0)
    assert buckets.take("two", 1.0)
    for number in range(PACED_KEYS_LIMIT):
        buckets.take(number, 1.0)
    assert len(buckets._buckets) == PACED_KEYS_LIMIT


def test_a_line_is_let_through_now_and_then_and_the_rest_is_counted() -> None:
    seldom = Seldom(10.0)
    assert [seldom.may(now) for now in (0.0, 1.0, 9.9, 10.0, 10.1)] == [True, False, False, True, False]
    assert seldom.unsaid == 3
