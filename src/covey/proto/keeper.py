"""What the keeper of a run on one host decides: which members are lost, and what becomes of a run without members.

Invariants, each with its case of one member and of none:

1. A process that exists, stopped or not, is lost only if a member that runs remains to continue the run.
2. A run in which a member finished never begins again.
3. A run without members begins again with all its processes, or with as many as each of these asked for at least.
4. If neither can happen any more, the waiting processes are told so: none waits for ever.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def lost_ranks(exited: Iterable[int], stopped: Iterable[int], remaining: Iterable[int]) -> set[int]:
    """Return the members without which the others continue.

    `exited` and `stopped` (for too long) are ranks of processes, `remaining` those of the view that do not leave it.
    """
    exited, stopped = set(exited), set(stopped)
    runs_on = set(remaining) - exited - stopped
    return exited | stopped if runs_on else exited


class RunFate(enum.Enum):
    """What becomes of a run that has no members while processes wait for a seat in it."""

    OVER = "over"
    """A member finished the work: the waiting processes have none."""
    WAIT = "wait"
    """More processes may come."""
    BEGIN = "begin"
    """The waiting processes begin the run anew."""
    HOPELESS = "hopeless"
    """Too few processes wait, and no other can come."""


def without_members(*, has_finished: bool, size: int, expected: int, fewest: Sequence[int], is_late: bool) -> RunFate:
    """Decide what becomes of a run without members.

    Args:
        has_finished: whether a member finished its program.
        size: how many processes the run was started with.
        expected: how many of these run or will be restarted.
        fewest: for each process that waits, the least number with which it may begin; 0 for all of them.
        is_late: whether further processes had time to come.
    """
    if has_finished:
        return RunFate.OVER
    waiting = len(fewest)
    needed = max((least or size for least in fewest), default=size)
    if waiting >= size or (waiting >= needed and (is_late or waiting >= expected)):
        return RunFate.BEGIN
    return RunFate.HOPELESS if waiting >= expected else RunFate.WAIT
