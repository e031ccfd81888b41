"""Reads the counters of the process as samples of the metrics in the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covey.base.numbers import operation_name
from covey.runtime.counters import process
from covey.runtime.metrics.table import OTHER_PEERS, PEERS_LIMIT
from covey.runtime.recorder import BUCKETS, FIRST_BITS, clock_ns
from covey.runtime.report_log import current_log
from covey.wire.reports import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from covey.runtime.counters import CodecTraffic, Totals
    from covey.runtime.recorder import OperationTotals

WINDOW_NS: Final = 60 * 10**9
"""The time that the share of communication is about."""
BOUNDS: Final = (
    *((f"{(1 << (FIRST_BITS + bucket)) / 1e9:.9g}", bucket) for bucket in range(0, BUCKETS - 1, 2)),
    ("+Inf", BUCKETS - 1),
)
"""The upper bounds of buckets of durations in seconds, and their numbers; each is four times the one before it."""


def samples() -> list[Sample]:
    """Return a sample for every metric and label that this process has. On any thread."""
    return list(_samples())


def communication_share(groups: Iterable[Any]) -> float:
    """Return the share of the last minute in which an operation of one of the groups ran, at most 1.

    If the operations in the ring of a group are younger, the share is of the time since the first of them.
    """
    now, share = clock_ns(), 0.0
    for group in groups:
        busy, first = group.recorder.busy(max(0, now - WINDOW_NS))
        share += busy / max(1, now - first) if busy else 0.0
    return min(1.0, share)


def _samples() -> Iterator[Sample]:
    groups, totals = process.groups(), process.totals()
    for operation in totals.operations.values():
        yield from _of_operation(operation)
    begun = [at for group in groups if (at := group.recorder.running())]
    yield _sample("covey_operation_running_seconds", max(0, clock_ns() - min(begun)) / 1e9 if begun else 0.0)
    yield _sample("covey_communication_share", communication_share(groups))
    yield from _of_lanes(totals)
    for kind, count in sorted(process.lanes.copy().items()):
        yield _sample("covey_lanes_opened_total", count, lane=kind)
    messages = totals.messages
    yield _sample("covey_messages_sent_total", messages.sent)
    yield _sample("covey_messages_received_total", messages.received)
    yield _sample("covey_message_sent_bytes_total", messages.sent_bytes)
    yield _sample("covey_message_received_bytes_total", messages.received_bytes)
    yield _sample("covey_calls_total", process.calls_made)
    yield _sample("covey_call_failures_total", process.calls_failed)
    yield _sample("covey_calls_served_total", process.calls_served)
    for codec, traffic in sorted(totals.codecs.items()):
        yield from _of_codec(codec, traffic)
    yield _sample("covey_groups", len(groups))
    yield from _of_node()
    yield _sample("covey_heartbeats_sent_total", process.heartbeats_sent)
    yield _sample("covey_heartbeats_answered_total", process.heartbeats_answered)
    yield _sample("covey_suspicions_total", process.suspicions)
    yield _sample("covey_elections_total", process.elections)
    for kind, count in sorted(process.events.copy().items()):
        yield _sample("covey_events_total", count, kind=kind)
    yield _sample("covey_recovery_seconds_total", process.recovery_seconds)
    yield from _of_reports()


def _sample(metric: str, value: float, **labels: str) -> Sample:
    return Sample(metric, tuple(labels.items()), float(value))


def _of_operation(totals: OperationTotals) -> Iterator[Sample]:
    op = operation_name(totals.operation)
    yield _sample("covey_operations_total", totals.calls, op=op)
    yield _sample("covey_operation_failures_total", totals.failures, op=op)
    for bound, bucket in BOUNDS:
        yield _sample("covey_operation_seconds_bucket", sum(totals.buckets[: bucket + 1]), op=op, le=bound)
    yield _sample("covey_operation_seconds_count", totals.calls, op=op)
    yield _sample("covey_operation_seconds_sum", totals.ns / 1e9, op=op)
    yield _sample("covey_operation_sent_bytes_total", totals.sent, op=op)
    yield _sample("covey_operation_received_bytes_total", totals.received, op=op)


def _of_lanes(totals: Totals) -> Iterator[Sample]:
    """Return the traffic by kind of lane and peer: the first PEERS_LIMIT seats, and the sum of all others."""
    found: dict[tuple[str, str], list[int]] = {}
    for (seat, lane), traffic in sorted(totals.traffic.items()):
        sums = found.setdefault((lane, str(seat) if seat < PEERS_LIMIT else OTHER_PEERS), [0] * 4)
        for index, value in enumerate(traffic):
            sums[index] += value
    for (lane, peer), (sent_bytes, sends, received_bytes, receives) in found.items():
        yield _sample("covey_lane_sent_bytes_total", sent_bytes, lane=lane, peer=peer)
        yield _sample("covey_lane_received_bytes_total", received_bytes, lane=lane, peer=peer)
        yield _sample("covey_lane_sends_total", sends, lane=lane, peer=peer)
        yield _sample("covey_lane_receives_total", receives, lane=lane, peer=peer)


def _of_codec(codec: str, traffic: CodecTraffic) -> Iterator[Sample]:
    yield _sample("covey_compressed_operations_total", traffic.operations, codec=codec)
    yield _sample("covey_compressed_sent_bytes_total", traffic.sent_bytes, codec=codec)
    yield _sample("covey_compressed_plain_bytes_total", traffic.plain_bytes, codec=codec)


def _of_node() -> Iterator[Sample]:
    for node in list(process.nodes)[:1]:
        generation = node.generation
        if generation is not None:
            view = generation.view
            yield _sample("covey_members", len(view.ranks))
            yield _sample("covey_generation", generation.number)
            yield _sample("covey_view", view.number)


def _of_reports() -> Iterator[Sample]:
    log = current_log()
    row = None if log is None else log.latest()
    if row is None:
        return
    if row.step is not None:
        yield _sample("covey_step", row.step)
    for name, value in row.values.items():
        yield _sample("covey_report", value, name=name)
    if row.compute >= 0:
        yield _sample("covey_step_seconds", row.compute, part="compute")
        yield _sample("covey_step_seconds", row.sync, part="sync")
