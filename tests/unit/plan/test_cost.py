"""Predicted times: what no plan can beat, and what a simulation of every event says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.networks import MBIT, NETWORKS, random_network, two_sites, uneven

from covey.lab.network_simulation import simulated
from covey.plan import cost, estimate, fit, ring
from covey.plan.choose import DEFAULT_PLAN_SIZES
from covey.plan.network import Network, of_hosts, uniform

if TYPE_CHECKING:
    from covey.plan.moves import Plan

MIB = 1 << 20


def plans_of(fitted: fit.Fitted, network: Network, nbytes: int) -> list[Plan]:
    size = len(network.hosts)
    return [fit.plan_of(fitted, slot, size, nbytes // 4, 4, DEFAULT_PLAN_SIZES) for slot in range(size)]


def test_the_bound_counts_each_host_and_all_together() -> None:
    assert cost.bound(uniform(4, 100.0), 600) == 9  # 2 * 3/4 of 600 at 100
    assert cost.bound(uneven(1000, 1000, 300, 100), 64 * MIB) == 64 * MIB / (100 * MBIT)
    fast = of_hosts(range(3), [100.0, 100.0, 100.0], [100.0, 100.0, 10.0])
    assert cost.bound(fast, 600) == 60
    assert cost.bound(of_hosts(range(3), [30.0, 100.0, 100.0], [100.0] * 3), 600) == 20
    assert cost.bound(two_sites((0, 1) * 4, trunk=100), MIB) == MIB / (100 * MBIT)
    assert cost.bound(NETWORKS["two hosts"], MIB) == MIB / (1000 * MBIT)
    assert cost.bound(uniform(1, 100.0), 600) == 0


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_no_prediction_is_below_the_bound(network: Network) -> None:
    for nbytes in (MIB, 16 * MIB):
        for fitted, _ in fit.fit(network, nbytes // 4, 4, DEFAULT_PLAN_SIZES):
            assert fitted.seconds >= 0.999 * cost.bound(network, nbytes)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_chosen_and_plain_plans_take_the_predicted_time(network: Network) -> None:
    for nbytes in (MIB, 4 * MIB):
        found = fit.fit(network, nbytes // 4, 4, DEFAULT_PLAN_SIZES)
        plain = next(each for each in found if each.why == "for equal links")
        for fitted in {found[0].fitted, plain.fitted}:
            time = simulated(plans_of(fitted, network, nbytes), network, 4)
            assert fitted.seconds == pytest.approx(time, rel=0.15)


@pytest.mark.parametrize(
    ("name", "gain"),
    [("four uneven", 1.35), ("asymmetric", 1.4), ("two sites", 5.5), ("mixed", 1.5), ("two hosts", 1.6)],
)
def test_uneven_networks_come_near_the_bound(name: str, gain: float) -> None:
    """Of 64 MiB; plans along trees are simulated for 8 MiB, and longer ones take proportionally longer."""
    network = NETWORKS[name]
    chosen, *others = fit.fit(network, 16 * MIB, 4, DEFAULT_PLAN_SIZES)
    nbytes = 64 * MIB if chosen.fitted.algorithm == "ring" else 8 * MIB
    time = simulated(plans_of(chosen.fitted, network, nbytes), network, 4)
    assert time <= cost.bound(network, nbytes) / 0.85
    plain = next(each.fitted for each in others if each.why == "for equal links")
    assert simulated(plans_of(plain, network, nbytes), network, 4) >= gain * time
    assert chosen.fitted.seconds == pytest.approx(time * 64 * MIB / nbytes, rel=0.15)


@in_turn(seed=range(16))
def test_on_any_network_the_chosen_plan_takes_the_predicted_time_and_no_longer_than_the_plain_one(seed: int) -> None:
    network = random_network(3 + seed % 9, seed)
    found = fit.fit(network, MIB // 4, 4, DEFAULT_PLAN_SIZES)
    plain = next(each.fitted for each in found if each.why == fit.PLAIN_PLAN)
    time = simulated(plans_of(found[0].fitted, network, MIB), network, 4)
    assert found[0].fitted.seconds == pytest.approx(time, rel=0.25)
    assert time <= 1.03 * simulated(plans_of(plain, network, MIB), network, 4)


def test_equal_links_are_used_as_before() -> None:
    network = NETWORKS["equal"]
    chosen = fit.fit(network, 16 * MIB, 4, DEFAULT_PLAN_SIZES)[0].fitted
    plain = [ring.all_reduce(rank, 8, 16 * MIB, DEFAULT_PLAN_SIZES.segment(4)) for rank in range(8)]
    assert plans_of(chosen, network, 64 * MIB) == plain
    assert simulated(plain, network, 4) <= 1.03 * cost.bound(network, 64 * MIB)


@pytest.mark.parametrize("name", ["equal", "four uneven", "asymmetric", "two sites", "two hosts", "mixed"])
def test_estimates_from_sums_agree_with_what_the_moves_say(name: str) -> None:
    network = NETWORKS[name]
    for nbytes in (MIB, 64 * MIB):
        for fitted, _ in fit.fit(network, nbytes // 4, 4, DEFAULT_PLAN_SIZES):
            if fitted.algorithm == "ring" or fitted.shares:
                found = fit.estimated(fitted, network, nbytes, DEFAULT_PLAN_SIZES)
                assert found == pytest.approx(fitted.seconds, rel=0.2), fitted


def test_hundreds_of_slots_are_fitted() -> None:
    network = two_sites(tuple(slot % 2 for slot in range(300)))
    chosen, *others = fit.fit(network, 16 * MIB, 4, DEFAULT_PLAN_SIZES)
    assert chosen.fitted.algorithm == "levels"
    assert chosen.fitted.seconds < 1.3 * cost.bound(network, 64 * MIB)
    assert all(math.isfinite(each.fitted.seconds) for each in others)


def test_a_chain_of_small_transfers_takes_its_latency() -> None:
    network = uniform(8, 1000 * MBIT, round_trip=0.02)
    plans = [ring.all_reduce(rank, 8, 8, 1) for rank in range(8)]
    assert cost.seconds(plans, network, 4) == pytest.approx(14 * (0.01 + cost.TRANSFER_SECONDS), rel=0.01)
    assert estimate.ring(network, range(8), [1] * 8, 32, 4) == pytest.approx(cost.seconds(plans, network, 4), rel=0.01)
