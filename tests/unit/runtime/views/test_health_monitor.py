"""Clocks of other processes, measured with heartbeats."""

from __future__ import annotations

from covey.base.numbers import Seat
from covey.runtime.views.health_monitor import ClockOffsets

ONE, TWO = Seat(1), Seat(2)


def test_the_shortest_round_trip_counts() -> None:
    clocks = ClockOffsets()
    clocks.measured(ONE, 0.010, 5.004)
    clocks.measured(ONE, 0.001, 5.000)
    clocks.measured(ONE, 0.010, 4.996)
    clocks.measured(TWO, 0.500, -3.0)
    assert clocks.offsets() == {1: 5.000, 2: -3.0}


def test_an_old_measurement_gives_way_because_clocks_drift() -> None:
    clocks = ClockOffsets()
    clocks.measured(ONE, 0.001, 5.0)
    for step in range(100):
        clocks.measured(ONE, 0.010, 6.0 + step)
    assert clocks.offsets()[ONE] > 6.0
