"""A queue that serves peers in turn, so that no peer waits for the backlog of another."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by peer: first in, first out for each peer, and one item of each peer in turn."""

    def __init__(self) -> None:
        self.lines: dict[int, deque[T]] = {}
        """By peer: its items, if it has any. The peer whose turn it is comes first."""

    def push(self, peer: int, item: T) -> None:
        """Add an item at the end of a peer's line."""
        self.lines.setdefault(peer, deque()).append(item)

    def pop(self, may_serve: Callable[[int, T], bool]) -> T | None:
        """Remove and return the next item that may be served, or None."""
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
