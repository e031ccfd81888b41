"""Which functions count as short."""

from __future__ import annotations

from covey.runtime.calls.functions import SHORT_SECONDS, CallPace


def runs_until_short(pace: CallPace) -> int:
    runs = 0
    while not pace.is_short:
        pace.took(SHORT_SECONDS / 4)
        runs += 1
        assert runs < 1000
    return runs


def test_a_function_is_short_after_some_short_runs_only() -> None:
    pace = CallPace()
    assert not pace.is_short
    assert runs_until_short(pace) > 3


def test_a_long_run_takes_many_short_ones_to_be_forgotten() -> None:
    pace = CallPace()
    runs_until_short(pace)
    pace.took(1.0)
    assert not pace.is_short
    assert runs_until_short(pace) > 30


def test_a_function_that_takes_longer_is_never_short() -> None:
    pace = CallPace()
    for _ in range(100):
        pace.took(2 * SHORT_SECONDS)
    assert not pace.is_short
