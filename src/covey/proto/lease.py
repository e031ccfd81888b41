"""The leader's lease: the owner of the highest promised ballot leads while a quorum echoes its claims.

The owner claims (`Pulse`) and the other members echo the time of the claim; the echoes of a quorum are a lease of LEASE
seconds from the claim. A member that promises a later ballot does not echo any more. A new leader waits a little longer
than a lease after its first quorum before it leads, so there is at most one leader at any time if clocks run at nearly
the same rate. Proposing views does not wait for this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

LEASE: Final = 2.0
"""Seconds that a claim lasts. A longer lease delays a new leader; a shorter one needs more pulses."""
DRIFT: Final = 1.1
"""How much longer a lease may be by another clock."""


class Lease:
    """One member's claim to lead, while the highest ballot it knows is its own."""

    def __init__(self, title_at: float = math.inf) -> None:
        self._title_at = title_at
        """When this member may begin to lead."""
        self._echoes: dict[int, float] = {}

    def echoed(self, rank: int, stamp: float, is_quorum: Callable[[Collection[int]], bool], now: float) -> None:
        """Note the echo of a claim; `is_quorum` tells whether some ranks, with this member, are a quorum."""
        self._echoes[rank] = max(stamp, self._echoes.get(rank, -math.inf))
        if self._title_at == math.inf and self._until(is_quorum) > now:
            self._title_at = now + LEASE * DRIFT

    def lost(self) -> None:
        """Give up the lease: a later ballot was promised."""
        self._title_at, self._echoes = math.inf, {}

    def is_held(self, is_quorum: Callable[[Collection[int]], bool], now: float) -> bool:
        """Tell whether this member leads."""
        return self._title_at <= now < self._until(is_quorum)

    def _until(self, is_quorum: Callable[[Collection[int]], bool]) -> float:
        """Return when the lease ends: LEASE seconds after the last claim that a quorum echoed."""
        if is_quorum(()):
            return math.inf
        ranks = sorted(self._echoes, key=lambda rank: -self._echoes[rank])
        for count in range(1, len(ranks) + 1):
            if is_quorum(ranks[:count]):
                return self._echoes[ranks[count - 1]] + LEASE
        return -math.inf
