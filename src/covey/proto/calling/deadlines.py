"""Deadlines by key: the next one, and those that have passed."""

from __future__ import annotations

import heapq
import math
from typing import Final, TypeAlias

CallKey: TypeAlias = tuple[int, int]
_SLACK: Final = 64
"""How many entries without a deadline the heap may have besides one for each deadline."""


class Deadlines:
    """A bounded heap: most calls end long before their deadline, so entries are dropped in lots."""

    def __init__(self) -> None:
        self._at: dict[CallKey, float] = {}
        self._heap: list[tuple[float, CallKey]] = []
        self.not_before = math.inf
        """A lower bound of `next`, which costs nothing to read."""

    def add(self, key: CallKey, at: float) -> None:
        """Set the deadline of a key that has none."""
        self._at[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, key) for key, at in self._at.items()]
            heapq.heapify(self._heap)
        self.not_before = self._heap[0][0]

    def discard(self, key: CallKey) -> None:
        """Remove the deadline of a key, if it has one."""
        self._at.pop(key, None)

    def next(self) -> float:
        """Return the next deadline; inf if there is none."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.not_before = self._heap[0][0] if self._heap else math.inf
        return self.not_before

    def take_due(self, now: float) -> list[CallKey]:
        """Remove and return the keys whose deadline has passed, in order."""
        due = []
        while self.next() <= now:
            due.append(heapq.heappop(self._heap)[1])
            del self._at[due[-1]]
        return due
