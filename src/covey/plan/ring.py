"""Plans in which a rank sends only to the next rank: they use the whole bandwidth of every link, in many steps.

Ranges are cut into segments, and a segment is passed on as soon as it has arrived, so that the steps overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.plan.moves import FINAL, REDUCE, STORE, Plan, Recv, Send, divided, segmented_parts, segments

if TYPE_CHECKING:
    from collections.abc import Sequence


def all_reduce(rank: int, size: int, count: int, segment: int, shares: Sequence[int] = ()) -> Plan:
    """All-reduce buffer 0: each `part` goes round the ring once to be summed, and once more to be distributed.

    `shares` makes unequal parts: that which rank j finishes is in proportion to shares[j], and is cut into segments of
    its own; empty parts do not travel.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    if size == 1:
        return Plan()
    right, left = (rank + 1) % size, (rank - 1) % size
    cuts = _shared_parts(count, shares, segment) if shares else segmented_parts(count, size, segment)
    sends: list[Send] = []
    recvs: list[Recv] = []
    earlier = 0  # receives before those of the last step, which bring what is sent in this one
    for step in range(2 * size - 2):
        sends += [
            Send(right, 0, start, stop, earlier + k if step else 0)
            for k, (start, stop) in enumerate(cuts[(rank - step) % size], 1)
        ]
        earlier = len(recvs)
        action = STORE if step > size - 2 else REDUCE | FINAL if step == size - 2 else REDUCE
        recvs += [Recv(left, 0, start, stop, action) for start, stop in cuts[(rank - step - 1) % size]]
    return Plan(tuple(sends), tuple(recvs))


def _shared_parts(count: int, shares: Sequence[int], segment: int) -> list[list[tuple[int, int]]]:
    """Return the segments of each part, in the order in which ranks begin to send them; none of an empty one."""
    owned = divided(0, count, shares)
    return [segments(*part, segment) if part[0] < part[1] else [] for part in (owned[-1], *owned[:-1])]


def all_gather(rank: int, lengths: Sequence[int]) -> Plan:
    """Copy every block to all ranks: buffer j is rank j's block, of lengths[j]; a rank starts with its own."""
    size = len(lengths)
    right, left = (rank + 1) % size, (rank - 1) % size
    blocks = [(rank - step) % size for step in range(size)]
    return Plan(
        tuple(Send(right, block, 0, lengths[block], step) for step, block in enumerate(blocks[:-1])),
        tuple(Recv(left, block, 0, lengths[block]) for block in blocks[1:]),
    )


def broadcast(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Copy buffer 0 of `root` to all ranks, along the chain root, root + 1, and so on."""
    position = (rank - root) % size
    return _chain(rank, size, position, segments(0, count, segment), STORE)


def reduce(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Reduce buffer 0 of all ranks into that of `root`, along the chain root + 1, root + 2, and so on.

    The buffers of the other ranks are overwritten with partial results.
    """
    position = (rank - root - 1) % size
    return _chain(rank, size, position, segments(0, count, segment), REDUCE | FINAL if rank == root else REDUCE)


def _chain(rank: int, size: int, position: int, cuts: list[tuple[int, int]], action: int) -> Plan:
    """Receive each segment from the previous rank and send it to the next; `position` is this rank's in the chain."""
    right, left = (rank + 1) % size, (rank - 1) % size
    first, last = position == 0, position == size - 1
    return Plan(
        () if last else tuple(Send(right, 0, *cut, 0 if first else k) for k, cut in enumerate(cuts, 1)),
        () if first else tuple(Recv(left, 0, *cut, action) for cut in cuts),
    )
