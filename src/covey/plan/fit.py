"""Fit the plan of an all_reduce to the network: what could be run, what each costs, and which is chosen.

All of it follows from the agreed network, the size of the array and the settings, so all ranks choose the same plan.
"""

from __future__ import annotations

from functools import lru_cache
from math import fsum
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan import choose, cost, doubling, estimate, order, ring, shares, trees
from covey.plan.moves import renamed
from covey.plan.network import NEAR_TRIP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.plan.choose import PlanSizes
    from covey.plan.moves import Plan
    from covey.plan.network import Network

PLAIN_PLAN: Final = "for equal links"
"""What the plan is called that `choose.all_reduce` returns."""
LEAST_RATIO: Final = 1.05
"""How many times as fast as the plain plan another must be predicted to be: predictions have errors, and a change of
plans opens new lanes."""
LEAST_SAVED_SECONDS: Final = 1e-3
"""Seconds that it must save, too: what small transfers cost is assumed, not measured."""
RING_SLACK: Final = 1.08
"""A ring is chosen if it takes at most so many times as long as the fastest plan: it needs two lanes a rank, and its
time does not depend on how much lanes buffer."""
TREE_PIECE_BYTES: Final = 64 << 10
"""A transfer of plans along trees, and the least of a ring with unequal parts: few enough for the buffers of a lane, so
that a rank that sends to a slow one goes on with the next, and the filling of the pipeline is short."""
LONGEST_PART_PIECES: Final = 32
"""The longest part of a ring with unequal parts is cut into so many for each slot, if it is large enough: what fills
the pipeline grows with the slots that a piece passes through."""
MOST_FOLLOWED: Final = 16
"""Slots up to which the time of a plan is predicted from its moves; of more, from the sums of what links carry."""
FOLLOWED_PIECES: Final = 16
"""Transfers of each owner that are followed in a plan along trees. The time for more grows evenly."""

Groups = tuple[tuple[int, ...], ...]


class Fitted(NamedTuple):
    """A plan of all_reduce for one network and size, as data: hashable, equal on all ranks."""

    algorithm: str
    """"exchange", "doubling", "halving", "direct", "ring" or "levels"."""
    order: tuple[int, ...]
    """The slots in the order of the ring, or of the rounds of "doubling" and "halving"; empty for 0, 1, 2 and so on."""
    shares: tuple[int, ...]
    """By slot, of shares.WHOLE: the part of the array that the slot finishes; empty for equal parts."""
    groups: Groups
    """The groups of all levels of "levels". Otherwise all slots if they are on one host, else none."""
    seconds: float
    """The predicted time."""


class Candidate(NamedTuple):
    """A plan that could be run, with a few words for people."""

    fitted: Fitted
    why: str


@lru_cache(maxsize=256)
def fit(network: Network, count: int, itemsize: int, sizes: PlanSizes) -> tuple[Candidate, ...]:
    """Return the plans for `count` elements, with their predicted times: the chosen one, then the others, best first.

    The chosen one is the plain one, which `choose.all_reduce` returns, unless another is clearly faster; if all links
    are equal and no two hosts are distant it is always the plain one.
    """
    size = len(network.hosts)
    plain = _plain(network, count * itemsize, sizes)
    found: dict[Fitted, Candidate] = {}
    for each in [plain, *_others(network)]:
        found.setdefault(each.fitted, each)
    timed = [
        Candidate(each.fitted._replace(seconds=predicted(each.fitted, network, count, itemsize, sizes)), each.why)
        for each in found.values()
    ]
    ranked = sorted(timed, key=lambda each: each.fitted.seconds)
    near = [each for each in ranked if each.fitted.seconds <= RING_SLACK * ranked[0].fitted.seconds]
    best = next((each for each in near if each.fitted.algorithm == "ring"), ranked[0])
    before, after = timed[0].fitted.seconds, best.fitted.seconds
    is_plain = order.is_even(network) and not is_distant(network)
    if size < 3 or is_plain or after * LEAST_RATIO > before or before - after < LEAST_SAVED_SECONDS:
        best = timed[0]
    return (best, *(each for each in ranked if each is not best))


