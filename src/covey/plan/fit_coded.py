"""Fit the plan of a compressed all_reduce to the network: in units of the codec, with the time that it takes to run.

The plans are those in which nothing is received early (see `coded`): rings in any order and with any shares, direct
exchanges, and halving and doubling.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan import cost, direct, estimate, halving, order, ring
from covey.plan.coded import coded
from covey.plan.fit import (
    GAIN,
    LEAST_GAIN,
    MOST_FOLLOWED,
    PLAIN,
    Candidate,
    Fitted,
    is_distant,
    ring_piece,
    ring_shares,
)
from covey.plan.moves import renamed

if TYPE_CHECKING:
    from covey.plan.choose import PlanSizes
    from covey.plan.cost import CodecPace
    from covey.plan.moves import Plan
    from covey.plan.network import Network

PLAIN_RING: Final = Fitted("ring", (), (), (), 0.0)
"""The plan for equal links, between hosts."""


class CodedArray(NamedTuple):
    """An array as a codec sees it."""

    units: int
    unit_bytes: int
    """Of a unit as it travels."""
    segment: int
    """Units of a transfer of the plain plan."""


@lru_cache(maxsize=64)
def fit_coded(network: Network, array: CodedArray, pace: CodecPace, sizes: PlanSizes) -> tuple[Candidate, ...]:
    """Return the plans with their predicted times: the chosen one, then the others, best first.

    `pace` is in seconds per unit. The plain ring is chosen unless another plan is clearly faster; if all links are
    equal and no two hosts are distant it is always chosen.
    """
    found = dict.fromkeys([Candidate(PLAIN_RING, PLAIN), *_others(network)])
    timed = [
        Candidate(each.fitted._replace(seconds=predicted(each.fitted, network, array, pace, sizes)), each.why)
        for each in found
    ]
    ranked = sorted(timed, key=lambda each: each.fitted.seconds)
    best, plain = ranked[0], timed[0]
    before, after = plain.fitted.seconds, best.fitted.seconds
    is_plain = order.is_even(network) and not is_distant(network)
    if is_plain or after * GAIN > before or before - after < LEAST_GAIN:
        best = plain
    return (best, *(each for each in ranked if each is not best))


@lru_cache(maxsize=256)
def coded_plan_of(fitted: Fitted, rank: int, size: int, array: CodedArray, sizes: PlanSizes) -> Plan:
    """Return the moves of one slot, in units."""
    slots = fitted.order or tuple(range(size))
    position, segment = slots.index(rank), array.segment
    if fitted.algorithm == "direct":
        return renamed(direct.owner_reduce(position, size, array.units, segment), slots)
    if fitted.algorithm == "halving":
        return renamed(halving.all_reduce(position, size, array.units), slots)
    weights = [fitted.shares[slot] for slot in slots] if fitted.shares else []
    if weights:
        segment = min(segment, _piece(fitted, array, sizes) // array.unit_bytes)
    return renamed(ring.all_reduce(position, size, array.units, max(1, segment), weights), slots)


def predicted(fitted: Fitted, network: Network, array: CodedArray, pace: CodecPace, sizes: PlanSizes) -> float:
    """Return the predicted seconds of a plan on a network."""
    size, nbytes = len(network.hosts), array.units * array.unit_bytes
    if size > MOST_FOLLOWED:
        working = array.units * (pace.encode + 2 * pace.decode)
        if fitted.algorithm == "halving":
            return estimate.halving(network, nbytes) + working
        slots = fitted.order or tuple(range(size))
        weights = [fitted.shares[slot] for slot in slots] if fitted.shares else [1] * size
        piece = _piece(fitted, array, sizes) if fitted.shares else array.segment * array.unit_bytes
        return estimate.ring(network, slots, weights, nbytes, min(piece, -(-nbytes // size))) + working
    plans = [coded_plan_of(fitted, slot, size, array, sizes) for slot in range(size)]
    moves = [coded(plan, (array.units,), 1, lambda units: units, is_copy=False) for plan in plans]
    encodes = [[task is not None for task in each.encodes] for each in moves]
    return cost.seconds(plans, network, array.unit_bytes, pace, encodes)


def _piece(fitted: Fitted, array: CodedArray, sizes: PlanSizes) -> int:
    return ring_piece(array.units * array.unit_bytes, fitted.shares, sizes)


def _others(network: Network) -> list[Candidate]:
    size = len(network.hosts)
    best = order.best(network)
    ordered = best if best != tuple(range(size)) else ()
    found = [Candidate(PLAIN_RING._replace(order=ordered), "the order with the fastest slowest hop")] if ordered else []
    if len(set(order.hop_speeds(network, best))) > 1:
        uneven = Fitted("ring", best, ring_shares(network, best), (), 0.0)
        found.append(Candidate(uneven, "the order with the fastest slowest hop; slow ranks finish more"))
    if is_distant(network):
        found.append(Candidate(Fitted("halving", ordered, (), (), 0.0), "few rounds, and few bytes"))
        if size <= MOST_FOLLOWED:
            found.append(Candidate(Fitted("direct", (), (), (), 0.0), "two rounds"))
    return found
