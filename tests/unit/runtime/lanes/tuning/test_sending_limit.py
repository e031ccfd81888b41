"""How the limit of a machine is divided among its connections."""

from __future__ import annotations

from itertools import product

import pytest

from covey.base.numbers import Seat
from covey.runtime.lanes.tuning.rate_limits import PARTS_SHARE, Demand, RateBudget, capped, divide
from covey.runtime.lanes.tuning.yielding import Urgency

LIMIT = 1_000_000
CASES = [
    [Demand(urgency, is_sending) for urgency, is_sending in zip(urgencies, sending, strict=True)]
    for size in range(1, 5)
    for urgencies in product((Urgency.PARTS, Urgency.TENSORS), repeat=size)
    for sending in product((False, True), repeat=size)
]


@pytest.mark.parametrize("available", [LIMIT, LIMIT // 10])
def test_connections_that_send_have_all_of_what_is_available_and_no_more(available: int) -> None:
    for demands in CASES:
        shares = divide(available, LIMIT, demands)
        assert min(shares) >= 1
        sending = [share for share, each in zip(shares, demands, strict=True) if each.is_sending]
        if sending:
            assert available - len(demands) <= sum(sending) <= available, demands


def test_an_idle_connection_may_begin_as_if_it_alone_began() -> None:
    idle, busy = Demand(Urgency.TENSORS, False), Demand(Urgency.TENSORS, True)
    assert divide(LIMIT, LIMIT, [idle, idle, idle]) == [LIMIT] * 3
    assert divide(LIMIT, LIMIT, [busy, idle, idle]) == [LIMIT, LIMIT // 2, LIMIT // 2]


def test_tensors_give_way_to_parts_of_calls_and_small_calls_are_not_slowed_down() -> None:
    tensors = [Demand(Urgency.TENSORS, True)] * 4
    shares = divide(LIMIT // 2, LIMIT, [*tensors, Demand(Urgency.PARTS, True), Demand(Urgency.CALLS, True)])
    assert shares[4] == pytest.approx(PARTS_SHARE * LIMIT / 2, abs=1)
    assert sum(shares[:4]) == pytest.approx((1 - PARTS_SHARE) * LIMIT / 2, abs=4)
    assert shares[5] == LIMIT


def test_what_was_moved_too_much_is_taken_off_what_follows_and_what_was_not_moved_may_be_moved_later() -> None:
    budget = RateBudget(0.5)
    assert budget.available(LIMIT, LIMIT, 1.0) == LIMIT
    assert budget.available(LIMIT, LIMIT // 4, 0.0) == LIMIT / 2  # a quarter of a second too much, in half a second
    assert budget.available(LIMIT, LIMIT * 10, 0.0) == LIMIT / 10  # never nothing
    assert budget.available(LIMIT, 0, 100.0) == LIMIT
    assert budget.available(LIMIT, LIMIT // 2, 0.0) == LIMIT  # saved, but no more than half a second of it
    assert budget.available(LIMIT, LIMIT // 4, 0.0) == LIMIT / 2


def test_connections_share_what_a_peer_allows_and_small_calls_and_other_peers_are_not_slowed_down() -> None:
    busy, call = Demand(Urgency.TENSORS, True), Demand(Urgency.CALLS, True)
    demands, peers = [busy, busy, busy, call], [Seat(1), Seat(1), Seat(2), Seat(1)]
    assert capped([9, 9, 9, 9], demands, peers, {}) == [9, 9, 9, 9]
    assert capped([100, 3, 100, 100], demands, peers, {Seat(1): 10, Seat(7): 1}) == [5, 3, 100, 100]
