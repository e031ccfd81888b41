"""Whether a mismatch is behind the loss of a rank: what the ranks of a group tell each other before they decide.

A group that ends with its first loss must not blame the loss if ranks had called different things before: what a killed
rank sent may lie unread in the lanes of some ranks and prove it. Each rank that hears of a loss does this, once:

1. It *looks* at its lanes. What had arrived before the loss is still there: the kernel keeps it until it is read. What
   it finds says what other ranks called as which operation, that of the lost rank among them.
2. It *testifies*: it tells all others its own last calls and what it has found.
3. It waits until every other rank has testified, or is gone. All ranks that remain have the same testimonies then, so
   they come to the same verdict: if two calls with one number differ, wherever they are known from, the group ends with
   a mismatch, else with the loss.

A rank that hears only of the loss by another rank's testimony looks after it, and so after the loss. So a call proves a
mismatch whichever rank made it, whichever rank holds the bytes, and whether that rank is in an operation or not.

A rank waits no longer than `PATIENCE` for ranks that are alive and do not testify: their processes get no processor
time, hold the interpreter's lock in one long call, or are cut off from this rank. If such a rank alone can prove the
mismatch, the others end with the loss. A call that a rank makes after it has testified is compared by that rank alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PATIENCE: Final = 2.0
"""Seconds that a rank waits for the testimony of ranks that are alive. All others testify within milliseconds."""


class Hearing:
    """What one rank knows of the calls in its group once a loss is suspected."""

    def __init__(self, others: Collection[int]) -> None:
        self._waiting = set(others)
        self._calls: dict[int, set[int]] = {}
        """By number of an operation: the fingerprints with which ranks are known to have called it."""
        self._until = math.inf
        self.differs_at = 0
        """The first operation that ranks are known to have called differently; 0 for none."""

    @property
    def is_over(self) -> bool:
        """Whether the verdict is known: a mismatch if `differs_at` is set, else a loss."""
        return self.differs_at > 0 or (self._until < math.inf and not self._waiting)

    @property
    def waiting(self) -> frozenset[int]:
        """The ranks that have neither testified nor gone."""
        return frozenset(self._waiting)

    def looked(self, calls: Mapping[int, int], found: Collection[tuple[int, int]], now: float) -> None:
        """Note this rank's own calls, by number, and the calls of others that it has found, each as number and call."""
        self._until = min(self._until, now + PATIENCE)
        self._note([*calls.items(), *found])

    def heard(self, rank: int, calls: Mapping[int, int], found: Collection[tuple[int, int]]) -> None:
        """Note the testimony of another rank: its calls and what it has found."""
        self._waiting.discard(rank)
        self._note([*calls.items(), *found])

    def gone(self, rank: int) -> None:
        """Note that a rank is lost, has left or has closed the group: it does not testify any more."""
        self._waiting.discard(rank)

    def _note(self, calls: Collection[tuple[int, int]]) -> None:
        for number, call in calls:
            known = self._calls.setdefault(number, set())
            known.add(call)
            if len(known) > 1:
                self.differs_at = min(self.differs_at or number, number)

    # The shape of cores with deadlines

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return math.inf if self.is_over else self._until

    def tick(self, now: float) -> None:
        """Give up waiting for ranks that do not testify."""
        if now >= self._until:
            self._waiting.clear()
