"""Plans of compressed sums that fit a network: right, chosen by their time, and a rank encodes each range once."""

from __future__ import annotations

from tests.support.in_turn import in_turn
from tests.unit.plan.networks import MBIT, NETWORKS, random_network, uneven

from covey.plan import check, choose
from covey.plan.coded import CodedArray, coded, coded_plan_of, fit_coded
from covey.plan.cost import CodecPace
from covey.plan.fit import PLAIN_PLAN
from covey.plan.network import Network, uniform

SIZES = choose.DEFAULT_PLAN_SIZES
LARGE = CodedArray(units=1 << 16, unit_bytes=260, segment=1000)
FAST, SLOW = CodecPace(1e-7, 1e-7), CodecPace(2e-4, 2e-4)


@in_turn(network=[*NETWORKS.values(), uniform(6, 100 * MBIT, round_trip=0.2), random_network(13, 1)])
def test_every_plan_reduces_everything_and_encodes_each_range_once(network: Network) -> None:
    size, array = len(network.hosts), CodedArray(units=37, unit_bytes=260, segment=3)
    for fitted, _ in fit_coded(network, array, FAST, SIZES):
        plans = [coded_plan_of(fitted, slot, size, array, SIZES) for slot in range(size)]
        check.all_reduce(plans, array.units)
        for plan in plans:
            tasks = coded(plan, (array.units,), 1, lambda units: units, is_copy=False).encodes
            encoded = sorted(unit for task in tasks if task is not None for unit in range(task.start, task.stop))
            assert encoded == list(range(array.units)), "the residual of a rank is one array"


def test_uneven_links_get_an_order_and_shares_and_equal_ones_keep_their_plan() -> None:
    first, *others = fit_coded(uneven(1000, 100, 1000, 300), LARGE, FAST, SIZES)
    assert first.fitted.shares[1] == max(first.fitted.shares)
    plain = next(each for each in others if each.why == PLAIN_PLAN)
    assert first.fitted.seconds * 1.3 < plain.fitted.seconds
    assert fit_coded(uniform(4, 1000 * MBIT), LARGE, FAST, SIZES)[0].why == PLAIN_PLAN


def test_a_codec_that_is_slower_than_the_links_makes_all_plans_slower() -> None:
    network = uneven(1000, 1000, 300, 100)
    fast, slow = ({each.why: each.fitted.seconds for each in fit_coded(network, LARGE, pace, SIZES)}
                  for pace in (FAST, SLOW))  # fmt: skip
    for why, seconds in fast.items():
        assert slow[why] > seconds + LARGE.units * SLOW.encode
