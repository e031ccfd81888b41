from __future__ import annotations

import itertools
import random

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.networks import MBIT, NETWORKS, random_network, two_sites, uneven

from covey.plan import order
from covey.plan.network import Network, uniform


def matrix(size: int, seed: int) -> Network:
    """A network whose pairs have random speeds, each direction its own."""
    rng = random.Random(seed)
    one = uniform(size, 1000 * MBIT)
    rates = tuple(
        tuple(one.rates[i][j] if i == j else rng.choice([100, 200, 500, 1000]) * MBIT for j in range(size))
        for i in range(size)
    )
    return one._replace(rates=rates)


def crossings(network: Network, ring: tuple[int, ...]) -> int:
    return sum(network.sites[i] != network.sites[j] for i, j in itertools.pairwise([*ring, ring[0]]))


@in_turn(seed=range(12))
def test_no_other_order_has_a_faster_slowest_hop(seed: int) -> None:
    for network in (matrix(3 + seed % 4, seed), random_network(3 + seed % 4, seed)):
        found = order.best(network)
        assert sorted(found) == list(range(len(network.hosts)))
        assert found[0] == 0
        slowest = min(order.hop_speeds(network, found))
        others = ((0, *rest) for rest in itertools.permutations(range(1, len(network.hosts))))
        assert slowest == max(min(order.hop_speeds(network, other)) for other in others)


@pytest.mark.parametrize("size", [8, 12, 16, 40, 100])
def test_a_ring_through_two_sites_crosses_once_each_way(size: int) -> None:
    network = two_sites(tuple(slot % 2 for slot in range(size)))
    assert crossings(network, tuple(range(size))) == size
    found = order.best(network)
    assert sorted(found) == list(range(size))
    assert crossings(network, found) == 2
    assert min(order.hop_speeds(network, found)) == 100 * MBIT


def test_slots_of_a_host_follow_each_other() -> None:
    network = NETWORKS["two hosts"]._replace(hosts=(0, 1) * 4)
    network = network._replace(
        rates=tuple(tuple(4e9 if (i - j) % 2 == 0 else 1000 * MBIT for j in range(8)) for i in range(8))
    )
    assert min(order.hop_speeds(network, range(8))) == 250 * MBIT
    assert min(order.hop_speeds(network, order.best(network))) == 1000 * MBIT


def test_equal_links_keep_the_order_of_the_slots() -> None:
    for size in (3, 8, 12, 13, 33, 80):
        assert order.best(uniform(size, 5e6)) == tuple(range(size))


@pytest.mark.parametrize("size", [13, 20, 33])
def test_beyond_twelve_the_order_is_good(size: int) -> None:
    """In these networks a ring exists that uses only the fastest pairs: it was laid before the others were slowed."""
    rng = random.Random(size)
    ring = [0, *rng.sample(range(1, size), size - 1)]
    hops = set(itertools.pairwise([*ring, 0]))
    one = uneven(*[1000] * size)
    rates = tuple(
        tuple(one.rates[i][j] if i == j or (i, j) in hops or rng.random() < 0.6 else 100 * MBIT for j in range(size))
        for i in range(size)
    )
    network = one._replace(rates=rates)
    slow = sum(speed < 1000 * MBIT for speed in order.hop_speeds(network, order.best(network)))
    assert slow < sum(speed < 1000 * MBIT for speed in order.hop_speeds(network, range(size)))
