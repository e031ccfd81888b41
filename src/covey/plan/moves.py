"""What a plan is made of: sends and receives of element ranges, in order.

A plan is one rank's part of a collective. Its sends are started in order, one at a time; its receives are
applied in order, one at a time; sends and receives go on side by side. Everything is a plain int, so a plan
can be printed, counted, proved by `check` and run by any executor.

Offsets count elements, never bytes: a range is always whole elements.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

STORE: Final = 0
"""Write what arrives over the range."""
REDUCE: Final = 1
"""Combine the range with what arrives."""
LEFT: Final = 2
"""With REDUCE: what arrives is the left operand (it stems from lower ranks)."""
FINAL: Final = 4
"""With REDUCE: this was the last contribution to the range, so a mean may be divided now."""


class Send(NamedTuple):
    """Send `buffer[start:stop]` to `peer`, not before the first `after` receives of this plan are applied."""

    peer: int
    buffer: int
    start: int
    stop: int
    after: int = 0


class Recv(NamedTuple):
    """Receive `buffer[start:stop]` from `peer`; apply it not before the first `after` sends of this plan are done.

    The bytes may arrive earlier: the executor takes them in and keeps them aside until it may apply them, so
    `after` never holds up the sender.
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


@lru_cache(maxsize=256)
def first_writes(plan: Plan) -> tuple[bool, ...]:
    """Tell of each receive whether no earlier one has changed its range.

    Raises:
        ValueError: ranges of one buffer overlap without being the same.
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


def part(count: int, size: int, index: int) -> tuple[int, int]:
    """Return the range of part `index` when `count` elements are split in `size` as numpy.array_split does."""
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


def segmented_parts(count: int, size: int, length: int) -> list[list[tuple[int, int]]]:
    """Cut each `part` of `count` into pieces of at most `length` elements, the same number of pieces in every part."""
    longest = -(-count // size)
    number = max(1, -(-longest // length))
    return [pieces(*part(count, size, index), number) for index in range(size)]
