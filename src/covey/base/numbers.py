"""The numbers that all layers share: seats, ranks and slots, operations, and bounds of messages.

Seats, ranks and slots are types, so that mypy refuses one where another is meant; at run time all three are ints.
Convert where a number is made (from a message, an environment variable, a position in a list), never on the way.

The numbers of operations are in the headers of transfers and in records: a new operation goes to the end. Bounds of
messages are here for rooms that need them without the messages, which take long to load.
"""

from __future__ import annotations

from typing import Final, Literal, NewType, TypeAlias

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
Priority: TypeAlias = Literal["critical", "realtime", "bulk"]
"""What goes first among messages, calls and groups: `critical`, then `realtime`, then `bulk`."""
PRIORITIES: Final[tuple[Priority, ...]] = ("critical", "realtime", "bulk")
"""By class: its name. What covey itself has to say goes before all of them."""
CRITICAL: Final = 0
REALTIME: Final = 1
BULK: Final = 2
ANY: Final = -1
"""As the rank or tag of a message to receive: every rank, every tag."""


OPERATIONS: Final = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "scan",
    "exscan",
    "barrier",
    "broadcast_object",
    "all_gather_object",
    "gather_object",
    "scatter_object",
    "split",
    "sync_gradients",
)


def operation_name(number: int) -> str:
    """Return the name of an operation whose number came from another rank."""
    return OPERATIONS[number] if number < len(OPERATIONS) else "something else"


SLOWEST: Final = 1e3
FASTEST: Final = 1e12
"""Bytes per second. No link is slower or faster: what a rank or a file says beyond these is taken for them."""
NAME_LIMIT: Final = 100
REASON_LIMIT: Final = 200
"""Characters of a program's error in messages to other ranks."""
MAX_MEMBERS: Final = 1024
"""Members of a view. This many fit into one control frame, whatever their names and contacts."""
REPORT_NAMES: Final = 32
"""Names that a program may report."""
REPORT_NAME_LETTERS: Final = 40
REPORT_ROWS: Final = 4096
"""Rows of reports that a process keeps."""
