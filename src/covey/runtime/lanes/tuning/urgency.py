"""Which connections of a node give way to which, under the setting `limit`."""

from __future__ import annotations

import enum


class Urgency(enum.IntEnum):
    """Which connections give way to which."""

    CALLS = 0
    PARTS = 1
    """The parts of large calls."""
    TENSORS = 2
    """Collectives and messages."""
