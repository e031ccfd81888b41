import math

import numpy as np

from covey.base.numbers import Rank
from covey.plan.network import Flow
from covey.runtime.collectives.link_probes import MOST_ROUND_TRIP, ROUND_TRIP, MeasuredLinks, both_ways


def test_what_was_measured_is_kept_for_the_ranks_that_remain() -> None:
    ranks = (Rank(0), Rank(2), Rank(3), Rank(5))
    rounds = (
        (Flow(0, 1, 10.0), Flow(1, 2, 20.0), Flow(2, 3, 30.0), Flow(3, 0, 40.0)),
        (Flow(0, 2, 1.0), Flow(1, 3, 2.0), Flow(2, 0, 3.0), Flow(3, 1, 4.0)),
    )
    trips = tuple(tuple(10.0 * i + j for j in range(4)) for i in range(4))
    measured = MeasuredLinks(ranks, rounds, trips, 7.0)
    assert measured.among(ranks) == measured
    assert measured.among((Rank(0), Rank(2), Rank(4))) is None
    assert measured.among((Rank(0), Rank(3), Rank(5))) == MeasuredLinks(
        (Rank(0), Rank(3), Rank(5)),
        ((Flow(1, 2, 30.0), Flow(2, 0, 40.0)), (Flow(0, 1, 1.0), Flow(1, 0, 3.0))),
        ((0.0, 2.0, 3.0), (20.0, 22.0, 23.0), (30.0, 32.0, 33.0)),
        7.0,
    )


def test_of_what_both_ends_took_the_shorter_counts_and_what_no_end_knows_is_assumed() -> None:
    trips = np.array([[0.0, 0.3, -1.0, 99.0], [0.1, 0.0, math.nan, -1.0], [-1.0, 0.2, 0.0, 0.5], [77.0, 0.0, 0.4, 0.0]])
    assert both_ways(trips) == (
        (0.0, 0.1, ROUND_TRIP, MOST_ROUND_TRIP),
        (0.1, 0.0, 0.2, ROUND_TRIP),
        (ROUND_TRIP, 0.2, 0.0, 0.4),
        (MOST_ROUND_TRIP, ROUND_TRIP, 0.4, 0.0),
    )
