"""Which connections of a node give way to which."""

from __future__ import annotations

import enum


class Urgency(enum.IntEnum):
    """Which connections give way to which."""

    CALLS = 0
    """Small calls."""
    FIRST = 1
    """Groups whose priority is above bulk."""
    PARTS = 2
    """The parts of large calls."""
    TENSORS = 3
    """Collectives and messages."""

    @property
    def gives_way(self) -> bool:
        """Whether something more urgent makes it slower."""
        return self >= Urgency.PARTS