@lru_cache(maxsize=256)
def compared(
    operation: str, network: Network, root: int, count: int, itemsize: int, sizes: PlanSizes
) -> tuple[tuple[str, float], ...]:
    """Return what each `algorithm=` of an operation would take on a network, in seconds, the best first.

    `operation` is "all_reduce", "broadcast" or "reduce". Nothing is predicted for more than 16 slots.
    """
    size = len(network.hosts)
    if size > MOST_FOLLOWED:
        return ()
    lanes = "ring" if len(set(network.hosts)) == 1 else "stream"

    def of_count(algorithm: str, count: int) -> float:
        slots = range(size)
        if operation == "all_reduce":
            plans = [choose.all_reduce(slot, size, count, itemsize, lanes, algorithm, sizes) for slot in slots]
        else:
            rooted = choose.broadcast if operation == "broadcast" else choose.reduce
            plans = [rooted(slot, size, root, count, itemsize, algorithm, sizes) for slot in slots]
        return cost.seconds(plans, network, itemsize)

    known = choose.ALL_REDUCE_PLANS[size > 2 :] if operation == "all_reduce" else choose.ROOTED_PLANS
    most = size * FOLLOWED_PIECES * sizes.segment(itemsize)  # the time for more grows evenly
    found = []
    for algorithm in known:
        seconds = of_count(algorithm, min(count, most))
        if count > most:
            seconds += (seconds - of_count(algorithm, most // 2)) / (most - most // 2) * (count - most)
        found.append((algorithm, seconds))
    return tuple(sorted(found, key=lambda each: each[1]))


@lru_cache(maxsize=64)
def is_distant(network: Network) -> bool:
    """Tell whether a round trip is so long that the number of rounds of a plan matters."""
    return max(map(max, network.round_trips)) > NEAR_TRIP_SECONDS


@lru_cache(maxsize=256)
def plan_of(fitted: Fitted, rank: int, size: int, count: int, itemsize: int, sizes: PlanSizes) -> Plan:
    """Return the moves of one slot."""
    return _built(fitted, rank, size, count, itemsize, sizes)


def predicted(fitted: Fitted, network: Network, count: int, itemsize: int, sizes: PlanSizes) -> float:
    """Return the predicted seconds of a plan on a network."""
    if len(network.hosts) > MOST_FOLLOWED and fitted.algorithm != "doubling":
        return estimated(fitted, network, count * itemsize, sizes)
    most = _evenly_from(fitted, len(network.hosts), itemsize)
    if not _is_along_trees(fitted) or count <= most:
        return _followed(fitted, network, count, itemsize, sizes)
    seconds, more = _line(fitted, network, itemsize, sizes)
    return seconds + more * (count - most)


def _followed(fitted: Fitted, network: Network, count: int, itemsize: int, sizes: PlanSizes) -> float:
    size = len(network.hosts)
    plans = [_built(fitted, slot, size, count, itemsize, sizes) for slot in range(size)]
    return cost.seconds(plans, network, itemsize)


@lru_cache(maxsize=64)
def _line(fitted: Fitted, network: Network, itemsize: int, sizes: PlanSizes) -> tuple[float, float]:
    """Return the seconds of a plan along trees for `_evenly_from` elements, and those for each more."""
    most = _evenly_from(fitted, len(network.hosts), itemsize)
    short, long = (_followed(fitted, network, count, itemsize, sizes) for count in (most // 2, most))
    return long, (long - short) / (most - most // 2)


def _evenly_from(fitted: Fitted, size: int, itemsize: int) -> int:
    """Return the elements from which on the time of a plan along trees grows evenly."""
    owners = sum(map(bool, fitted.shares)) or size
    return max(2, owners * FOLLOWED_PIECES * TREE_PIECE_BYTES // itemsize)


def _built(fitted: Fitted, rank: int, size: int, count: int, itemsize: int, sizes: PlanSizes) -> Plan:
    slots = fitted.order or tuple(range(size))
    position = slots.index(rank)
    if _is_along_trees(fitted):
        cells = trees.cells(size, fitted.groups, fitted.shares, count)
        return trees.all_reduce(rank, size, cells, max(1, TREE_PIECE_BYTES // itemsize))
    if fitted.algorithm == "ring" and fitted.shares:
        weights = [fitted.shares[slot] for slot in slots]
        segment = ring_piece(count * itemsize, fitted.shares, sizes) // itemsize
        return renamed(ring.all_reduce(position, size, count, max(1, segment), weights), slots)
    if fitted.algorithm == "doubling":
        return renamed(doubling.all_reduce(position, size, count), slots)
    if fitted.algorithm == "halving":
        return renamed(doubling.halving_all_reduce(position, size, count), slots)
    lanes = "ring" if fitted.groups else "stream"
    return renamed(choose.all_reduce(position, size, count, itemsize, lanes, fitted.algorithm, sizes), slots)


def _is_along_trees(fitted: Fitted) -> bool:
    return fitted.algorithm == "levels" or (fitted.algorithm == "direct" and bool(fitted.shares))


def ring_piece(nbytes: int, weights: Sequence[int], sizes: PlanSizes) -> int:
    """Return the bytes of a transfer of a ring with unequal parts."""
    longest = nbytes * max(weights) // sum(weights)
    return min(sizes.segment_bytes, max(TREE_PIECE_BYTES, longest // (LONGEST_PART_PIECES * len(weights))))


def estimated(fitted: Fitted, network: Network, nbytes: int, sizes: PlanSizes) -> float:
    """Return the seconds of any plan but "doubling", from the sums of what links carry."""
    size = len(network.hosts)
    if fitted.algorithm == "halving":
        return estimate.halving(network, nbytes)
    if fitted.algorithm == "ring":
        slots = fitted.order or tuple(range(size))
        weights = [fitted.shares[slot] for slot in slots] if fitted.shares else [1] * size
        piece = ring_piece(nbytes, weights, sizes) if fitted.shares else min(sizes.segment_bytes, -(-nbytes // size))
        return estimate.ring(network, slots, weights, nbytes, piece)
    weights = list(fitted.shares) or [1] * size
    groups = fitted.groups if fitted.algorithm == "levels" else ()
    return estimate.levelled(network, groups, weights, nbytes, min(TREE_PIECE_BYTES, -(-nbytes // size)))


def _plain(network: Network, nbytes: int, sizes: PlanSizes) -> Candidate:
    """Return the plan for links of which nothing is known."""
    size = len(network.hosts)
    is_one_host = len(set(network.hosts)) == 1
    algorithm = choose.all_reduce_algorithm(size, nbytes, "ring" if is_one_host else "stream", sizes)
    return Candidate(Fitted(algorithm, (), (), (tuple(range(size)),) if is_one_host else (), 0.0), PLAIN_PLAN)


def _others(network: Network) -> list[Candidate]:
    """Return plans for unequal links; their times are not known yet."""
    size = len(network.hosts)
    if size < 3 or len(set(network.hosts)) == 1:
        return []
    best = order.best(network)
    slots = tuple(range(size))
    found = [
        Candidate(Fitted("ring", best if best != slots else (), (), (), 0.0), "the order with the fastest slowest hop"),
        Candidate(Fitted("doubling", best if best != slots else (), (), (), 0.0), "the fewest rounds"),
    ]
    if is_distant(network):
        by_rounds = Fitted("halving", best if best != slots else (), (), (), 0.0)
        found.append(Candidate(by_rounds, "few rounds, and few bytes"))
    if len(set(order.hop_speeds(network, best))) > 1:
        uneven = Fitted("ring", best, ring_shares(network, best), (), 0.0)
        found.append(Candidate(uneven, "the order with the fastest slowest hop; slow ranks finish more"))
    hosts, sites = _several(network.hosts), _several(network.sites)
    if size <= trees.MOST_IN_STAR and not hosts:
        speeds = [min(network.up[slot], network.down[slot]) for slot in slots]
        found.append(Candidate(Fitted("direct", (), shares.owners(speeds), (), 0.0), "slow ranks finish less"))
    if not hosts and not sites and (served := _served(network)) is not None:
        found.append(Candidate(served, "each slow rank has a fast one that speaks for it"))
    for groups, why in (
        (hosts, "inside hosts first"),
        (sites, "inside sites first"),
        (hosts + tuple(site for site in sites if site not in hosts), "inside hosts, then inside sites"),
    ):
        if groups:
            found.append(Candidate(Fitted("levels", (), _level_shares(network, groups), groups, 0.0), why))
    return found


def _several(numbers: Sequence[int]) -> Groups:
    """Return the slots with equal numbers, where there are several, unless all have the same."""
    groups = [tuple(slot for slot, each in enumerate(numbers) if each == number) for number in dict.fromkeys(numbers)]
    return tuple(group for group in groups if 1 < len(group) < len(numbers))


def ring_shares(network: Network, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Return by slot the shares with which a ring in this order ends soonest."""
    by_position = shares.ring(order.hop_speeds(network, slots))
    return tuple(by_position[slots.index(slot)] for slot in range(len(slots)))


def _level_shares(network: Network, groups: Groups) -> tuple[int, ...]:
    """Return shares with which the parts of each group finish together, as far as the links between them matter."""
    weights = [1.0] * len(network.hosts)
    for parts in trees.divisions(len(network.hosts), groups):
        for part, share in zip(parts, shares.owners([_speed(network, part) for part in parts]), strict=True):
            for slot in part:
                weights[slot] *= share / shares.WHOLE
    return shares.whole(weights)


def _served(network: Network) -> Fitted | None:
    """Return a plan in which slots that are too slow to own a part exchange all with one that owns some, or None."""
    speeds = [min(network.up[slot], network.down[slot]) for slot in range(len(network.hosts))]
    owned = shares.owners(speeds)
    fast = [slot for slot, share in enumerate(owned) if share]
    served: dict[int, list[int]] = {slot: [] for slot in fast}
    left = {slot: speeds[slot] for slot in fast}
    for slot in sorted((slot for slot, share in enumerate(owned) if not share), key=lambda slot: (-speeds[slot], slot)):
        server = max(fast, key=lambda each: (left[each], -each))
        served[server].append(slot)
        left[server] -= speeds[slot]
    if len(fast) < 2 or len(fast) == len(speeds) or min(left.values()) <= 0:
        return None
    weights = shares.owners([left[slot] for slot in fast])
    by_slot = dict(zip(fast, weights, strict=True))
    groups = tuple((server, *slots) for server, slots in served.items() if slots)
    return Fitted("levels", (), tuple(by_slot.get(slot, 0) for slot in range(len(speeds))), groups, 0.0)


def _speed(network: Network, part: tuple[int, ...]) -> float:
    """Return what the slots of a host, of a site or of several hosts can send to others, and receive, in a second."""
    hosts = {network.hosts[slot]: slot for slot in part}.values()
    up, down = fsum(network.up[slot] for slot in hosts), fsum(network.down[slot] for slot in hosts)
    site = network.sites[part[0]]
    if part == tuple(slot for slot, each in enumerate(network.sites) if each == site) and len(network.trunks) > 1:
        up = min(up, fsum(each for other, each in enumerate(network.trunks[site]) if other != site))
        down = min(down, fsum(row[site] for other, row in enumerate(network.trunks) if other != site))
    return min(up, down)
