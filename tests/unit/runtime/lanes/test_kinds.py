"""What is chosen for a lane follows from the facts of a pair."""

from __future__ import annotations

import pytest

from covey.runtime.lanes.kinds import streams_for


@pytest.mark.parametrize(
    ("round_trip", "cores", "ranks_here", "streams"),
    [
        (0.0001, 2, 2, 1),
        (0.0001, 3, 2, 1),
        (0.0001, 4, 2, 2),
        (0.0001, 16, 8, 2),
        (0.0001, 16, 9, 1),
        (0.03, 2, 2, 4),
        (0.03, 16, 2, 4),
        (0.2, 16, 2, 8),
    ],
)
def test_a_secure_lane_has_more_streams_for_idle_cores_and_for_long_ways(
    round_trip: float, cores: int, ranks_here: int, streams: int
) -> None:
    assert streams_for(round_trip, cores, ranks_here) == streams
