"""How many groups a member reports in an answer to a ballot: open ones, and some that it has closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.errors import BusyError
from covey.wire.membership import MAX_GROUPS, MAX_STATE_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.wire.membership import State

DISMISSED: Final = 256
"""Closed groups that this member reports in every view."""
DISMISSED_RANKS: Final = MAX_STATE_RANKS // 4
"""Ranks of all these groups together."""
OPEN_GROUPS: Final = MAX_GROUPS - DISMISSED
"""Groups that may be open at once: a member reports its state in each."""
OPEN_RANKS: Final = MAX_STATE_RANKS - DISMISSED_RANKS
"""Ranks of all open groups together: those of 96 groups of 1,024 ranks, for example."""


def check_room(sizes: Iterable[int], size: int) -> None:
    """Raise BusyError if a group of `size` ranks is one too many beside open ones of `sizes`."""
    open_sizes = list(sizes)
    if len(open_sizes) >= OPEN_GROUPS:
        raise BusyError(f"{OPEN_GROUPS} groups that survive losses are open; close some")
    if sum(open_sizes) + size > OPEN_RANKS:
        raise BusyError(
            f"{len(open_sizes)} groups that survive losses are open, with {sum(open_sizes)} ranks in all; with one of "
            f"{size} these would be more than {OPEN_RANKS}; close some"
        )


def forget_oldest(dismissed: dict[int, State]) -> None:
    """Drop the groups that were closed first, until the others fit into an answer."""
    ranks = sum(len(state.ranks) for state in dismissed.values())
    while len(dismissed) > DISMISSED or ranks > DISMISSED_RANKS:
        ranks -= len(dismissed.pop(next(iter(dismissed))).ranks)
