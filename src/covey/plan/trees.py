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
    """Pieces follow each other through the tree, one a unit of time: piece + step."""
    step: int
    distance: int
    source: int
    target: int
    cell: int
    piece: int


def rounds(cells: Sequence[Cell], segment: int) -> int:
    """Return into how many pieces each cell is cut, so that none is longer than `segment`."""
    longest = max((cell.stop - cell.start for cell in cells), default=0)
    return max(1, -(-longest // segment))


def all_reduce(rank: int, size: int, cells: Sequence[Cell], segment: int) -> Plan:
    """All-reduce buffer 0, whose elements are divided among `cells`; empty pieces do not travel."""
    number = rounds(cells, segment)
    cuts = [pieces(cell.start, cell.stop, number) for cell in cells]
    hops = sorted(
        hop
        for index, cell in enumerate(cells)
        for hop in _hops(rank, size, index, cell, number)
        if cuts[index][hop.piece][0] < cuts[index][hop.piece][1]
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


def _hops(rank: int, size: int, index: int, cell: Cell, number: int) -> Iterator[_Hop]:
    """Yield the transfers of a cell that this rank takes part in."""
    parent = cell.parents[rank]
    depths, height = _depths(cell.parents)
    edges = [] if parent == ROOT else [(rank, parent)]
    edges += [(child, rank) for child, above in enumerate(cell.parents) if above == rank]
    for child, above in edges:
        depth = depths[child]
        up, down = height - depth, height + depth - 1
        for piece in range(number):
            yield _Hop(piece + up, up, (above - child) % size, child, above, index, piece)
            yield _Hop(piece + down, down, (child - above) % size, above, child, index, piece)


def _depths(parents: tuple[int, ...]) -> tuple[list[int], int]:
    """Return the distance of every rank from the root, and the longest one."""
    known = [0 if parent == ROOT else -1 for parent in parents]
    for rank in range(len(parents)):
        path = []
        at = rank
        while known[at] < 0:
            path.append(at)
            at = parents[at]
        for below, each in enumerate(reversed(path), 1):
            known[each] = known[at] + below
    return known, max(known)
