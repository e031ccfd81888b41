from __future__ import annotations

import pytest

from covey.lab.network_simulation import UnfinishedError, fair, simulated
from covey.plan.cost import TRANSFER_SECONDS
from covey.plan.moves import Plan, Recv, Send
from covey.plan.network import of_hosts, uniform

RATE, TRIP = 1e6, 0.02
LINKS = ("up", 0, 0), ("up", 1, 0)


def test_a_transfer_takes_its_bytes_and_half_a_round_trip() -> None:
    plans = [Plan((Send(1, 0, 0, 500),)), Plan((), (Recv(0, 0, 0, 500),))]
    assert simulated(plans, uniform(2, RATE, TRIP), 4) == pytest.approx(2000 / RATE + TRIP / 2 + TRANSFER_SECONDS)


def test_transfers_at_the_same_time_share_the_link_of_a_host() -> None:
    """Two slots of one host send to two others: each has half of the link, and all of it when the other is done."""
    network = of_hosts((0, 0, 1, 2), [RATE] * 4, [RATE] * 4, TRIP)
    plans = [
        Plan((Send(2, 0, 0, 100_000),)),
        Plan((Send(3, 0, 0, 300_000),)),
        Plan((), (Recv(0, 0, 0, 100_000),)),
        Plan((), (Recv(1, 0, 0, 300_000),)),
    ]
    assert simulated(plans, network, 1) == pytest.approx(0.4 + TRIP / 2, rel=1e-3)
    alone = [plans[0], Plan(), plans[2], Plan()]
    assert simulated(alone, network, 1) == pytest.approx(0.1 + TRIP / 2, rel=1e-3)


def test_sends_wait_for_each_other_and_for_what_after_names() -> None:
    there = Plan((Send(0, 0, 0, 100_000, 1),), (Recv(0, 0, 0, 100_000),))
    plans = [Plan((Send(1, 0, 0, 100_000),), (Recv(1, 0, 0, 100_000),)), there]
    assert simulated(plans, uniform(2, RATE, TRIP), 1) == pytest.approx(0.2 + TRIP, rel=1e-3)
    plans[1] = Plan((Send(0, 0, 0, 100_000),), there.recvs)
    assert simulated(plans, uniform(2, RATE, TRIP), 1) == pytest.approx(0.1 + TRIP / 2, rel=1e-3)


@pytest.mark.parametrize(("buffer_bytes", "seconds"), [(0, 0.32), (10_000_000, 0.21)])
def test_a_sender_waits_for_a_receiver_that_is_elsewhere_unless_lanes_hold_its_bytes(
    buffer_bytes: int, seconds: float
) -> None:
    """Slot 2 first receives from slot 1, which is slow; slot 0 has something for slot 2, and then for slot 3."""
    network = of_hosts(range(4), [1e6, 1e5, 1e6, 1e6], [1e7] * 4, 1e-6)
    plans = [
        Plan((Send(2, 0, 0, 110_000), Send(3, 0, 0, 100_000))),
        Plan((Send(2, 0, 0, 11_000),)),
        Plan((), (Recv(1, 0, 0, 11_000), Recv(0, 0, 0, 110_000))),
        Plan((), (Recv(0, 0, 0, 100_000),)),
    ]
    assert simulated(plans, network, 1, buffer_bytes=buffer_bytes) == pytest.approx(seconds, rel=0.01)


def test_plans_that_block_each_other_do_not_end() -> None:
    waiting = Plan((Send(1, 0, 0, 5, 1),), (Recv(1, 0, 0, 5),))
    with pytest.raises(UnfinishedError, match="0 of 1 sends, 0 of 1 receives"):
        simulated([waiting, Plan((Send(0, 0, 0, 5, 1),), (Recv(0, 0, 0, 5),))], uniform(2, RATE), 4)


def test_links_are_divided_fairly() -> None:
    one, other = LINKS
    assert fair([10, 10, 10], [[one], [one], [one, other]], {one: 12, other: 1}) == [5.5, 5.5, 1]
    assert fair([2, 10, 10], [[one], [one], []], {one: 6}) == [2, 4, 10]
    assert fair([], [], {}) == []
    assert fair([3, 3], [[one], [one]], {one: 100}) == [3, 3]
