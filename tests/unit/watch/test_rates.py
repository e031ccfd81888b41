"""The history of a run is bounded, and thinned as it gets older."""

from __future__ import annotations

import itertools

import pytest

from covey.watch.overview import Moment
from covey.watch.rates import EARLIER_LIMIT, MOMENTS_LIMIT, Curves
from covey.wire.progress import ReportRow


def test_ten_minutes_are_kept_by_the_second_and_an_hour_by_ten() -> None:
    curves = Curves()
    for second in range(3 * 3600):
        curves.add(Moment(float(second), step=second))
    moments = curves.since(0.0)
    times = [moment.at for moment in moments]
    last = 3 * 3600 - 1
    assert times == sorted(times)
    assert times[-601:] == [float(second) for second in range(last - 600, last + 1)]
    older = times[:-601]
    assert {later - earlier for earlier, later in itertools.pairwise(older)} == {10.0}
    assert last - 3600 <= times[0] <= last - 3590
    assert len(moments) <= 601 + 301
    assert curves.since(last - 5.0) == moments[-5:]


def test_a_clock_that_stands_still_or_goes_back_does_not_fill_the_memory() -> None:
    curves = Curves()
    for number in range(3 * MOMENTS_LIMIT):
        curves.add(Moment(1000.0 if number % 2 else 500.0))
    assert len(curves) <= MOMENTS_LIMIT


def test_what_was_reported_before_is_in_front_and_bounded() -> None:
    curves = Curves()
    curves.add(Moment(5000.0, step=5000))
    rows = [ReportRow(float(at), at, {"loss": 1 / (at + 1)}, 0.5, 0.25) for at in range(5001)]
    curves.begin(rows)
    moments = curves.since(-1.0)
    assert len(moments) <= EARLIER_LIMIT + 1
    assert moments[0] == Moment(0.0, 0, {"loss": 1.0}, 0.75, 0.5, 0.25)
    assert moments[-1].step == 5000
    assert [moment.at for moment in moments] == sorted({moment.at for moment in moments}), "none is there twice"
    curves.begin([ReportRow(1.0, None, {})])
    assert curves.since(0.0)[0] == Moment(1.0), "a row without a step has no parts"


@pytest.mark.parametrize("is_begun_first", [False, True])
def test_what_was_reported_while_the_first_answer_was_awaited_is_in_front_too(*, is_begun_first: bool) -> None:
    """The time of a moment is when its questions were asked."""
    curves = Curves()
    rows = [ReportRow(at, step, {}) for step, at in enumerate((9.9, 10.1, 10.2, 10.3))]
    if is_begun_first:
        curves.begin(rows)
    curves.add(Moment(9.5))
    curves.add(Moment(10.0, step=3))
    if not is_begun_first:
        curves.begin(rows)
    assert [moment.step for moment in curves.since(-1.0)] == [None, 0, 1, 2, 3]
