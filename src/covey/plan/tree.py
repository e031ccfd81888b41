"""Binomial trees: log2(size) rounds from or to a root, for small buffers.

Ranks count from the root. The parent of a rank is the rank without its lowest set bit; its children are the
ranks that have one lower bit more, so a subtree is a contiguous range of ranks.
"""

from __future__ import annotations

from covey.plan.moves import FINAL, REDUCE, STORE, Plan, Recv, Send


def broadcast(rank: int, size: int, root: int, count: int) -> Plan:
    """Bring buffer 0 of `root` to everyone; the child with the deepest subtree is served first."""
    parent, children = _family(rank, size, root)
    recvs = () if parent is None else (Recv(parent, 0, 0, count, STORE),)
    return Plan(tuple(Send(child, 0, 0, count, len(recvs)) for child in reversed(children)), recvs)


def reduce(rank: int, size: int, root: int, count: int) -> Plan:
    """Reduce buffer 0 of everyone into that of `root`; the child with the shallowest subtree is heard first.

    The buffers of inner ranks are overwritten with partial results.
    """
    parent, children = _family(rank, size, root)
    closing = REDUCE | FINAL if parent is None else REDUCE
    recvs = tuple(Recv(child, 0, 0, count, closing if child == children[-1] else REDUCE) for child in children)
    return Plan(() if parent is None else (Send(parent, 0, 0, count, len(recvs)),), recvs)


def _family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return the parent (none for the root) and the children of `rank`, the deepest subtree last."""
    place = (rank - root) % size
    children = []
    bit = 1
    while not place & bit and bit < size:
        if place + bit < size:
            children.append((rank + bit) % size)
        bit *= 2
    return (None if place == 0 else (rank - bit) % size), children
