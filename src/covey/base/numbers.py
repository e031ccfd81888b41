"""The three numbers of a process, as types, so that mypy refuses one where another is meant.

At run time all three are ints. Convert where a number is made (from a message, an environment variable, a position in
a list), never on the way.
"""

from __future__ import annotations

from typing import Final, NewType

Seat = NewType("Seat", int)
"""A position in the run. A process keeps it for the whole run, and no other process gets it."""
Rank = NewType("Rank", int)
"""A position in a group. The ranks of a generation are those of its first group."""
Slot = NewType("Slot", int)
"""A position among the ranks of one attempt, without gaps. Plans are written in slots."""

NO_SEAT: Final = Seat(-1)
"""What stands for the seat of a process that has none."""
NO_RANK: Final = Rank(-1)
"""What stands for the rank where there is none."""
ANY: Final = -1
"""As the rank or tag of a message to receive: every rank, every tag."""
