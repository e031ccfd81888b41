"""Plans in which every rank deals with every other one directly.

Ranks are taken in rotation (at step i everyone sends to rank + i and hears from rank - i), so no rank is
swamped while another idles. Each transfer has a place in one order that all ranks follow, hence no deadlock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.plan.moves import FINAL, LEFT, REDUCE, Plan, Recv, Send, segmented_parts, segments

if TYPE_CHECKING:
    from collections.abc import Sequence


def exchange(rank: int, size: int, count: int) -> Plan:
    """All-reduce buffer 0 between two ranks (or one): they swap it whole and each reduces for itself."""
    if size == 1:
        return Plan()
    if size != 2:
        raise ValueError(f"an exchange is between two ranks, not {size}")
    peer = 1 - rank
    action = REDUCE | FINAL | (LEFT if peer < rank else 0)
    return Plan((Send(peer, 0, 0, count),), (Recv(peer, 0, 0, count, action, 1),))


def owner_reduce(rank: int, size: int, count: int, segment: int) -> Plan:
    """All-reduce buffer 0: rank p owns `part` p, reduces everyone's share of it and hands it to everyone.

    Finished segments go out right behind the next segment's contributions, while they are still in cache.
    """
    to, fro = _rotation(rank, size)
    if not to:
        return Plan()
    cuts, contributions = segmented_parts(count, size, segment), _contributions(fro)
    mine, depth = cuts[rank], len(cuts[rank])
    sends: list[Send] = []
    recvs: list[Recv] = []
    complete: list[int] = []  # complete[k] receives finish segment k of the own part
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


def reduce_scatter(rank: int, counts: Sequence[int], segment: int) -> Plan:
    """Reduce part `rank` of everyone's input into the last buffer.

    Buffers 0..size-1 are the parts of the input and are only read; buffer `size` has counts[rank] elements and
    starts as a copy of the own part.
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
    """Give everyone every block: buffer j is rank j's block of lengths[j]; the own one is in place at the start."""
    to, fro = _rotation(rank, len(lengths))
    return Plan(
        tuple(Send(peer, rank, 0, lengths[rank]) for peer in to),
        tuple(Recv(peer, peer, 0, lengths[peer]) for peer in fro),
    )


def all_to_all(rank: int, out_lengths: Sequence[int], in_lengths: Sequence[int]) -> Plan:
    """Give rank j what stands in buffer j, and take what it has for us into buffer size + j.

    The block a rank has for itself is not moved: the caller copies it.
    """
    size = len(out_lengths)
    to, fro = _rotation(rank, size)
    return Plan(
        tuple(Send(peer, peer, 0, out_lengths[peer]) for peer in to),
        tuple(Recv(peer, size + peer, 0, in_lengths[peer]) for peer in fro),
    )


def gather(rank: int, root: int, lengths: Sequence[int]) -> Plan:
    """Bring buffer j of every rank j to buffer j of `root`."""
    if rank != root:
        return Plan(sends=(Send(root, rank, 0, lengths[rank]),))
    to, _ = _rotation(root, len(lengths))
    return Plan(recvs=tuple(Recv(peer, peer, 0, lengths[peer]) for peer in to))


def scatter(rank: int, root: int, lengths: Sequence[int]) -> Plan:
    """Bring buffer j of `root` to buffer j of every rank j."""
    if rank != root:
        return Plan(recvs=(Recv(root, rank, 0, lengths[rank]),))
    to, _ = _rotation(root, len(lengths))
    return Plan(sends=tuple(Send(peer, peer, 0, lengths[peer]) for peer in to))


def _rotation(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Return whom to send to and whom to hear from, step by step."""
    steps = range(1, size)
    return [(rank + step) % size for step in steps], [(rank - step) % size for step in steps]


def _contributions(peers: list[int]) -> list[tuple[int, int]]:
    """Return who is heard and how it is applied: all are reduced, and the last one completes the result."""
    return [(peer, REDUCE) for peer in peers[:-1]] + [(peer, REDUCE | FINAL) for peer in peers[-1:]]
