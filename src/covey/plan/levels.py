"""The trees of plans in levels: inside a host first, then inside a site, then across.

`groups` lists the groups of slots of all levels. Of two groups, one contains the other or they are disjoint; all slots
together are the outermost group, which is not listed. Each element has an owner in every group. Inside a group, the
owners of its parts send to the group's owner of the element, which is one of them. So the owner of the outermost group
finishes it.

`shares` are weights, one a slot. A group's owners divide the array in proportion to their shares, and parts of unequal
groups need not have the same size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.plan.moves import divided
from covey.plan.trees import ROOT, Cell

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_IN_STAR: Final = 16
"""Parts of a group up to which each sends to the owner directly. More of them form a chain that ends at the owner: it
needs two lanes a rank instead of one to every other."""

Groups = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4)  # large for many slots, and used for all ranks of one plan at a time
def cells(size: int, groups: Groups, shares: tuple[int, ...], count: int) -> tuple[Cell, ...]:
    """Return the cells of an all-reduce of `count` elements among `size` slots; no `shares` are equal ones."""
    weights = shares or (1,) * size
    return tuple(
        Cell(own.start, own.stop, tuple(own.parents.get(slot, ROOT) for slot in range(size)))
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
