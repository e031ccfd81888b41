"""The operations of a group, by the numbers that transfer headers and records of operations carry.

A new operation goes to the end.
"""

from __future__ import annotations

from typing import Final

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
