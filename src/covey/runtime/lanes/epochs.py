"""Decides which connection for messages between two ranks replaces which.

The end that dials numbers the connections. An offer has a higher number than all that the pair has seen, and both ends
use the connection with the higher number. So they agree, whichever end noticed first that the last one broke.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.runtime.lanes.table import LaneKey


class Epochs:
    """The numbers of one node's connections for messages, by lane."""

    def __init__(self) -> None:
        self._seen: dict[LaneKey, int] = {}
        """The highest number of an offer that this node made or accepted."""
        self._opened: dict[LaneKey, int] = {}
        """The number of the connection that opened last."""

    def next(self, key: LaneKey) -> int:
        """Return the number to offer, or to ask for: one above all that this node has seen."""
        return self._seen.get(key, -1) + 1

    def seen(self, key: LaneKey, epoch: int) -> None:
        """Note an accepted offer of this number."""
        self._seen[key] = max(epoch, self._seen.get(key, -1))

    def opened(self, key: LaneKey, epoch: int) -> None:
        """Note that a connection of this number has opened."""
        self._opened[key] = epoch
        self.seen(key, epoch)

    def is_past(self, key: LaneKey, epoch: int) -> bool:
        """Tell whether a connection of this number, or a later one, has opened already."""
        return epoch <= self._opened.get(key, -1)

    def forget(self, group: int) -> None:
        """Drop the numbers of a closed group."""
        for numbers in (self._seen, self._opened):
            for key in [key for key in numbers if key.group == group]:
                del numbers[key]
