"""Which call is next: deadlines, queues that serve peers in turn, and how many handlers each peer may have."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from covey.base.numbers import PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

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


class FairQueue(Generic[T]):
    """Items by peer: first in, first out for each peer, and one item of each peer in turn."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[T]] = {}
        """By peer: its items, if it has any. The peer whose turn it is comes first."""

    def push(self, peer: int, item: T) -> None:
        """Add an item at the end of a peer's line."""
        self.lines.setdefault(peer, deque()).append(item)

    def pop(self, may_serve: Callable[[int, T], bool]) -> T | None:
        """Remove and return the next item that may be served, or None: the first one for which `may_serve` is true."""
        for peer, line in self.lines.items():
            if may_serve(peer, line[0]):
                item = line.popleft()
                del self.lines[peer]
                if line:
                    self.lines[peer] = line  # after all others
                return item
        return None

    def remove(self, peer: int, item: T) -> None:
        """Remove an item that is in the queue."""
        self.lines[peer].remove(item)
        if not self.lines[peer]:
            del self.lines[peer]

    def peers(self) -> list[int]:
        """Return the peers that have items here."""
        return list(self.lines)

    def of(self, peer: int) -> list[T]:
        """Return the items of a peer, in order."""
        return list(self.lines.get(peer, ()))


class ClassedQueue(Generic[T]):
    """Items by class and peer: those of a class come after those of the classes above it that may be served."""

    def __init__(self) -> None:
        self._classes: tuple[FairQueue[T], ...] = tuple(FairQueue() for _ in PRIORITIES)
        self.count = 0
        """How many items there are."""

    def push(self, peer: int, item: T, priority: int) -> None:
        """Add an item at the end of a peer's line of its class."""
        self._classes[priority].push(peer, item)
        self.count += 1

    def pop(self, may_serve: Callable[[int, T], bool]) -> T | None:
        """Remove and return the next item that may be served, or None."""
        if self.count:
            for queue in self._classes:
                if queue.lines and (item := queue.pop(may_serve)) is not None:
                    self.count -= 1
                    return item
        return None

    def remove(self, peer: int, item: T) -> None:
        """Remove an item that is in the queue."""
        next(queue for queue in self._classes if item in queue.of(peer)).remove(peer, item)
        self.count -= 1

    def peers(self) -> list[int]:
        """Return the peers that have items here."""
        return list(dict.fromkeys(peer for queue in self._classes for peer in queue.lines))

    def of(self, peer: int) -> list[T]:
        """Return the items of a peer, in order."""
        return [item for queue in self._classes for item in queue.of(peer)]


_SHARE: Final = 3
"""A peer takes a further handler only while it has fewer than this many times those that would still be free."""


class HandlerShares:
    """A number of handlers, of which no peer gets all: one peer alone has three quarters of them at most.

    What is left for further peers shrinks with each of them, so that several cannot soon have all handlers either. A
    peer that has none gets any handler that is free.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._of: dict[int, int] = {}

    def of(self, peer: int) -> int:
        """Return how many handlers a peer has."""
        return self._of.get(peer, 0)

    def take(self, peer: int) -> bool:
        """Give a peer a handler, if it may take one now; return whether it has got one."""
        free, has = self.limit - self.taken, self._of.get(peer, 0)
        may_take = free > 0 and (not has or has < _SHARE * (free - 1))
        if may_take:
            self.taken += 1
            self._of[peer] = has + 1
        return may_take

    def give_back(self, peer: int) -> None:
        """Take a handler back."""
        self.taken -= 1
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]
