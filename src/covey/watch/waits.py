"""Who waits for whom: from how far each rank of a run is. Pure.

Answers of ranks arrive at different moments, and operations take microseconds, so numbers alone do not compare. A rank
waits for another one if the other had not begun the operation by the time of its own answer, and the rank was in it for
NOTABLE_WAIT_SECONDS by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.wire.progress import GroupProgress

NOTABLE_WAIT_SECONDS: Final = 0.4
"""A shorter wait is not worth a word."""
SLOW_SHARE: Final = 0.1
"""A rank is slow if the others wait at least this share of their time more than it does."""
SLOW_RATIO: Final = 0.5
"""And it spends at most this part of their time in operations."""


@dataclass(frozen=True)
class RankPosition:
    """How far one rank is."""

    rank: int
    arrived: float
    """When this was heard, on the collector's clock."""
    groups: tuple[GroupProgress, ...] = ()
    is_silent: bool = False
    """Whether it does not answer: this is what was heard last."""


class Waits(NamedTuple):
    """What follows for one rank."""

    waits_for: tuple[int, ...]
    since: float
    """For how many seconds it waits."""


def waits(positions: Sequence[RankPosition]) -> dict[int, Waits]:
    """Return the ranks that wait, for whom, and for how long."""
    by_group: dict[tuple[str, int], list[tuple[RankPosition, GroupProgress]]] = {}
    for position in positions:
        for group in position.groups:
            by_group.setdefault((group.name, group.size), []).append((position, group))
    found: dict[int, Waits] = {}
    for members in by_group.values():
        if len(members) > 1:
            for position, group in members:
                if group.is_running and not position.is_silent and (behind := _behind(position, group, members)):
                    before = found.get(position.rank)
                    waited = max(each[1] for each in behind)
                    if before is None or waited > before.since:
                        found[position.rank] = Waits(tuple(sorted(rank for rank, _ in behind)), waited)
    return found


def _behind(
    position: RankPosition, group: GroupProgress, members: Sequence[tuple[RankPosition, GroupProgress]]
) -> list[tuple[int, float]]:
    """Return the ranks that have not begun the operation of this rank, and for how long it waited for each."""
    began = position.arrived - group.age_ns / 1e9
    behind = []
    for other, its in members:
        if other.rank == position.rank or its.sequence >= group.sequence:
            continue
        known = position.arrived if other.is_silent else other.arrived
        if known - began >= NOTABLE_WAIT_SECONDS:
            behind.append((other.rank, known - began))
    return behind


def slow_rank(shares: Mapping[int, float]) -> tuple[int, float] | None:
    """Return the rank that the others wait for at every step, and which share of their time they do so; None if none.

    `shares` is the part of its time that each rank has spent in operations lately: a slow rank is hardly ever in one,
    because the others are there already.
    """
    if len(shares) < 2:
        return None
    rank = min(shares, key=lambda each: (shares[each], each))
    others = median(share for each, share in shares.items() if each != rank)
    is_slow = others - shares[rank] >= SLOW_SHARE and shares[rank] <= SLOW_RATIO * others
    return (rank, others - shares[rank]) if is_slow else None
