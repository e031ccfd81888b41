"""Handlers by peer: how many functions run at a time, and how many of them for one peer."""

from __future__ import annotations

from typing import Final

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

    def may_take(self, peer: int) -> bool:
        """Tell whether a peer may take a handler now."""
        free, has = self.limit - self.taken, self._of.get(peer, 0)
        return free > 0 and (not has or has < _SHARE * (free - 1))

    def take(self, peer: int) -> None:
        """Give a peer a handler."""
        self.taken += 1
        self._of[peer] = self._of.get(peer, 0) + 1

    def give_back(self, peer: int) -> None:
        """Take a handler back."""
        self.taken -= 1
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]
