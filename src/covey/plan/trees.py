"""Plans along trees.

`broadcast` and `reduce` use binomial trees: log2(size) rounds from or to a root, for small buffers. In a star the root
exchanges all with every rank itself. `all_reduce` has a tree of all ranks for each range of the array, with its owner
as the root; `whole` is one for all of it. `cells` and `divisions` make the trees of plans in levels: inside a host
first, then inside a site, then across.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan.moves import FINAL, REDUCE, STORE, Plan, Recv, Send, divided, pieces, segments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT_PARENT: Final = -1
MOST_IN_STAR: Final = 16
"""Parts of a group up to which each sends to the owner directly. More of them form a chain that ends at the owner: it
needs two lanes a rank instead of one to every other."""
Groups = tuple[tuple[int, ...], ...]


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


def star_broadcast(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Copy buffer 0 of `root` to all ranks, in pieces that it sends to each itself."""
    cuts = segments(0, count, segment)
    if rank != root:
        return Plan(recvs=tuple(Recv(root, 0, *cut) for cut in cuts))
    return Plan(tuple(Send(peer, 0, *cut) for cut in cuts for peer in _others(root, size)))


def star_reduce(rank: int, size: int, root: int, count: int, segment: int) -> Plan:
    """Reduce buffer 0 of all ranks into that of `root`, which receives all of them. Others do not change."""
    cuts = segments(0, count, segment)
    if rank != root:
        return Plan(tuple(Send(root, 0, *cut) for cut in cuts))
    peers = _others(root, size)
    return Plan(
        recvs=tuple(
            Recv(peer, 0, *cut, REDUCE | FINAL if peer == peers[-1] else REDUCE) for cut in cuts for peer in peers
        )
    )


def _others(rank: int, size: int) -> list[int]:
    return [(rank + step) % size for step in range(1, size)]


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


class Cell(NamedTuple):
    """A range of elements, and the tree along which it is combined."""

    start: int
    stop: int
    parents: tuple[int, ...]
    """By rank; ROOT_PARENT for the owner, which finishes the range."""


def whole(size: int, count: int, *, is_star: bool) -> tuple[Cell, ...]:
    """Return the cell of an all-reduce that rank 0 finishes alone: at the root of a binomial tree, or of a star."""
    parents = [0 if is_star else _family(rank, size, 0)[0] or 0 for rank in range(1, size)]
    return (Cell(0, count, (ROOT_PARENT, *parents)),) if count else ()


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
        if hop.target == rank and cells[hop.cell].parents[rank] == ROOT_PARENT:
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
    edges = [] if parent == ROOT_PARENT else [(rank, parent)]
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
        if parent != ROOT_PARENT:
            waiting[parent] += 1
    ready = [rank for rank, children in enumerate(waiting) if not children]
    for rank in ready:
        parent = parents[rank]
        if parent != ROOT_PARENT:
            heights[parent] = max(heights[parent], heights[rank] + 1)
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)
    return heights


@lru_cache(maxsize=4)  # large for many slots, and used for all ranks of one plan at a time
def cells(size: int, groups: Groups, shares: tuple[int, ...], count: int) -> tuple[Cell, ...]:
    """Return the cells of an all-reduce of `count` elements among `size` slots; no `shares` are equal ones."""
    weights = shares or (1,) * size
    return tuple(
        Cell(own.start, own.stop, tuple(own.parents.get(slot, ROOT_PARENT) for slot in range(size)))
        for own in _owned(_nested(tuple(range(size)), groups), weights, 0, count)
    )


def divisions(size: int, groups: Groups) -> list[tuple[tuple[int, ...], ...]]:
    """Return for each group that is divided the slots of its parts, outer groups first."""
    found = []
    waiting = [_nested(tuple(range(size)), groups)]
    while waiting:
        part = waiting.pop(0)
        if part.inside:
            found.append(tuple(inner.slots for inner in part.inside))
            waiting += part.inside
    return found


class _Part(NamedTuple):
    """A group and the groups directly inside it; a slot is a group without any."""

    slots: tuple[int, ...]
    inside: tuple[_Part, ...]


class _Owned(NamedTuple):
    """A range of elements with its owner in a group, and the ways to it inside the group."""

    start: int
    stop: int
    owner: int
    parents: dict[int, int]


def _nested(slots: tuple[int, ...], groups: Groups) -> _Part:
    """Return the tree of groups below one that holds `slots`, in their order."""
    if len(slots) == 1:
        return _Part(slots, ())
    within = [group for group in groups if len(group) < len(slots) and set(group) <= set(slots)]
    outermost = [group for group in within if not any(set(group) < set(other) for other in within)]
    grouped = {slot for group in outermost for slot in group}
    outermost += [(slot,) for slot in slots if slot not in grouped]
    outermost.sort(key=lambda group: slots.index(group[0]))
    return _Part(slots, tuple(_nested(group, groups) for group in outermost))


def _owned(part: _Part, weights: Sequence[int], start: int, stop: int) -> list[_Owned]:
    """Divide a range among the owners of a group."""
    if not part.inside:
        return [_Owned(start, stop, part.slots[0], {})]
    tables = [_owned(inner, weights, start, stop) for inner in part.inside]
    sums = [sum(weights[slot] for slot in inner.slots) for inner in part.inside]
    found = []
    for begin, end in pairwise(sorted({start, stop, *(own.start for table in tables for own in table)})):
        columns = [next(own for own in table if own.start <= begin and end <= own.stop) for table in tables]
        below = {slot: parent for own in columns for slot, parent in own.parents.items()}
        owners = [own.owner for own in columns]
        for index, (first, last) in enumerate(divided(begin, end, sums)):
            if first < last:
                found.append(_Owned(first, last, owners[index], {**below, **_edges(owners, index)}))
    return found


def _edges(owners: list[int], index: int) -> dict[int, int]:
    """Return the parent of every owner but the one at `index`, which is the group's."""
    if len(owners) <= MOST_IN_STAR:
        return {slot: owners[index] for slot in owners if slot != owners[index]}
    chain = owners[index + 1 :] + owners[: index + 1]
    return dict(pairwise(chain))
