"""Plans whose transfers are encoded: what travels, what each rank encodes and decodes, and how one fits a network.

A plan is fitted in units of the codec, with the time that the codec takes to run.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan import cost, direct, doubling, estimate, order, ring
from covey.plan.fit import (
    LEAST_RATIO,
    LEAST_SAVED_SECONDS,
    MOST_FOLLOWED,
    PLAIN_PLAN,
    Candidate,
    Fitted,
    is_distant,
    ring_piece,
    ring_shares,
)
from covey.plan.moves import FINAL, REDUCE, Plan, Recv, Send, renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.plan.choose import PlanSizes
    from covey.plan.cost import CodecPace
    from covey.plan.network import Network

PLAIN_RING: Final = Fitted("ring", (), (), (), 0.0)
"""The plan for equal links, between hosts."""


class Encode(NamedTuple):
    """Encode elements start:stop of a buffer into bytes begin:end of its wire."""

    buffer: int
    start: int
    stop: int
    begin: int
    end: int
    settles: bool
    """The range is finished: this rank decodes it, too, and then has what all others will have."""


class Decode(NamedTuple):
    """Decode bytes begin:end of a wire into elements start:stop of its buffer."""

    buffer: int
    start: int
    stop: int
    begin: int
    end: int
    adds: bool
    """Add to the elements; else overwrite them."""
    is_final: bool
    """This was the last contribution, so a mean is divided now."""


class CodedPlan(NamedTuple):
    """Moves of bytes, and what is done before a send starts and after a receive has ended."""

    plan: Plan
    encodes: tuple[Encode | None, ...]
    """By send. None: the bytes are sent as they are."""
    decodes: tuple[Decode, ...]
    """By receive."""


def coded(
    plan: Plan, lengths: Sequence[int], unit: int, wire_bytes: Callable[[int], int], *, is_copy: bool
) -> CodedPlan:
    """Turn a plan that counts units into one that counts bytes; lengths[j] is the number of elements of buffer j.

    `is_copy` says that the plan reduces nothing: then what a rank sends of its own is finished.
    """

    def ranges(buffer: int, first: int, last: int) -> tuple[int, int, int, int]:
        start, stop = (min(units * unit, lengths[buffer]) for units in (first, last))
        return start, stop, wire_bytes(start), wire_bytes(stop)

    sends: list[Send] = []
    encodes: list[Encode | None] = []
    encoded: set[tuple[int, int, int, int]] = set()
    changes: dict[tuple[int, int, int], list[int]] = {}
    """By range: the numbers of receives that change it."""
    for number, recv in enumerate(plan.recvs):
        assert not recv.after, "what is received early would wait in the wire of a range that is still sent"
        changes.setdefault(recv[1:4], []).append(number)
    for send in plan.sends:
        start, stop, begin, end = ranges(send.buffer, send.start, send.stop)
        before = [number for number in changes.get(send[1:4], ()) if number < send.after]
        last = plan.recvs[before[-1]].action if before else REDUCE
        version = (*send[1:4], len(before))
        if last & REDUCE and version not in encoded and start < stop:
            settles = is_copy or bool(last & FINAL)
            encodes.append(Encode(send.buffer, start, stop, begin, end, settles))
        else:
            encodes.append(None)
        encoded.add(version)
        sends.append(Send(send.peer, send.buffer, begin, end, send.after))
    recvs: list[Recv] = []
    decodes: list[Decode] = []
    for recv in plan.recvs:
        start, stop, begin, end = ranges(recv.buffer, recv.start, recv.stop)
        is_reduced = bool(recv.action & REDUCE)
        decodes.append(Decode(recv.buffer, start, stop, begin, end, is_reduced, bool(recv.action & FINAL)))
        recvs.append(Recv(recv.peer, recv.buffer, begin, end))
    return CodedPlan(Plan(tuple(sends), tuple(recvs)), tuple(encodes), tuple(decodes))


class CodedArray(NamedTuple):
    """An array as a codec sees it."""

    units: int
    unit_bytes: int
    """Bytes of a unit as it travels."""
    segment: int
    """Units of a transfer of the plain plan."""


@lru_cache(maxsize=64)
def fit_coded(network: Network, array: CodedArray, pace: CodecPace, sizes: PlanSizes) -> tuple[Candidate, ...]:
    """Return the plans with their predicted times: the chosen one, then the others, best first.

    `pace` is in seconds per unit. The plain ring is chosen unless another plan is clearly faster; if all links are
    equal and no two hosts are distant it is always chosen.
    """
    found = dict.fromkeys([Candidate(PLAIN_RING, PLAIN_PLAN), *_others(network)])
    timed = [
        Candidate(each.fitted._replace(seconds=predicted(each.fitted, network, array, pace, sizes)), each.why)
        for each in found
    ]
    ranked = sorted(timed, key=lambda each: each.fitted.seconds)
    best, plain = ranked[0], timed[0]
    before, after = plain.fitted.seconds, best.fitted.seconds
    is_plain = order.is_even(network) and not is_distant(network)
    if is_plain or after * LEAST_RATIO > before or before - after < LEAST_SAVED_SECONDS:
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
        return renamed(doubling.halving_all_reduce(position, size, array.units), slots)
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
