"""Which members of a large run keep their links open: each with a few others, such that all are connected by few steps.

A member has a place: its rank. In `kregular` its neighbours are at distances 1, 2, 4, ... in both directions of a ring, so
it has about twice the logarithm of the size. In `hypercube` they are the places that differ in one binary digit: half as
many. Where a member is lost, the next one on the ring stands in for it, so a loss changes only the links of its neighbours.

Invariants, for every set of living members: neighbours are so mutually; all living members are connected; a member that
has others has at least the next one on the ring.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Collection

Topology: TypeAlias = Literal["full", "kregular", "hypercube"]
TOPOLOGIES: Final[tuple[str, ...]] = get_args(Topology)
FULL_UP_TO: Final = 32
"""Members up to which `auto` keeps all links: below, a full mesh costs little, and no news takes a second step."""


def topology_of(setting: str, size: int) -> Topology:
    """Return the topology that a setting means for a run of this size; `auto` is full up to FULL_UP_TO members."""
    if setting == "auto":
        return "full" if size <= FULL_UP_TO else "kregular"
    assert setting in ("full", "kregular", "hypercube")
    return setting  # type: ignore[return-value]


class Overlay:
    """The neighbours of each of `size` places of which some are living."""

    def __init__(self, topology: Topology, size: int, living: Collection[int]) -> None:
        self._topology, self._size = topology, size
        self._living = sorted(living)

    def neighbours(self, place: int) -> frozenset[int]:
        """Return the neighbours of a living place."""
        if self._topology == "full":
            return frozenset(self._living) - {place}
        chosen = set(self._chosen(place))
        chosen.update(other for other in self._living if place in self._chosen(other))
        return frozenset(chosen - {place})

    def _chosen(self, place: int) -> list[int]:
        """Return the places that a place chooses for itself; those that choose it are its neighbours, too."""
        size = self._size
        steps = [1 << digit for digit in range(max(1, (size - 1).bit_length()))]
        if self._topology == "hypercube":
            wanted = [place ^ step for step in steps if place ^ step < size]
        else:
            wanted = [(place + step) % size for step in steps if step < size]
        return [self._living_from(place + 1), *map(self._living_from, wanted)]

    def _living_from(self, place: int) -> int:
        """Return the first living place from here on, around the ring."""
        index = bisect.bisect_left(self._living, place)
        return self._living[index % len(self._living)]
