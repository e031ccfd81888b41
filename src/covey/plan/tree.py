"""Binomial trees: log2(size) rounds from or to a root, for small buffers.

Positions count from the root. The parent of a position is the number without its lowest set bit; its children have
one lower bit set in addition, so that a subtree is a contiguous range.
"""

from __future__ import annotations

from covey.plan.moves import FINAL, REDUCE, STORE, Plan, Recv, Send


def broadcast(rank: int, size: int, root: int, count: int) -> Plan:
    """Copy buffer 0 of `root` to all ranks; the child with the deepest subtree is served first."""
    parent, children = _family(rank, size, root)
    recvs = () if parent is None else (Recv(parent, 0, 0, count, STORE),)
    return Plan(tuple(Send(child, 0, 0, count, len(recvs)) for child in reversed(children)), recvs)


def reduce(rank: int, size: int, root: int, count: int) -> Plan:
    """Reduce buffer 0 of all ranks into that of `root`; the child with the shallowest subtree is received first.

    The buffers of inner ranks are overwritten with partial results.
    """
    parent, children = _family(rank, size, root)
    closing = REDUCE | FINAL if parent is None else REDUCE
    recvs = tuple(Recv(child, 0, 0, count, closing if child == children[-1] else REDUCE) for child in children)
    return Plan(() if parent is None else (Send(parent, 0, 0, count, len(recvs)),), recvs)


def _family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return the parent (none for the root) and the children of `rank`, the deepest subtree last."""
    position = (rank - root) % size
    children = []
    bit = 1
    while not position & bit and bit < size:
        if position + bit < size:
            children.append((rank + bit) % size)
        bit *= 2
    return (None if position == 0 else (rank - bit) % size), children
