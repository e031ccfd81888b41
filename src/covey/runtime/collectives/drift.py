"""Notice from the sums themselves that links have changed, so that ranks measure anew when there is a reason.

Each rank notes the shortest time of a few calls of a size class. Then the ranks exchange these times: the rank that
enters a sum last waits for no other, so the shortest time of all ranks is that of the transfers. If it is far from what
it was when the plan was chosen, links are suspected to have changed. All ranks hold the same figures, so all suspect it
at the same call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from covey.runtime.collectives.attempt import Attempt

CALLS: Final = 32
"""Calls of a size class between two exchanges: one takes a few round trips, and each of the sums takes more."""
MOST_CALLS: Final = 1024
CHANGE: Final = 2.0
"""How many times as long, or as short, sums take if a link has changed. Less is what busy machines do."""
UNKNOWN: Final = math.inf


class Drift:
    """The times of one size class since its plan was chosen."""

    def __init__(self) -> None:
        self._every = CALLS
        self._is_suspected = False
        self.begin(has_changed=True)

    def begin(self, *, has_changed: bool) -> None:
        """Begin anew, because the links were measured; suspect less often if that has not changed the plan."""
        if self._is_suspected:
            self._every = CALLS if has_changed else min(2 * self._every, MOST_CALLS)
        self._is_suspected = False
        self._usual = UNKNOWN
        self._calls, self._shortest = 0, UNKNOWN

    def note(self, seconds: float) -> None:
        """Note what a call took on this rank."""
        self._calls += 1
        self._shortest = min(self._shortest, seconds)

    @property
    def is_due(self) -> bool:
        """Whether the ranks exchange their times before the next call. Equal on all ranks."""
        return self._calls >= self._every

    def exchange(self, attempt: Attempt) -> bool | None:
        """Exchange times with all ranks; tell whether links seem to be as they were. None: there is nothing to compare.

        A step of an operation.
        """
        figures = np.array([self._shortest], np.float64)
        attempt.all_reduce(figures, "min")
        now, before = float(figures[0]), self._usual
        self._calls, self._shortest = 0, UNKNOWN
        if not (math.isfinite(now) and now > 0):
            return None
        if before == UNKNOWN:
            self._usual = now
            return None
        if before <= CHANGE * now and now <= CHANGE * before:
            return True
        self._is_suspected = True
        return False
