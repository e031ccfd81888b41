"""What a plan is made of: sends and receives of element ranges, in order.

A plan is one rank's part of a collective. Its sends are started in order, one at a time; its receives are
applied in order, one at a time; sends and receives are independent of each other. All fields are ints, so a plan can
be printed, counted, proved by `check` and run by any executor.

Offsets count elements, never bytes: a range is always whole elements.
The ranks of a plan are numbered from 0 without gaps: when a group runs it, they are the slots of an attempt.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

STORE: Final = 0
"""Overwrite the range with what arrives."""
REDUCE: Final = 1
"""Combine the range with what arrives."""
LEFT_OPERAND: Final = 2
"""With REDUCE: what arrives is the left operand, since it comes from lower ranks."""
FINAL: Final = 4
"""With REDUCE: this is the last contribution to the range, so a mean is divided now."""


class Send(NamedTuple):
    """Send `buffer[start:stop]` to `peer`, once the first `after` receives of this plan are applied."""

    peer: int
    buffer: int
    start: int
    stop: int
    after: int = 0


class Recv(NamedTuple):
    """Receive `buffer[start:stop]` from `peer`, and apply it once the first `after` sends of this plan are done.

    The bytes may arrive earlier. The executor then receives them into other memory, so that `after` never blocks the
    sender.
    """

    peer: int
    buffer: int
    start: int
    stop: int
    action: int = STORE
    after: int = 0


class Plan(NamedTuple):
    """One rank's part of a collective."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()


M = TypeVar("M", Send, Recv)


def elements_sent(plan: Plan) -> int:
    """Return how many elements the rank sends."""
    return sum(send.stop - send.start for send in plan.sends)


@lru_cache(maxsize=256)
def first_writes(plan: Plan) -> tuple[bool, ...]:
    """Return for each receive whether it is the first to change its range.

    Raises:
        ValueError: ranges of one buffer overlap but are not equal.
    """
    seen: set[tuple[int, int, int]] = set()
    firsts = []
    for recv in plan.recvs:
        span = (recv.buffer, recv.start, recv.stop)
        firsts.append(span not in seen)
        seen.add(span)
    spans = sorted(span for span in seen if span[1] < span[2])
    for (buffer, start, stop), (other, begin, end) in pairwise(spans):
        if buffer == other and begin < stop:
            raise ValueError(f"receives into {start}:{stop} and {begin}:{end} of buffer {buffer} overlap")
    return tuple(firsts)


def placed(plan: Plan, places: Sequence[tuple[int, int]]) -> Plan:
    """Return a plan for blocks that lie in longer arrays: its buffer j begins at places[j], a buffer and an element."""

    def put(move: M) -> M:
        buffer, at = places[move.buffer]
        return move._replace(buffer=buffer, start=at + move.start, stop=at + move.stop)

    return Plan(tuple(map(put, plan.sends)), tuple(map(put, plan.recvs)))


def renamed(plan: Plan, slots: Sequence[int]) -> Plan:
    """Return a plan among other ranks: its rank j is slots[j]."""
    return Plan(
        tuple(send._replace(peer=slots[send.peer]) for send in plan.sends),
        tuple(recv._replace(peer=slots[recv.peer]) for recv in plan.recvs),
    )


def part(count: int, size: int, index: int) -> tuple[int, int]:
    """Return the range of part `index` when `count` elements are split into `size` parts as numpy.array_split does."""
    base, extra = divmod(count, size)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


def segments(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Cut a range into pieces of at most `length` elements; an empty range is one empty piece."""
    if start == stop:
        return [(start, stop)]
    return [(at, min(at + length, stop)) for at in range(start, stop, length)]


def pieces(start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """Cut a range into exactly `number` pieces whose lengths differ by at most one; some may be empty."""
    base, extra = divmod(stop - start, number)
    bounds = [start + index * base + min(index, extra) for index in range(number + 1)]
    return list(pairwise(bounds))


def divided(start: int, stop: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a range in proportion to `weights`; into equal parts if all are 0."""
    if not any(weights):
        weights = [1] * len(weights)
    total = sum(weights)
    ends = [start + (stop - start) * upto // total for upto in accumulate(weights, initial=0)]
    return list(pairwise(ends))


def segmented_parts(count: int, size: int, length: int) -> list[list[tuple[int, int]]]:
    """Cut each `part` of `count` into pieces of at most `length` elements, the same number of pieces in every part."""
    longest = -(-count // size)
    number = max(1, -(-longest // length))
    return [pieces(*part(count, size, index), number) for index in range(size)]
