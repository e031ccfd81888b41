"""An all_reduce of some elements of each rank: the others count as 0.

Every rank owns a part of the array. It receives the selected elements of its part from all ranks, adds them up in the
order of slots, and sends what it has to all: as pairs of position and value, or the whole part where that is shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.plan import choose, direct
from covey.plan.moves import elements_sent, part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from covey.base.numbers import Slot
    from covey.runtime.collectives.attempt import Attempt

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]
    Positions = NDArray[np.uint32]

PAIR_BYTES: Final = 8
"""A position as uint32 and a value as float32."""
MOST_ELEMENTS: Final = 1 << 32
"""Of an array: the part of a rank may be the whole of it, and positions are uint32."""


def all_reduce(attempt: Attempt, x: Floats, selected: NDArray[Any], *, divides: bool) -> int:
    """Replace `x` by the sum, or the mean, over all ranks of their elements at `selected` (ascending positions).

    Return how many bytes this rank has sent.
    """
    bounds = [part(x.size, attempt.size, slot) for slot in attempt.slots]
    mine, total = _owned_total(attempt, x, selected, bounds)
    if divides:
        with np.errstate(all="ignore"):
            total /= np.float32(attempt.size)
    x[...] = 0
    start, stop = bounds[attempt.slot]
    outside = selected.size - int(np.searchsorted(selected, stop) - np.searchsorted(selected, start))
    return outside * PAIR_BYTES + _share(attempt, x, bounds, mine, total)


def all_reduce_shared(attempt: Attempt, x: Floats, selected: NDArray[Any], *, divides: bool) -> int:
    """Do what `all_reduce` does when all ranks select the same positions: then only values travel.

    If an element of any rank is not finite, no element of the result is.
    """
    values = np.empty(selected.size + 1, np.float32)
    values[:-1] = x[selected]
    values[-1] = 0.0 if np.isfinite(x).all() else np.nan
    plan = attempt.all_reduce(values, "mean" if divides else "sum")
    x[...] = values[-1]
    x[selected] += values[:-1]
    return values.itemsize * elements_sent(plan)


def _owned_total(
    attempt: Attempt, x: Floats, selected: NDArray[Any], bounds: list[tuple[int, int]]
) -> tuple[Positions, Floats]:
    """Return the positions in this slot's part that any rank selected, and their sums; all if those are many."""
    me, slots = attempt.slot, attempt.slots
    cuts = np.searchsorted(selected, [start for start, _ in bounds] + [x.size])
    outgoing = []
    for slot in slots:
        chosen = selected[cuts[slot] : cuts[slot + 1]]
        outgoing.append(_packed((chosen - bounds[slot][0]).astype(np.uint32), x[chosen]))
    counts = np.array([block.size // PAIR_BYTES for block in outgoing], np.uint64).reshape(-1, 1)
    incoming_counts = np.zeros_like(counts)
    ones = [1] * attempt.size
    attempt.execute(direct.all_to_all(me, ones, ones), [*counts, *incoming_counts])
    incoming_counts[me] = counts[me]
    length = bounds[me][1] - bounds[me][0]
    for slot in slots:
        if incoming_counts[slot, 0] > length:
            attempt.reject(slot, f"{incoming_counts[slot, 0]} elements of a part that has {length}")
    incoming = [np.empty(int(count) * PAIR_BYTES, np.uint8) for count in incoming_counts[:, 0]]
    plan = direct.all_to_all(me, [block.size for block in outgoing], [block.size for block in incoming])
    attempt.execute(plan, [*outgoing, *incoming])
    incoming[me] = outgoing[me]
    total, is_hit = np.zeros(length, np.float32), np.zeros(length, np.bool_)
    for slot in slots:
        positions, values = _unpacked(attempt, slot, incoming[slot], length)
        with np.errstate(all="ignore"):
            total[positions] += values  # positions are unique, so each value counts
        is_hit[positions] = True
    hits = np.flatnonzero(is_hit).astype(np.uint32)
    if _is_sparse(hits.size, length):
        return hits, total[hits]
    return np.arange(length, dtype=np.uint32), total


def _share(attempt: Attempt, x: Floats, bounds: list[tuple[int, int]], mine: Positions, total: Floats) -> int:
    """Send the finished elements of this slot's part to all slots, and write those of all parts to `x`.

    Return how many bytes this rank has sent.
    """
    counts = np.zeros((attempt.size, 1), np.uint64)
    counts[attempt.slot] = mine.size
    attempt.execute(direct.all_gather(attempt.slot, [1] * attempt.size), list(counts))
    blocks = []
    for slot in attempt.slots:
        count, length = int(counts[slot, 0]), bounds[slot][1] - bounds[slot][0]
        if count > length or (count < length and not _is_sparse(count, length)):
            attempt.reject(slot, f"{count} finished elements of a part that has {length}")
        blocks.append(np.empty(count * PAIR_BYTES if count < length else count * 4, np.uint8))
    own_length = bounds[attempt.slot][1] - bounds[attempt.slot][0]
    blocks[attempt.slot] = _packed(mine, total) if mine.size < own_length else total.view(np.uint8)
    lengths = tuple(block.size for block in blocks)
    plan = choose.all_gather(attempt.slot, lengths, attempt.lane_family, None)
    attempt.execute(plan, blocks)
    for slot, (start, stop) in zip(attempt.slots, bounds, strict=True):
        if int(counts[slot, 0]) == stop - start:
            x[start:stop] = blocks[slot].view(np.float32)
        else:
            positions, values = _unpacked(attempt, slot, blocks[slot], stop - start)
            x[start:stop][positions] = values
    return elements_sent(plan)


def _is_sparse(count: int, length: int) -> bool:
    """Tell whether pairs are shorter than the whole part."""
    return count * PAIR_BYTES < length * 4


def _packed(positions: Positions, values: Floats) -> Bytes:
    return np.concatenate([positions.view(np.uint8), values.view(np.uint8)])


def _unpacked(attempt: Attempt, slot: Slot, block: Bytes, length: int) -> tuple[Positions, Floats]:
    """Return the pairs that a slot sent; end the group unless the positions ascend and are in the part."""
    half = block.size // 2
    positions, values = block[:half].view(np.uint32), block[half:].view(np.float32)
    if positions.size and (int(positions[-1]) >= length or not (positions[1:] > positions[:-1]).all()):
        attempt.reject(slot, "elements at positions that do not ascend, or are beyond the part")
    return positions, values
