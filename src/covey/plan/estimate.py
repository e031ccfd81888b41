"""What a plan costs among many ranks, from the sums of what links carry: `cost.seconds` without following each move.

The time is that of the link that is busy longest, or of the chain of transfers that a piece of the array passes
through, whichever is longer, and the time until the pipeline is full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.plan.cost import TRANSFER_SECONDS, capacity, shared_links
from covey.plan.order import hop_speeds
from covey.plan.trees import MOST_IN_STAR, divisions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.plan.cost import Shared
    from covey.plan.network import Network
    from covey.plan.trees import Groups


def ring(network: Network, order: Sequence[int], weights: Sequence[int], nbytes: int, piece: int) -> float:
    """Return the seconds of a ring; weights[p] is the weight of what the slot at position p finishes.

    Each hop carries (2 - s_p - s_next) of the array (see `shares`). A piece goes round nearly twice, and as many pieces
    as there are slots are under way at least if all own the same; if one owns everything, it is a chain that has to be
    filled first.
    """
    size, total = len(order), sum(weights)
    owned = [weight / total for weight in weights]
    busiest = around = 0.0
    for p, speed in enumerate(hop_speeds(network, order)):
        there = (p + 1) % size
        busiest = max(busiest, (2 - owned[p] - owned[there]) * nbytes / speed)
        latency = network.round_trips[order[p]][order[there]] / 2
        around += piece / speed + latency + TRANSFER_SECONDS
    passing = 2 * (size - 1) / size * around
    if max(weights) == min(weights):
        return max(busiest + around / size, passing)
    return busiest + passing * max(owned)


def halving(network: Network, nbytes: int) -> float:
    """Return the seconds of recursive halving and doubling: every rank sends to ranks at all distances.

    The first rounds move most bytes, and each of them waits for the slowest pair. Ranks beyond a power of two send all
    they have to another one first, and get all of it back.
    """
    slots = range(len(network.hosts))
    doubled = 1 << (len(slots).bit_length() - 1)
    slowest = min(rate for i in slots for j, rate in enumerate(network.rates[i]) if i != j)
    slowest = min(slowest, *(capacity(network, ("trunk", a, b)) / doubled for a, row in enumerate(network.trunks)
                             for b in range(len(row)) if a != b), *network.up, *network.down)  # fmt: skip
    farthest = max(map(max, network.round_trips)) / 2
    rounds, moved = 2 * (doubled.bit_length() - 1), 2 * (doubled - 1) / doubled * nbytes
    if doubled < len(slots):
        rounds, moved = rounds + 2, moved + 2 * nbytes
    return moved / slowest + rounds * (farthest + TRANSFER_SECONDS)


def levelled(network: Network, groups: Groups, weights: Sequence[int], nbytes: int, piece: int) -> float:
    """Return the seconds of a plan in levels.

    A slot that owns the part o of the array among its part of a group, of whose m parts this one owns the share w,
    sends and receives o ((1 - w) + w (m - 1)) inside the group; then it owns o w of it in the group.
    """
    slots = range(len(network.hosts))
    owned = [1.0] * len(slots)
    sent: dict[Shared, float] = {}
    local = [0.0] * len(slots)
    filling = 0.0
    for parts in reversed(divisions(len(slots), groups)):
        sums = [sum(weights[slot] for slot in part) for part in parts]
        shares = [each / sum(sums) if any(sums) else 1 / len(parts) for each in sums]
        is_star = len(parts) <= MOST_IN_STAR
        for index, part in enumerate(parts):
            before = shares[index - 1]
            load = 1 - shares[index] + (shares[index] * (len(parts) - 1) if is_star else 1 - before)
            other = parts[(index + 1) % len(parts)][0]
            links = shared_links(network, part[0], other)
            for slot in part:
                if not links:
                    local[slot] += owned[slot] * load * nbytes / network.rates[slot][other]
                else:
                    for kind in ("up", "down"):
                        link = kind, network.hosts[slot], 0
                        sent[link] = sent.get(link, 0.0) + owned[slot] * load * nbytes
            _cross(network, parts, index, shares, is_star, nbytes, sent)
            for slot in part:
                owned[slot] *= shares[index]
        steps = 2 if is_star else 2 * (len(parts) - 1)
        ways = [(part[0], parts[(index + 1) % len(parts)][0]) for index, part in enumerate(parts)]
        slowest = max(piece / network.rates[i][j] + network.round_trips[i][j] / 2 for i, j in ways)
        filling += steps * (slowest + TRANSFER_SECONDS)
    busiest = max([*local, *(load / capacity(network, link) for link, load in sent.items())])
    return busiest + filling


def _cross(
    network: Network,
    parts: tuple[tuple[int, ...], ...],
    index: int,
    shares: list[float],
    is_star: bool,
    nbytes: int,
    sent: dict[Shared, float],
) -> None:
    """Add what one part of a group sends to parts at other sites."""
    here = network.sites[parts[index][0]]
    others = range(len(parts)) if is_star else {(index + 1) % len(parts), (index - 1) % len(parts)}
    for other in sorted(set(others) - {index}):
        there = network.sites[parts[other][0]]
        if here == there:
            continue
        if is_star:
            load = shares[index] + shares[other]
        else:
            load = 1 - (shares[index] if other == (index + 1) % len(parts) else shares[other])
        link = "trunk", here, there
        sent[link] = sent.get(link, 0.0) + load * nbytes
