"""What is known of the links between ranks: the agreed figures from which a plan is fitted.

Every rank infers the network from the same figures, perhaps on different processors, and must get the same bits. So
nothing here depends on the order of a set, sums are exact (`math.fsum`), and there is no logarithm or power.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIKE: Final = 1.2
"""Speeds within this factor become one speed: measurements differ by a few per cent, plans must not."""
LIKE_TRIPS: Final = 2.0
"""The same for round trips, which vary more and matter less."""
APART: Final = 3.0
"""Two hosts are at different sites if each could send or receive so many times faster than they do to each other."""
FAR: Final = 4.0
"""Two hosts are at different sites if another is so many times nearer to one of them ..."""
NEAR_TRIP_SECONDS: Final = 2e-3
"""... but not if their round trip is this short: then latency is no reason to avoid the way between them."""
LEAST_RATE: Final = 1e3
"""Bytes per second. No link is slower, so that no division can fail and no time is endless."""
LEAST_TRIP: Final = 1e-6
UNKNOWN_RATE: Final = 1.25e8
"""Bytes a second of links of which nothing is known: 1 Gbit/s."""
MEMORY_RATE: Final = 4e9
"""Between ranks of one host, if it was not measured."""

Matrix = tuple[tuple[float, ...], ...]


class Network(NamedTuple):
    """What is known of the links between the slots of an attempt, in bytes per second and seconds; equal on all."""

    hosts: tuple[int, ...]
    """Slots with equal numbers are on one host: they share memory or the loopback interface."""
    rates: Matrix
    """rates[i][j]: what slot i sends to slot j while neither does anything else; infinite for i == j."""
    up: tuple[float, ...]
    """What the host of a slot can send to other hosts in all; infinite if there is no other host."""
    down: tuple[float, ...]
    """What the host of a slot can receive from other hosts in all."""
    round_trips: Matrix
    sites: tuple[int, ...]
    """Slots with equal numbers are at one site. Between sites, links are shared."""
    trunks: Matrix
    """trunks[a][b]: what all slots of site a together send to site b; infinite for a == b."""


class Flow(NamedTuple):
    """One measured transfer."""

    source: int
    target: int
    bytes_per_second: float


def uniform(size: int, rate: float, round_trip: float = 1e-4) -> Network:
    """Return a network of `size` hosts at one site, all links of which are equal."""
    return of_hosts(tuple(range(size)), [rate] * size, [rate] * size, round_trip)


def of_hosts(hosts: Sequence[int], up: Sequence[float], down: Sequence[float], round_trip: float = 1e-4) -> Network:
    """Return the network of hosts at one site that differ only in their own link; `up` and `down` are by slot."""
    slots = range(len(hosts))

    def rate(i: int, j: int) -> float:
        return math.inf if i == j else MEMORY_RATE if hosts[i] == hosts[j] else min(up[i], down[j])

    trips = tuple(tuple(0.0 if i == j else 1e-5 if hosts[i] == hosts[j] else round_trip for j in slots) for i in slots)
    rates = tuple(tuple(rate(i, j) for j in slots) for i in slots)
    return Network(tuple(hosts), rates, tuple(up), tuple(down), trips, (0,) * len(hosts), ((math.inf,),))


def infer(hosts: Sequence[int], rounds: Sequence[Sequence[Flow]], round_trips: Sequence[Sequence[float]]) -> Network:
    """Make a network of measured rounds.

    In a round every slot sends to one other and receives from one other at the same time (rotation k: slot i sends to
    slot (i + k) % n), so each host's access link carries at most one flow per slot that is on it. A pair that
    was never measured is taken to be as fast as the links of both ends allow.
    """
    size = len(hosts)
    rounds = [[_bounded(flow) for flow in sorted(flows)] for flows in rounds]
    seen = _Rates(hosts, rounds)
    trips = _trips(hosts, round_trips)
    sites = _sites(hosts, seen, trips)
    best, trunks = _trunks(sites, rounds)
    levels = _levels([*seen.known(), *seen.up.values(), *seen.down.values(), *trunks.values()], LIKE)
    within = _levels(seen.local.values(), LIKE)

    def rate(i: int, j: int) -> float:
        if i == j:
            return math.inf
        if hosts[i] == hosts[j]:
            return within.get(seen.local.get((i, j), 0.0), MEMORY_RATE)
        access = min(seen.up_of(hosts[i]), seen.down_of(hosts[j]))
        between = sites[i], sites[j]
        measured = seen.between.get((hosts[i], hosts[j]))
        if measured is None:
            measured = min(access, best.get(between, access))
        elif sites[i] != sites[j]:
            measured = max(measured, min(access, best[between]))  # a flow alone is not held up by those beside it
        return levels.get(measured, measured)

    several = len(set(hosts)) > 1
    up = tuple(_level(levels, seen.up_of(host)) if several else math.inf for host in hosts)
    down = tuple(_level(levels, seen.down_of(host)) if several else math.inf for host in hosts)
    number = max(sites, default=0) + 1
    return Network(
        hosts=tuple(hosts),
        rates=tuple(tuple(rate(i, j) for j in range(size)) for i in range(size)),
        up=up,
        down=down,
        round_trips=trips,
        sites=sites,
        trunks=tuple(
            tuple(
                math.inf if a == b else _level(levels, trunks.get((a, b), _access(sites, up, down, a, b)))
                for b in range(number)
            )
            for a in range(number)
        ),
    )


class _Rates:
    """What was measured between hosts, and what each host was seen to send and to receive."""

    def __init__(self, hosts: Sequence[int], rounds: Sequence[Sequence[Flow]]) -> None:
        self.local: dict[tuple[int, int], float] = {}
        """The fastest flow from slot to slot of one host."""
        self.between: dict[tuple[int, int], float] = {}
        """The fastest flow from host to host: slots of one host have the same way to another."""
        self.up: dict[int, float] = {}
        self.down: dict[int, float] = {}
        for flows in rounds:
            out: dict[int, list[float]] = {}
            into: dict[int, list[float]] = {}
            for source, target, speed in flows:
                here, there = hosts[source], hosts[target]
                if here == there:
                    self.local[source, target] = max(self.local.get((source, target), 0.0), speed)
                else:
                    self.between[here, there] = max(self.between.get((here, there), 0.0), speed)
                    out.setdefault(here, []).append(speed)
                    into.setdefault(there, []).append(speed)
            for table, sums in ((self.up, out), (self.down, into)):
                for host, speeds in sums.items():
                    table[host] = max(table.get(host, 0.0), math.fsum(speeds))
        self._slowest = min(self.between.values(), default=UNKNOWN_RATE)

    def known(self) -> list[float]:
        return list(self.between.values())

    def up_of(self, host: int) -> float:
        return self.up.get(host, self._slowest)

    def down_of(self, host: int) -> float:
        return self.down.get(host, self._slowest)


def _bounded(flow: Flow) -> Flow:
    speed = flow.bytes_per_second
    return flow._replace(bytes_per_second=max(LEAST_RATE, speed) if math.isfinite(speed) else UNKNOWN_RATE)


def _trips(hosts: Sequence[int], round_trips: Sequence[Sequence[float]]) -> Matrix:
    """Return the round trips, both ways alike; those that are nearly equal become equal.

    Both ends measure the same way there and back, and a busy machine only makes it longer: the shorter one is taken.
    """
    slots = range(len(hosts))

    def shorter(i: int, j: int) -> float:
        trips = [trip for trip in (round_trips[i][j], round_trips[j][i]) if math.isfinite(trip) and trip > 0]
        return max(LEAST_TRIP, min(trips, default=0.0))

    both = [[0.0 if i == j else shorter(i, j) for j in slots] for i in slots]
    levels = _levels([trip for row in both for trip in row if trip], LIKE_TRIPS)
    return tuple(tuple(levels.get(trip, trip) for trip in row) for row in both)


def _sites(hosts: Sequence[int], seen: _Rates, trips: Matrix) -> tuple[int, ...]:
    """Number the sites by their first slots.

    A slow pair alone makes no site: a host that is slow to all others has a slow link of its own. But if both ends are
    seen to be faster with others, what lies between them is slow. Hosts are at one site if a chain of hosts connects
    them in which neighbours are near in this sense, and by their round trips.
    """
    slots = range(len(hosts))
    nearest = [min((trips[i][j] for j in slots if hosts[i] != hosts[j]), default=math.inf) for i in slots]

    def is_near(i: int, j: int) -> bool:
        if hosts[i] == hosts[j]:
            return True
        if trips[i][j] > max(NEAR_TRIP_SECONDS, FAR * min(nearest[i], nearest[j])):
            return False
        for here, there in ((hosts[i], hosts[j]), (hosts[j], hosts[i])):
            speed = seen.between.get((here, there))
            if speed is None or speed * APART < min(seen.up_of(here), seen.down_of(there)):
                return False
        return True

    sites = [-1] * len(hosts)
    for first in slots:
        if sites[first] < 0:
            number = max(sites) + 1
            sites[first] = number
            waiting = [first]
            while waiting:
                i = waiting.pop()
                joined = [j for j in slots if sites[j] < 0 and is_near(i, j)]
                for j in joined:
                    sites[j] = number
                waiting += joined
    return tuple(sites)


def _trunks(
    sites: Sequence[int], rounds: Sequence[Sequence[Flow]]
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Return the fastest single flow from site to site, and the most that concurrent flows had together."""
    best: dict[tuple[int, int], float] = {}
    trunks: dict[tuple[int, int], float] = {}
    for flows in rounds:
        crossing: dict[tuple[int, int], list[float]] = {}
        for flow in flows:
            pair = sites[flow.source], sites[flow.target]
            if pair[0] != pair[1]:
                crossing.setdefault(pair, []).append(flow.bytes_per_second)
        for pair, speeds in crossing.items():
            best[pair] = max(best.get(pair, 0.0), *speeds)
            trunks[pair] = max(trunks.get(pair, 0.0), math.fsum(speeds))
    return best, trunks


def _access(sites: Sequence[int], up: Sequence[float], down: Sequence[float], a: int, b: int) -> float:
    """Return what a trunk of which nothing is known can carry: as much as the fastest host at either end."""
    return min(
        max(speed for speed, site in zip(up, sites, strict=True) if site == a),
        max(speed for speed, site in zip(down, sites, strict=True) if site == b),
    )


def _levels(values: Iterable[float], factor: float) -> dict[float, float]:
    """Return for each value the one that takes its place: the middle one of those that are alike, to two digits."""
    ordered = sorted(set(values), reverse=True)
    levels: dict[float, float] = {}
    at = 0
    while at < len(ordered):
        alike = [value for value in ordered[at:] if value * factor >= ordered[at]]
        middle = float(f"{alike[len(alike) // 2]:.1e}")
        levels.update(dict.fromkeys(alike, middle))
        at += len(alike)
    return levels


def _level(levels: dict[float, float], value: float) -> float:
    return levels.get(value, value)
