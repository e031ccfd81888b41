"""Networks that tests fit plans to."""

from __future__ import annotations

import math
import random

from covey.plan.choose import DEFAULT_PLAN_SIZES, PlanSizes
from covey.plan.network import Network, of_hosts, uniform

MBIT = 125_000.0
"""Bytes per second."""


def uneven(*mbits: float) -> Network:
    """Hosts with links of these speeds at one site."""
    speeds = [mbit * MBIT for mbit in mbits]
    return of_hosts(range(len(mbits)), speeds, speeds)


def two_sites(sites: tuple[int, ...], lan: float = 1000, trunk: float = 100, round_trip: float = 1e-4) -> Network:
    """Hosts at two sites, with a thin link between these."""
    slots = range(len(sites))
    speeds = [lan * MBIT] * len(sites)
    one = of_hosts(slots, speeds, speeds)
    between = trunk * MBIT
    return one._replace(
        rates=tuple(
            tuple(min(one.rates[i][j], math.inf if sites[i] == sites[j] else between) for j in slots) for i in slots
        ),
        round_trips=tuple(
            tuple(one.round_trips[i][j] if sites[i] == sites[j] else round_trip for j in slots) for i in slots
        ),
        sites=sites,
        trunks=((math.inf, between), (between, math.inf)),
    )


def random_network(size: int, seed: int) -> Network:
    """Hosts and sites of unequal sizes, and links of unequal speeds."""
    rng = random.Random(seed)
    hosts = sorted(rng.randrange(max(1, size * 2 // 3)) for _ in range(size))
    rng.shuffle(hosts)
    site_of = {host: rng.randrange(2) for host in sorted(set(hosts))}
    up, down = ({host: rng.choice([100, 300, 1000]) * MBIT for host in site_of} for _ in range(2))
    one = of_hosts(hosts, [up[host] for host in hosts], [down[host] for host in hosts])
    numbers = [site_of[host] for host in hosts]
    sites = tuple(list(dict.fromkeys(numbers)).index(number) for number in numbers)
    if len(set(sites)) == 1:
        return one
    thin = two_sites(sites, trunk=rng.choice([30, 200]))
    slots = range(size)
    rates = tuple(tuple(min(one.rates[i][j], thin.rates[i][j]) for j in slots) for i in slots)
    local = tuple(tuple(one.rates[i][j] if hosts[i] == hosts[j] else rates[i][j] for j in slots) for i in slots)
    return one._replace(rates=local, sites=sites, trunks=thin.trunks)


def small_sizes(segment: int) -> PlanSizes:
    """Sizes with which a few elements of four bytes are several transfers."""
    return DEFAULT_PLAN_SIZES._replace(
        segment_bytes=4 * segment, cached_segment_bytes=4 * segment, exchange_bytes=0, doubling_bytes=0
    )


NETWORKS = {
    "equal": uniform(8, 1000 * MBIT),
    "four uneven": uneven(1000, 1000, 300, 100),
    "asymmetric": of_hosts(range(4), [1000 * MBIT] * 3 + [100 * MBIT], [1000 * MBIT] * 4),
    "two sites": two_sites((0, 1) * 4),
    "two sites, unequal": two_sites((0, 0, 1, 0, 0, 1, 1)),
    "two hosts": of_hosts((0,) * 4 + (1,) * 4, [1000 * MBIT] * 8, [1000 * MBIT] * 8),
    "random": random_network(11, 3),
    "mixed": uneven(*(1000, 100, 300) * 3),
}
