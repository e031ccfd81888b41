"""The order of a ring: which slot sends to which, so that the slowest hop is as fast as possible.

A ring is as slow as its slowest hop, since all hops carry nearly the same. Among orders with the fastest slowest hop,
the one that crosses fewest times between sites and hosts is best, since what crosses shares a link; then the one with
the fastest hops, which gathers slow slots in one stretch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.plan.network import Network

MOST_EXACT: Final = 12
"""Slots up to which all orders are compared, by dynamic programming: 2^11 sets of 11 slots."""
MOST_IMPROVED: Final = 64
"""Slots up to which a good order is improved by reversing stretches of it."""
SITE, HOST = 1000.0, 10.0
"""What it costs to cross between sites or hosts, in hops of the slowest speed: more than faster hops can save."""


@lru_cache(maxsize=64)
def best(network: Network) -> tuple[int, ...]:
    """Return the slots in the order of the ring, from slot 0 on; the given order unless another is better."""
    size = len(network.hosts)
    given = tuple(range(size))
    if size < 3:
        return given
    found = [given, grouped(network)]
    if size <= MOST_EXACT:
        if not is_even(network):
            found.append(_exact(network))
    elif size <= MOST_IMPROVED:
        found.append(_improved(network, found[1]))
    return min(found, key=lambda order: _quality(network, order))


def is_even(network: Network) -> bool:
    """Return whether all hosts are at one site, have one slot each, and have equal links."""
    size = len(network.hosts)
    if len(set(network.hosts)) < size or len(set(network.sites)) > 1:
        return False
    speeds = {network.rates[i][j] for i in range(size) for j in range(size) if i != j}
    return len(speeds | set(network.up) | set(network.down)) <= 1


def grouped(network: Network) -> tuple[int, ...]:
    """Return the slots site by site and host by host, faster ones first."""

    def key(slot: int) -> tuple[int, float, int, int]:
        speed = min(network.up[slot], network.down[slot])
        return network.sites.index(network.sites[slot]), -speed, network.hosts.index(network.hosts[slot]), slot

    return _from_zero(sorted(range(len(network.hosts)), key=key))


def hop_speeds(network: Network, order: Sequence[int]) -> list[float]:
    """Return the speed of each hop, from order[p] to the next, while all hops are used at the same time."""
    hops = list(pairwise([*order, order[0]]))
    leaving: dict[int, int] = {}
    entering: dict[int, int] = {}
    crossing: dict[tuple[int, int], int] = {}
    for i, j in hops:
        if network.hosts[i] != network.hosts[j]:
            leaving[network.hosts[i]] = leaving.get(network.hosts[i], 0) + 1
            entering[network.hosts[j]] = entering.get(network.hosts[j], 0) + 1
            sites = network.sites[i], network.sites[j]
            crossing[sites] = crossing.get(sites, 0) + 1
    speeds = []
    for i, j in hops:
        speed = network.rates[i][j]
        if network.hosts[i] != network.hosts[j]:
            a, b = network.sites[i], network.sites[j]
            speed = min(
                speed,
                network.up[i] / leaving[network.hosts[i]],
                network.down[j] / entering[network.hosts[j]],
                network.trunks[a][b] / crossing[a, b],
            )
        speeds.append(speed)
    return speeds


def _quality(network: Network, order: Sequence[int]) -> tuple[float, float]:
    """Return what is to be small: the seconds per byte of the slowest hop, then the cost of all."""
    slowest = min(hop_speeds(network, order))
    return 1 / slowest, math.fsum(_cost(network, slowest, i, j) for i, j in pairwise([*order, order[0]]))


def _cost(network: Network, slowest: float, i: int, j: int) -> float:
    crossing = SITE * (network.sites[i] != network.sites[j]) + HOST * (network.hosts[i] != network.hosts[j])
    return crossing + min(1.0, slowest / network.rates[i][j]) + network.round_trips[i][j]


def _from_zero(order: Sequence[int]) -> tuple[int, ...]:
    at = order.index(0)
    return (*order[at:], *order[:at])


def _exact(network: Network) -> tuple[int, ...]:
    """Return the cheapest order among those whose slowest pair is as fast as possible."""
    size = len(network.hosts)
    speeds = sorted({network.rates[i][j] for i in range(size) for j in range(size) if i != j})
    low, high = 0, len(speeds) - 1  # the slowest pair of all is fast enough for any order
    while low < high:
        middle = (low + high + 1) // 2
        if _is_possible(network, speeds[middle]):
            low = middle
        else:
            high = middle - 1
    return _cheapest(network, speeds[low])


def _is_possible(network: Network, least: float) -> bool:
    """Return whether a ring exists all hops of which have at least this speed."""
    size = len(network.hosts)
    onward = [sum(1 << j for j in range(size) if i != j and network.rates[i][j] >= least) for i in range(size)]
    back = sum(1 << i for i in range(1, size) if onward[i] & 1)
    ends = [0] * (1 << size)  # by set of slots with slot 0: where a path from slot 0 through all of them can end
    ends[1] = 1
    for visited in range(1, 1 << size, 2):
        for i in range(size):
            if ends[visited] >> i & 1:
                for j in range(1, size):
                    if onward[i] >> j & 1 and not visited >> j & 1:
                        ends[visited | 1 << j] |= 1 << j
    return bool(ends[-1] & back)


def _cheapest(network: Network, least: float) -> tuple[int, ...]:
    """Return the ring with the smallest sum of costs, of hops with at least this speed (Held and Karp, 1962)."""
    size = len(network.hosts)
    onward = [
        [(j, _cost(network, least, i, j)) for j in range(1, size) if i != j and network.rates[i][j] >= least]
        for i in range(size)
    ]
    paths: list[dict[int, tuple[float, int]]] = [{} for _ in range(1 << size)]  # end: cost, and the slot before it
    paths[1] = {0: (0.0, -1)}
    for visited in range(1, 1 << size, 2):
        for i, (cost, _) in paths[visited].items():
            for j, more in onward[i]:
                if not visited >> j & 1:
                    longer = paths[visited | 1 << j]
                    if j not in longer or cost + more < longer[j][0]:
                        longer[j] = cost + more, i
    visited = (1 << size) - 1
    closing = [
        (cost + _cost(network, least, i, 0), i)
        for i, (cost, _) in paths[visited].items()
        if network.rates[i][0] >= least
    ]
    order = []
    at = min(closing)[1]
    while at >= 0:
        order.append(at)
        visited, at = visited & ~(1 << at), paths[visited][at][1]
    return tuple(reversed(order))


def _improved(network: Network, order: tuple[int, ...]) -> tuple[int, ...]:
    """Reverse stretches of a ring that begin or end at its slowest hop, as long as that makes it better."""
    size = len(order)
    quality = _quality(network, order)
    for _ in range(size):
        speeds = hop_speeds(network, order)
        at = speeds.index(min(speeds))
        turned = (*order[at + 1 :], *order[: at + 1])  # the slowest hop is now from the last slot to the first
        tried = [(*reversed(turned[:end]), *turned[end:]) for end in range(2, size)]
        better, found = min((_quality(network, each), each) for each in tried)
        if better >= quality:
            break
        order, quality = _from_zero(found), better
    return order
