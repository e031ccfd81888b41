"""What ranks measure becomes a network: the same on all of them, and not that of the noise."""

from __future__ import annotations

import math
import random

import pytest
from tests.unit.plan.networks import MBIT, NETWORKS, random_network, two_sites

from covey.lab.network_simulation import measured
from covey.plan import fit, order
from covey.plan.choose import DEFAULT_PLAN_SIZES
from covey.plan.network import Flow, Network, infer, of_hosts, uniform


def seen(network: Network, noise: float = 0.0, seed: int = 0) -> Network:
    """Return what is inferred from measurements of a network that err by up to `noise`."""
    rng = random.Random(seed)
    rounds = [
        [flow._replace(bytes_per_second=flow.bytes_per_second * rng.uniform(1 - noise, 1 + noise)) for flow in flows]
        for flows in measured(network)
    ]
    trips = [[trip * rng.uniform(1 - noise, 1 + noise) for trip in row] for row in network.round_trips]
    return infer(network.hosts, rounds, trips)


@pytest.mark.parametrize("size", [3, 4, 8, 17])
def test_equal_links_that_were_measured_inexactly_are_equal(size: int) -> None:
    for seed in range(5):
        network = seen(uniform(size, 1000 * MBIT), noise=0.05, seed=seed)
        assert order.is_even(network)
        plain = fit.fit(network, 1 << 20, 4, DEFAULT_PLAN_SIZES)[0].fitted
        assert (plain.algorithm, plain.order, plain.shares, plain.groups) == ("ring", (), (), ())


@pytest.mark.parametrize("network", [NETWORKS["four uneven"], NETWORKS["asymmetric"], NETWORKS["mixed"]])
def test_slow_links_of_hosts_are_found_and_are_no_sites(network: Network) -> None:
    for seed in range(5):
        found = seen(network, noise=0.04, seed=seed)
        assert set(found.sites) == {0}
        for wanted, got in ((network.up, found.up), (network.down, found.down)):
            assert got == pytest.approx(wanted, rel=0.15)
        for wanted, got in zip(network.rates, found.rates, strict=True):
            assert got == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("sites", [(0, 1) * 4, (0, 0, 0, 1, 1, 1), (0, 0, 1, 0, 0, 1, 1)])
def test_sites_are_found_by_what_lies_between_them(sites: tuple[int, ...]) -> None:
    network = two_sites(sites)
    found = seen(network, noise=0.04)
    assert found.sites == sites
    assert found.trunks[0][1] == pytest.approx(100 * MBIT, rel=0.15)
    assert found.trunks[1][0] == pytest.approx(100 * MBIT, rel=0.15)
    assert found.up == pytest.approx(network.up, rel=0.15)
    # A flow that crosses alone has the whole trunk, also if it was only measured beside others.
    rates = [found.rates[i][j] for i, a in enumerate(sites) for j, b in enumerate(sites) if a != b]
    assert max(rates) <= 115 * MBIT
    if sites == (0, 0, 0, 1, 1, 1):  # only there does a round have one flow each way
        assert min(rates) >= 85 * MBIT


def test_sites_are_found_by_round_trips() -> None:
    network = two_sites((0, 0, 1, 1, 1), trunk=1000, round_trip=0.05)
    assert seen(network, noise=0.2).sites == (0, 0, 1, 1, 1)
    assert seen(two_sites((0, 0, 1, 1, 1), trunk=1000, round_trip=0.0015)).sites == (0,) * 5
    assert seen(uniform(5, 10 * MBIT, round_trip=0.08), noise=0.2).sites == (0,) * 5


def test_round_trips_that_one_end_took_longer_for_make_no_sites() -> None:
    """A machine that had other work between the first and the last byte measures more than there is, never less."""
    network = uniform(4, 600 * MBIT, round_trip=6e-4)
    trips = [list(row) for row in network.round_trips]
    trips[2][0] = trips[3][1] = 6.5e-3
    found = infer(network.hosts, measured(network), trips)
    assert found.sites == (0,) * 4
    assert found.round_trips == seen(network).round_trips
    trips[0][2] = trips[1][3] = math.inf  # nothing else is known of these
    assert max(map(max, infer(network.hosts, measured(network), trips).round_trips)) == pytest.approx(6.5e-3)


def test_slots_of_one_host_share_its_link() -> None:
    found = seen(NETWORKS["two hosts"], noise=0.04)
    assert found.up == pytest.approx((1000 * MBIT,) * 8, rel=0.15)
    assert found.rates[0][7] == pytest.approx(1000 * MBIT, rel=0.15)
    assert found.rates[0][1] > 10 * found.rates[0][7]
    assert set(found.sites) == {0}
    alone = seen(of_hosts((3, 3, 3), [math.inf] * 3, [math.inf] * 3))
    assert alone.up == alone.down == (math.inf,) * 3


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_measurements_does_not_matter(seed: int) -> None:
    network = random_network(9, seed)
    rounds = measured(network)
    first = infer(network.hosts, rounds, network.round_trips)
    rng = random.Random(seed)
    rng.shuffle(rounds)
    for flows in rounds:
        rng.shuffle(flows)
    assert infer(network.hosts, rounds, network.round_trips) == first
    hash(first)


def test_what_was_not_measured_or_cannot_be_is_assumed() -> None:
    trips = [[0.0, math.nan, 1.0], [math.inf, 0.0, 1e-4], [0.0, 1e-4, 0.0]]
    nothing: list[list[Flow]] = []
    empty: list[list[Flow]] = [[]]
    wrong = [[Flow(0, 1, math.nan), Flow(1, 2, -5.0)]], [[Flow(0, 1, math.inf), Flow(2, 0, 1e308)]]
    for rounds in (nothing, empty, *wrong):
        network = infer((0, 1, 2), rounds, trips)
        assert all(rate > 0 for row in network.rates for rate in row)
        assert all(math.isfinite(trip) for row in network.round_trips for trip in row)
        assert math.isfinite(fit.fit(network, 1000, 4, DEFAULT_PLAN_SIZES)[0].fitted.seconds)
    assert infer((), nothing, []).hosts == ()
    assert fit.fit(infer((0,), nothing, [[0.0]]), 1000, 4, DEFAULT_PLAN_SIZES)[0].fitted.seconds == 0


def test_measurements_lead_to_the_plan_for_the_real_network() -> None:
    for name in ("four uneven", "asymmetric", "two sites", "two hosts"):
        network = NETWORKS[name]
        ideal = fit.fit(network, 1 << 22, 4, DEFAULT_PLAN_SIZES)[0].fitted
        for seed in range(3):
            found = fit.fit(seen(network, noise=0.04, seed=seed), 1 << 22, 4, DEFAULT_PLAN_SIZES)[0].fitted
            real = fit.predicted(found, network, 1 << 22, 4, DEFAULT_PLAN_SIZES)
            assert real <= 1.1 * ideal.seconds, (name, found)
            assert found.seconds == pytest.approx(real, rel=0.25)
