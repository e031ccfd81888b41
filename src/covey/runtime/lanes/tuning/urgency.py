"""Which connections of a node give way to which."""

from __future__ import annotations

import enum


class Urgency(enum.IntEnum):
    """Which connections give way to which."""

    URGENT = 0
    """Small calls, and collectives of a class above bulk."""
    PARTS = 1
    """The parts of large calls."""
    TENSORS = 2
    """Collectives and messages."""
