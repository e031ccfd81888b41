"""Plans in which every rank exchanges transfers with every other rank directly.

Peers rotate: at step i each rank sends to rank + i and receives from rank - i, so that the load is even. All ranks
follow one order of transfers, so there is no deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE, Plan, Recv, Send, segmented_parts, segments

if TYPE_CHECKING:
    from collections.abc import Sequence


def exchange(rank: int, size: int, count: int) -> Plan:
    """All-reduce buffer 0 between two ranks (or one): they swap whole buffers, and each reduces separately."""
    if size == 1:
        return Plan()
    if size != 2:
        raise ValueError(f"an exchange is between two ranks, not {size}")
    peer = 1 - rank
    action = REDUCE | FINAL | (LEFT_OPERAND if peer < rank else 0)
    return Plan((Send(peer, 0, 0, count),), (Recv(peer, 0, 0, count, action, 1),))


def owner_reduce(rank: int, size: int, count: int, segment: int) -> Plan:
    """All-reduce buffer 0: rank p owns `part` p, reduces that part of all ranks, and sends it to all.

    A finished segment is sent right after the contributions to the next one, while it is still in the cache.
    """
    to, fro = _rotation(rank, size)
    if not to:
        return Plan()
    cuts, contributions = segmented_parts(count, size, segment), _contributions(fro)
    mine, depth = cuts[rank], len(cuts[rank])
    sends: list[Send] = []
    recvs: list[Recv] = []
    complete: list[int] = []  # complete[k] receives finish segment k of this rank's part
    for k in range(depth + 1):
        if k < depth:
            start, stop = mine[k]
            sends += [Send(peer, 0, *cuts[peer][k]) for peer in to]
            recvs += [Recv(peer, 0, start, stop, action) for peer, action in contributions]
            complete.append(len(recvs))
        if k > 0:
            start, stop = mine[k - 1]
            sends += [Send(peer, 0, start, stop, complete[k - 1]) for peer in to]
            recvs += [Recv(peer, 0, *cuts[peer][k - 1]) for peer in fro]
    return Plan(tuple(sends), tuple(recvs))


def reduce(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Reduce buffer 0 of all ranks into that of `root`: rank p owns `part` p, reduces it, and sends it to the root.

    The part that a rank owns is overwritten with the result.
    """
    to, fro = _rotation(rank, size)
    if not to:
        return Plan()
    cuts, contributions = segmented_parts(count, size, segment), _contributions(fro)
    mine, depth = cuts[rank], len(cuts[rank])
    sends: list[Send] = []
    recvs: list[Recv] = []
    complete: list[int] = []  # complete[k] receives finish segment k of this rank's part
    for k in range(depth + 1):
        if k < depth:
            sends += [Send(peer, 0, *cuts[peer][k]) for peer in to]
            recvs += [Recv(peer, 0, *mine[k], action) for peer, action in contributions]
            complete.append(len(recvs))
        if k > 0 and rank != root:
            sends.append(Send(root, 0, *mine[k - 1], complete[k - 1]))
        elif k > 0:
            recvs += [Recv(peer, 0, *cuts[peer][k - 1]) for peer in fro]
    return Plan(tuple(sends), tuple(recvs))


def broadcast(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Copy buffer 0 of `root` to all ranks: each gets its `part` from the root, and sends it to the others."""
    to, fro = _rotation(rank, size)
    if not to:
        return Plan()
    cuts = segmented_parts(count, size, segment)
    sends: list[Send] = []
    recvs: list[Recv] = []
    for k in range(len(cuts[rank])):
        if rank == root:
            sends += [Send(peer, 0, *cuts[peer][k]) for peer in to]
            sends += [Send(peer, 0, *cuts[root][k]) for peer in to]
            continue
        recvs.append(Recv(root, 0, *cuts[rank][k]))
        sends += [Send(peer, 0, *cuts[rank][k], len(recvs)) for peer in to if peer != root]
        recvs += [Recv(peer, 0, *cuts[peer][k]) for peer in fro]
    return Plan(tuple(sends), tuple(recvs))


def reduce_scatter(rank: int, counts: Sequence[int], segment: int) -> Plan:
    """Reduce part `rank` of all ranks' inputs into the last buffer.

    Buffers 0..size-1 are the parts of the input and are only read; buffer `size` has counts[rank] elements and
    starts as a copy of this rank's part.
    """
    size = len(counts)
    to, fro = _rotation(rank, size)
    cuts = [segments(0, length, segment) for length in counts]
    sends = [Send(peer, peer, *cuts[peer][k]) for k in range(max(map(len, cuts))) for peer in to if k < len(cuts[peer])]
    recvs = [
        Recv(peer, size, start, stop, action) for start, stop in cuts[rank] for peer, action in _contributions(fro)
    ]
    return Plan(tuple(sends), tuple(recvs))


def all_gather(rank: int, lengths: Sequence[int]) -> Plan:
    """Copy every block to all ranks: buffer j is rank j's block, of lengths[j]; a rank starts with its own."""
    to, fro = _rotation(rank, len(lengths))
    return Plan(
        tuple(Send(peer, rank, 0, lengths[rank]) for peer in to),
        tuple(Recv(peer, peer, 0, lengths[peer]) for peer in fro),
    )


def all_to_all(rank: int, out_lengths: Sequence[int], in_lengths: Sequence[int]) -> Plan:
    """Send buffer j to rank j, and receive its buffer for this rank into buffer size + j.

    A rank's block for itself is not moved: the caller copies it.
    """
    size = len(out_lengths)
    to, fro = _rotation(rank, size)
    return Plan(
        tuple(Send(peer, peer, 0, out_lengths[peer]) for peer in to),
        tuple(Recv(peer, size + peer, 0, in_lengths[peer]) for peer in fro),
    )


def gather(rank: int, root: int, lengths: Sequence[int]) -> Plan:
    """Copy buffer j of every rank j to buffer j of `root`."""
    if rank != root:
        return Plan(sends=(Send(root, rank, 0, lengths[rank]),))
    to, _ = _rotation(root, len(lengths))
    return Plan(recvs=tuple(Recv(peer, peer, 0, lengths[peer]) for peer in to))


def scatter(rank: int, root: int, lengths: Sequence[int]) -> Plan:
    """Copy buffer j of `root` to buffer j of every rank j."""
    if rank != root:
        return Plan(recvs=(Recv(root, rank, 0, lengths[rank]),))
    to, _ = _rotation(root, len(lengths))
    return Plan(sends=tuple(Send(peer, peer, 0, lengths[peer]) for peer in to))


def _rotation(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return the ranks to send to and the ranks to receive from, step by step."""
    steps = range(1, size)
    return [(rank + step) % size for step in steps], [(rank - step) % size for step in steps]


def _contributions(peers: list[int]) -> list[tuple[int, int]]:
    """Return the peers with the actions of their receives: REDUCE for all, and FINAL for the last."""
    return [(peer, REDUCE) for peer in peers[:-1]] + [(peer, REDUCE | FINAL) for peer in peers[-1:]]
