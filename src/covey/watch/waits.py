"""Who waits for whom or for what: from how far each rank of a run is, and from what links carry. Pure.

Answers of ranks arrive at different moments, some late, and operations take microseconds, so numbers alone do not
compare. A rank waits for another one if the other had not begun the operation when it was asked, and the rank was in it
for NOTABLE_WAIT_SECONDS by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from covey.wire.progress import GroupProgress

NOTABLE_WAIT_SECONDS: Final = 0.4
"""A shorter wait is not worth a word."""
SLOW_RANK_SHARE: Final = 0.1
"""A rank is slow if the others wait at least this share of their time more than it does."""
SLOW_RATIO: Final = 0.5
"""And it spends at most this part of their time in operations."""
WAITING_SHARE: Final = 0.5
"""Ranks wait for the network if they spend at least this share of their time in operations..."""
BUSY_SHARE: Final = 0.7
"""... and a link has something to send for at least this share of the time..."""
LEAST_WAITED_BYTES: Final = 32 << 10
"""... of operations that send so much over it: less takes a round trip, however fast the link is."""
FELL_BY: Final = 2.0
"""A link has become slow if it was so many times as fast before."""
LONG_OPERATION_SECONDS: Final = 2.5
"""An operation that all ranks are in for so long is worth a word."""


@dataclass(frozen=True)
class RankPosition:
    """How far one rank is."""

    rank: int
    arrived: float
    """When this was heard, on the collector's clock."""
    asked: float
    """When it was asked for: what it says is not older."""
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
        known = position.arrived if other.is_silent else other.asked
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
    is_slow = others - shares[rank] >= SLOW_RANK_SHARE and shares[rank] <= SLOW_RATIO * others
    return (rank, others - shares[rank]) if is_slow else None


class LinkLoad(NamedTuple):
    """What a link between two machines carries, in one direction."""

    source: str
    target: str
    """Ids of machines."""
    rate: float
    """Bytes a second."""
    busy: float
    """The share of the time in which there was something to send, 0 to 1."""
    per_operation: float
    """Bytes in each operation."""


class SlowLink(NamedTuple):
    """A link that the ranks wait for, and what it carried before; None if that is not known."""

    load: LinkLoad
    usual: float | None

    @property
    def has_fallen(self) -> bool:
        """Whether it was much faster before."""
        return self.usual is not None and self.usual >= FELL_BY * self.load.rate


def slow_link(loads: Iterable[LinkLoad], shares: Collection[float]) -> LinkLoad | None:
    """Return the link that the ranks wait for most of the time; None if they wait for none.

    `shares` is the part of its time that each rank has spent in operations lately.
    """
    if not shares or median(shares) < WAITING_SHARE:
        return None
    full = [load for load in loads if load.busy >= BUSY_SHARE and load.per_operation >= LEAST_WAITED_BYTES]
    return min(full, key=lambda load: (load.rate, load.source, load.target), default=None)


class LongOperation(NamedTuple):
    """An operation that all ranks are in."""

    operation: int
    seconds: float
    """For how long the last of them is in it."""


def long_operation(positions: Sequence[RankPosition], now: float) -> LongOperation | None:
    """Return the operation of the largest group that all ranks are in for a while; None if there is none."""
    if len(positions) < 2 or any(position.is_silent or not position.groups for position in positions):
        return None
    groups = [position.groups[0] for position in positions]
    if len({(group.name, group.size, group.sequence) for group in groups}) > 1 or not all(
        group.is_running for group in groups
    ):
        return None
    seconds = min(
        group.age_ns / 1e9 + now - position.arrived for group, position in zip(groups, positions, strict=True)
    )
    return LongOperation(groups[0].operation, seconds) if seconds >= LONG_OPERATION_SECONDS else None
