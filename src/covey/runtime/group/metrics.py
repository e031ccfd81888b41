"""`GroupMetrics`, what `group.metrics()` returns: the counters of a group at one moment, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.numbers import operation_name
from covey.runtime.metrics.samples import communication_share

if TYPE_CHECKING:
    from covey.runtime.collectives.roster import GroupRoster
    from covey.runtime.counters import GroupCounters
    from covey.runtime.group.savings import Compression


@dataclass(frozen=True)
class OperationMetrics:
    """What all operations of one kind have done on this rank."""

    calls: int
    failures: int
    seconds: float
    """In all; from the call until it returned or raised."""
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class PeerMetrics:
    """What collectives have moved between this rank and another one, over one kind of lane."""

    rank: int
    lane: str
    sent_bytes: int
    sends: int
    received_bytes: int
    receives: int


@dataclass(frozen=True)
class MessageMetrics:
    """The point-to-point messages of this rank."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int


@dataclass(frozen=True)
class GroupMetrics:
    """The counters of a group on this rank, since the group was made."""

    operations: dict[str, OperationMetrics]
    """By name, such as `all_reduce`; those that have run."""
    peers: tuple[PeerMetrics, ...]
    messages: MessageMetrics
    compression: Compression
    communication_share: float
    """The share of the last minute in which an operation ran, from 0 to 1; see docs/guides/metrics.md."""


def group_metrics(counters: GroupCounters, roster: GroupRoster, compression: Compression) -> GroupMetrics:
    """Return the counters of a group. On any thread."""
    messages = counters.messages.counts()
    return GroupMetrics(
        operations={
            operation_name(each.operation): OperationMetrics(
                each.calls, each.failures, each.ns / 1e9, each.sent, each.received
            )
            for each in counters.recorder.totals()
        },
        peers=tuple(
            PeerMetrics(roster.rank_of[seat], lane, *traffic)
            for (seat, lane), traffic in sorted(counters.traffic().items())
        ),
        messages=MessageMetrics(messages.sent, messages.sent_bytes, messages.received, messages.received_bytes),
        compression=compression,
        communication_share=communication_share([counters]),
    )
