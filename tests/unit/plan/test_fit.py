"""Fitted plans are right for all ranks and sizes, and the choice follows from the network alone."""

from __future__ import annotations

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import at_every_size, counts
from tests.unit.plan.networks import MBIT, NETWORKS, random_network, small_sizes, two_sites

from covey.lab.network_simulation import simulated
from covey.plan import check, choose
from covey.plan.fit import PLAIN_PLAN, Fitted, compared, fit, plan_of
from covey.plan.moves import first_writes
from covey.plan.network import Network, uniform

DEFAULT = choose.DEFAULT_PLAN_SIZES


@at_every_size
def test_every_plan_that_could_be_chosen_reduces_everything_on_every_rank(size: int) -> None:
    network = random_network(size, seed=size)
    for count in counts(size) if size <= 8 else [size - 1, size + 3]:
        sizes = small_sizes(segment=1 + count % 3)
        for fitted, _ in fit(network, count, 4, sizes):
            plans = [plan_of(fitted, rank, size, count, 4, sizes) for rank in range(size)]
            check.all_reduce(plans, count)
            for plan in plans:
                first_writes(plan)


@in_turn(size=range(2, 13))
@in_turn(nbytes=[4, 4096, 1 << 20, 64 << 20])
def test_equal_links_get_the_plan_that_they_had_before(size: int, nbytes: int) -> None:
    network = uniform(size, 125e6)
    chosen = fit(network, nbytes // 4, 4, DEFAULT)[0].fitted
    for rank in range(size):
        plan = choose.all_reduce(rank, size, nbytes // 4, 4, "stream", None, DEFAULT)
        assert plan_of(chosen, rank, size, nbytes // 4, 4, DEFAULT) == plan


@in_turn(operation=["all_reduce", "broadcast", "reduce"])
def test_what_each_algorithm_would_take_follows_what_the_links_carry(operation: str) -> None:
    size, speed, count = 4, 125e6, 1 << 24
    seconds = 4 * count / speed
    times = dict(compared(operation, uniform(size, speed), 1, count, 4, DEFAULT))
    ways = 2 if operation == "all_reduce" else 1  # to the root, and back
    assert set(times) == set(choose.ALL_REDUCE_PLANS[1:] if operation == "all_reduce" else choose.ROOTED_PLANS)
    assert (size - 1) * seconds <= times["star"] <= 1.1 * ways * (size - 1) * seconds
    assert ways * (size - 1) / size * seconds <= times["ring"] <= 1.3 * ways * seconds
    assert times["direct"] < times["star"]
    assert compared(operation, uniform(17, speed), 1, count, 4, DEFAULT) == ()


def test_ranks_of_one_host_get_the_plan_for_shared_memory() -> None:
    network = uniform(4, 4e9)._replace(hosts=(7,) * 4)
    (only,) = fit(network, 1 << 20, 4, DEFAULT)
    for rank in range(4):
        plan = choose.all_reduce(rank, 4, 1 << 20, 4, "ring", None, DEFAULT)
        assert plan_of(only.fitted, rank, 4, 1 << 20, 4, DEFAULT) == plan


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_small_arrays_on_near_hosts_keep_their_plan(network: Network) -> None:
    assert fit(network, 16, 4, DEFAULT)[0].why == PLAIN_PLAN


def test_small_arrays_between_distant_sites_cross_once() -> None:
    network = two_sites((0, 1, 1, 0, 1, 0, 0), round_trip=0.05)
    first, *others = fit(network, 16, 4, DEFAULT)
    plain = next(each for each in others if each.why == PLAIN_PLAN)
    assert plain.fitted.algorithm == "doubling"
    assert first.fitted.seconds < 0.055 < 0.07 < plain.fitted.seconds


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_the_first_plan_is_the_fastest_or_the_plain_one_and_the_others_follow_by_time(network: Network) -> None:
    first, *others = fit(network, 1 << 20, 4, DEFAULT)
    times = [each.fitted.seconds for each in others]
    assert times == sorted(times)
    plain = next(each for each in (first, *others) if each.fitted[:4] == Fitted("ring", (), (), (), 0.0)[:4])
    if first is not plain:
        assert first.fitted.seconds * 1.05 <= plain.fitted.seconds
        assert first.fitted.seconds <= min(times) * (1.08 if first.fitted.algorithm == "ring" else 1)
    else:
        assert min(times) * 1.08 * 1.05 > plain.fitted.seconds


@pytest.mark.parametrize(("size", "kib"), [(3, 1024), (4, 8192), (5, 512), (5, 8192), (8, 512), (8, 2048), (16, 512)])
def test_equal_links_between_distant_hosts_get_the_plan_that_the_simulator_finds_best(size: int, kib: int) -> None:
    network, count = uniform(size, 100 * MBIT, round_trip=0.2), kib << 8
    first, *others = fit(network, count, 4, DEFAULT)

    def taken(fitted: Fitted) -> float:
        return simulated([plan_of(fitted, rank, size, count, 4, DEFAULT) for rank in range(size)], network, 4)

    plain = next(each for each in (first, *others) if each.why == PLAIN_PLAN)
    assert plain.fitted.algorithm == "ring"
    assert (first.why != PLAIN_PLAN) == ((size, kib) != (5, 8192))
    real = taken(first.fitted)
    assert real == pytest.approx(first.fitted.seconds, rel=0.25)
    assert real <= (1.05 if size < 4 else 1.0) * taken(plain.fitted)
    for other in others[:2]:
        assert real <= 1.15 * taken(other.fitted)


def test_many_distant_hosts_get_few_rounds_for_medium_arrays_and_few_bytes_for_large_ones() -> None:
    network = uniform(32, 100 * MBIT, round_trip=0.2)
    assert [fit(network, mib << 18, 4, DEFAULT)[0].fitted.algorithm for mib in (1, 64)] == ["doubling", "halving"]


def test_equal_links_between_hosts_that_are_near_keep_their_plan() -> None:
    assert fit(uniform(8, 100 * MBIT, round_trip=1.9e-3), 1 << 18, 4, DEFAULT)[0].why == PLAIN_PLAN
    assert fit(uniform(8, 100 * MBIT, round_trip=2.1e-2), 1 << 18, 4, DEFAULT)[0].why != PLAIN_PLAN
