"""Who leads: the owner of the highest promised ballot, as long as a quorum keeps telling it so.

The owner claims (`Pulse`) and the others echo the time of its claim; a quorum's echo is a lease of LEASE seconds from
the claim on. Whoever promises a later ballot echoes no more. A new leader waits a little longer than a lease from its
first quorum on before it calls itself one, so there is at most one at any time if clocks run at nearly the same rate;
proposing views does not wait for this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

LEASE: Final = 2.0
"""Seconds that a claim lasts. Longer, and a new leader is known later; shorter, and the leader's pulse costs more."""
DRIFT: Final = 1.1
"""How much longer a lease may be by another clock."""


class Lease:
    """One member's claim to lead, while the highest ballot it knows is its own."""

    def __init__(self, title_at: float = math.inf) -> None:
        self._title_at = title_at
        """From then on this member may call itself the leader."""
        self._echoes: dict[int, float] = {}

    def echoed(self, place: int, stamp: float, is_quorum: Callable[[Collection[int]], bool], now: float) -> None:
        """A member answered a claim; `is_quorum` knows whose echoes, besides this member's own, count."""
        self._echoes[place] = max(stamp, self._echoes.get(place, -math.inf))
        if self._title_at == math.inf and self._until(is_quorum) > now:
            self._title_at = now + LEASE * DRIFT

    def lost(self) -> None:
        """A later ballot was promised."""
        self._title_at, self._echoes = math.inf, {}

    def is_held(self, is_quorum: Callable[[Collection[int]], bool], now: float) -> bool:
        """Tell whether this member leads."""
        return self._title_at <= now < self._until(is_quorum)

    def _until(self, is_quorum: Callable[[Collection[int]], bool]) -> float:
        """Return when the lease ends: LEASE after the last claim that a quorum echoed."""
        if is_quorum(()):
            return math.inf
        places = sorted(self._echoes, key=lambda place: -self._echoes[place])
        for count in range(1, len(places) + 1):
            if is_quorum(places[:count]):
                return self._echoes[places[count - 1]] + LEASE
        return -math.inf
