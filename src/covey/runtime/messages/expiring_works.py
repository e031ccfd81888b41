"""The works of a messenger that no thread waits for, by deadline. Callers hold the messenger's lock."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.runtime.work import Work


class ExpiringWorks:
    """Works that fail at their deadline, which is on time.monotonic(). Only the driving thread removes works."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Work[Any]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, work: Work[Any], deadline: float) -> None:
        """Let a work fail at `deadline`, unless it is done by then."""
        heapq.heappush(self._heap, (deadline, next(self._order), work))

    def next_deadline(self) -> float:
        """Return the deadline of the next work that is not done; infinite if there is none."""
        while self._heap and self._heap[0][2].done():
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def take_due(self) -> Work[Any] | None:
        """Remove and return a work whose deadline has passed, if there is one."""
        if self._heap and self._heap[0][0] <= time.monotonic():
            return heapq.heappop(self._heap)[2]
        return None
