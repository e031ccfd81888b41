"""Which members of a large run keep their links open: each with a few others, such that all are connected by few steps.

A member has a place: its rank. In `kregular` its neighbours are at distances 1, 2, 4, ... in both directions of a ring,
so it has about twice the logarithm of the size. In `hypercube` they are the places that differ in one binary digit:
half as many. In both, the next living member on the ring is a neighbour, too.

Where a member is lost, each place that chose it chooses another one instead, by arithmetic that differs from place to
place: neighbouring ranks are on one machine and are lost together, and one stand-in for all of them would have to link
with nearly all others.

Invariants, for every set of living members: neighbours are so mutually; all living members are connected; a member that
has others has at least the next one on the ring; a loss adds and removes only links that have the lost member, or one
of its neighbours, at an end.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Collection

Topology: TypeAlias = Literal["full", "kregular", "hypercube"]
SPARSE: Final[tuple[Topology, ...]] = ("kregular", "hypercube")
FULL_UP_TO: Final = 32
"""Members up to which `auto` keeps all links: below, a full mesh costs little, and no news takes a second step."""
SCATTER: Final = 0x9E3779B1
"""Near 2**32 divided by the golden ratio, so that its multiples are spread evenly (Knuth, volume 3, 6.4); and one more
than a multiple of four, so that repeated multiplication and addition passes all places (volume 2, 3.2.1.2)."""


def topology_of(setting: str, size: int) -> Topology:
    """Return the topology that a setting means for a run of this size; `auto` is full up to FULL_UP_TO members."""
    if setting == "auto":
        return "full" if size <= FULL_UP_TO else "kregular"
    return cast("Topology", setting)


class Overlay:
    """The neighbours of each of `size` places of which some are living."""

    def __init__(self, topology: Topology, size: int, living: Collection[int]) -> None:
        self._topology, self._size = topology, size
        self._ring = sorted(living)
        self._living = frozenset(living)
        self._steps = [1 << digit for digit in range((size - 1).bit_length())]

    def neighbours(self, place: int) -> frozenset[int]:
        """Return the neighbours of a living place."""
        if self._topology == "full" or len(self._ring) < 3:
            return self._living - {place}
        index = bisect.bisect_left(self._ring, place)
        found = {self._ring[index - 1], self._ring[(index + 1) % len(self._ring)]}
        for step in self._steps:
            if (chooser := self._chooser(place, step)) in self._living:
                found.add(chooser)
            if (chosen := self._chosen(place, step)) < self._size:
                found.add(chosen if chosen in self._living else self._stand_in(place, step, chosen))
        return frozenset(found | self._represented(place))

    def _chosen(self, place: int, step: int) -> int:
        """Return the place that a place chooses at this step, lost or not; if it is not below the size, none."""
        return place ^ step if self._topology == "hypercube" else (place + step) % self._size

    def _chooser(self, place: int, step: int) -> int:
        """Return the place, lost or not, that chooses this one at this step."""
        return place ^ step if self._topology == "hypercube" else (place - step) % self._size

    def _represented(self, place: int) -> set[int]:
        """Return the living places that would choose a lost one, and for which this place stands in."""
        return {
            chooser
            for lost in range(self._size)
            if lost not in self._living
            for step in self._steps
            if (chooser := self._chooser(lost, step)) in self._living
            and chooser != place
            and self._stand_in(chooser, step, lost) == place
        }

    def _stand_in(self, place: int, step: int, lost: int) -> int:
        """Return the living place that a place chooses instead of a lost one."""
        at, among = lost, (1 << len(self._steps)) - 1
        added = (place * len(self._steps) + step.bit_length()) * SCATTER >> 11 | 1
        while at == place or at not in self._living:
            at = at * SCATTER + added & among
        return at
