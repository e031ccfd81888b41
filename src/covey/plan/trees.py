"""An all-reduce along trees: each range of the array has a tree of all ranks, with its owner as the root.

A rank combines what its children send with its own part, and sends it to its parent. The root's result goes down the
same way. So every element is finished by one rank and copied to the others, and all ranks have the same bits. Rings,
direct exchanges and plans in levels differ only in their trees.

All transfers have one order, that of their keys, and every rank sends and receives in it. Each transfer depends on
earlier ones only, so there is no deadlock on any lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan.moves import FINAL, REDUCE, STORE, Plan, Recv, Send, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = -1


class Cell(NamedTuple):
    """A range of elements, and the tree along which it is combined."""

    start: int
    stop: int
    parents: tuple[int, ...]
    """By rank; ROOT for the owner, which finishes the range."""


class _Hop(NamedTuple):
    """One transfer of one piece between this rank and its parent or a child; hops are carried out in order."""

    time: int
    """When the piece begins, and as many units later as this is a later step of it."""
    step: int
    distance: int
    source: int
    target: int
    cell: int
    piece: int


def all_reduce(rank: int, size: int, cells: Sequence[Cell], segment: int) -> Plan:
    """All-reduce buffer 0, whose elements are divided among `cells`, none of which is empty.

    Cells are cut into pieces of at most `segment` elements; those of all cells begin and end together.
    """
    if size == 1:
        return Plan()
    cuts = [pieces(cell.start, cell.stop, -(-(cell.stop - cell.start) // segment)) for cell in cells]
    most = max(map(len, cuts), default=0)
    hops = sorted(
        hop
        for index, cell in enumerate(cells)
        for hop in _hops(
            rank, size, index, cell, [piece * most // len(cuts[index]) for piece in range(len(cuts[index]))]
        )
    )
    contributions: dict[tuple[int, int], int] = {}  # to each piece that this rank owns
    for hop in hops:
        if hop.target == rank and cells[hop.cell].parents[rank] == ROOT:
            piece = hop.cell, hop.piece
            contributions[piece] = contributions.get(piece, 0) + 1
    sends: list[Send] = []
    recvs: list[Recv] = []
    received: dict[tuple[int, int], int] = {}  # how many receives bring a piece to its present state
    for hop in hops:
        piece = hop.cell, hop.piece
        start, stop = cuts[hop.cell][hop.piece]
        if hop.source == rank:
            sends.append(Send(hop.target, 0, start, stop, received.get(piece, 0)))
            continue
        action = STORE if hop.source == cells[hop.cell].parents[rank] else REDUCE
        if piece in contributions:
            contributions[piece] -= 1
            action |= 0 if contributions[piece] else FINAL
        recvs.append(Recv(hop.source, 0, start, stop, action))
        received[piece] = len(recvs)
    return Plan(tuple(sends), tuple(recvs))


def _hops(rank: int, size: int, index: int, cell: Cell, times: list[int]) -> Iterator[_Hop]:
    """Yield the transfers of a cell that this rank takes part in; its pieces begin at `times`."""
    parent = cell.parents[rank]
    heights = _heights(cell.parents)
    last = 2 * max(heights) - 1
    edges = [] if parent == ROOT else [(rank, parent)]
    edges += [(child, rank) for child, above in enumerate(cell.parents) if above == rank]
    for child, above in edges:
        # A rank sends as soon as all below it have sent: the same levels of all trees meet in the same step.
        up = heights[child]
        down = last - up
        for piece, time in enumerate(times):
            yield _Hop(time + up, up, (above - child) % size, child, above, index, piece)
            yield _Hop(time + down, down, (child - above) % size, above, child, index, piece)


def _heights(parents: tuple[int, ...]) -> list[int]:
    """Return how long the longest way up to each rank is."""
    heights, waiting = [0] * len(parents), [0] * len(parents)
    for parent in parents:
        if parent != ROOT:
            waiting[parent] += 1
    ready = [rank for rank, children in enumerate(waiting) if not children]
    for rank in ready:
        parent = parents[rank]
        if parent != ROOT:
            heights[parent] = max(heights[parent], heights[rank] + 1)
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
    return heights
