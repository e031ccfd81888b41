"""What was measured between two ranks, in one direction. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.lab.bench.engines import partner

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LinkFigures:
    """How fast one rank sends to another, with the pair alone. Checked when built: it comes from other ranks."""

    sender: int
    receiver: int
    lane: str
    """The kind of lane."""
    round_trip: float
    """Seconds for a small message and its answer: the median."""
    bytes_per_second: float
    """The rate of one stream."""
    both_bytes_per_second: float
    """The rate of one stream while the receiver sends one as well."""

    def __post_init__(self) -> None:
        for value in (self.round_trip, self.bytes_per_second, self.both_bytes_per_second):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{value} is neither a time nor a speed")
        if not (0 < len(self.lane) <= 20 and self.lane.isalpha()):
            raise ValueError("the lane has no name")


def checked(by_rank: Sequence[Sequence[LinkFigures]]) -> list[LinkFigures]:
    """Return the figures of all ranks by sender and receiver.

    Raises:
        RemoteProtocolError: a rank sent figures of another one, or not all of its own.
    """
    ranks = range(len(by_rank))
    for rank, figures in enumerate(by_rank):
        if [(each.sender, each.receiver) for each in figures] != [(rank, other) for other in ranks if other != rank]:
            raise RemoteProtocolError(f"rank {rank} sent figures of links that are not its own, or not all of them")
    return [each for figures in by_rank for each in figures]


def slowest(links: Sequence[LinkFigures]) -> LinkFigures:
    """Return the link with the lowest throughput."""
    return min(links, key=lambda link: link.bytes_per_second)


def used_by(operation: str, links: Sequence[LinkFigures], size: int) -> list[LinkFigures]:
    """Return the links that an operation can be held against: all, but for `send_recv` those between partners."""
    if operation != "send_recv":
        return list(links)
    return [link for link in links if partner(link.sender, size) == link.receiver]
