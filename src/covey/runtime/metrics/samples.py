"""The table of metrics, from which docs/reference/metrics.md is made, and their samples: counters of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.numbers import operation_name
from covey.runtime.counters import process
from covey.runtime.pool import pool
from covey.runtime.recorder import BUCKETS, bucket_begin_ns, clock_ns
from covey.runtime.report_log import current_log
from covey.wire.reports import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from covey.runtime.counters import CodecTraffic, Totals
    from covey.runtime.recorder import OperationTotals


LABELLED_PEERS: Final = 64
"""Peers that have a label of their own; the others are counted together."""
OTHER_PEERS: Final = "other"


class Metric(NamedTuple):
    """One metric."""

    name: str
    kind: str
    """`counter`, `gauge` or `histogram`. The name of a counter ends with `_total`."""
    help: str
    labels: tuple[str, ...] = ()


TABLE: Final = tuple(
    Metric(*row)
    for row in (
        ("covey_up", "gauge", "1 if the rank has answered its keeper. Only on the page of `covey run --http`."),
        ("covey_operations_total", "counter", "Collective operations that have ended.", ("op",)),
        ("covey_operation_failures_total", "counter", "Collective operations that have raised.", ("op",)),
        ("covey_operation_seconds", "histogram", "How long collective operations took.", ("op",)),
        (
            "covey_operation_running_seconds",
            "gauge",
            "For how long the operation in progress has been running, the longest of all groups; 0 without one.",
        ),
        ("covey_operation_sent_bytes_total", "counter", "Bytes that operations have sent.", ("op",)),
        ("covey_operation_received_bytes_total", "counter", "Bytes that operations have received.", ("op",)),
        (
            "covey_communication_share",
            "gauge",
            "The share of the last minute in which an operation ran: below 1 by what the program does meanwhile.",
        ),
        ("covey_lane_sent_bytes_total", "counter", "Bytes sent over lanes of collectives.", ("lane", "peer")),
        ("covey_lane_received_bytes_total", "counter", "Bytes received over lanes of collectives.", ("lane", "peer")),
        ("covey_lane_sends_total", "counter", "Transfers sent over lanes of collectives.", ("lane", "peer")),
        ("covey_lane_receives_total", "counter", "Transfers received over lanes of collectives.", ("lane", "peer")),
        ("covey_lanes_opened_total", "counter", "Lanes of collectives that were opened.", ("lane",)),
        ("covey_messages_sent_total", "counter", "Point-to-point messages that were sent."),
        ("covey_messages_received_total", "counter", "Point-to-point messages that were received."),
        ("covey_message_sent_bytes_total", "counter", "Bytes of the messages that were sent."),
        ("covey_message_received_bytes_total", "counter", "Bytes of the messages that were received."),
        ("covey_calls_total", "counter", "Calls to functions of other nodes that have ended."),
        ("covey_call_failures_total", "counter", "Those of them that have raised."),
        ("covey_calls_served_total", "counter", "Calls of other nodes whose function was started here."),
        ("covey_pool_bytes", "gauge", "Memory of the pool for payloads: in use, or kept for later ones."),
        ("covey_pool_used_bytes", "gauge", "What is in use of it, by covey or by arrays that the program holds."),
        ("covey_pool_waits_total", "counter", "Calls of other nodes whose arguments had to wait for memory."),
        ("covey_compressed_operations_total", "counter", "Operations that were compressed.", ("codec",)),
        ("covey_compressed_sent_bytes_total", "counter", "Bytes that compressed operations have sent.", ("codec",)),
        (
            "covey_compressed_plain_bytes_total",
            "counter",
            "Bytes that they would have sent without compression.",
            ("codec",),
        ),
        ("covey_groups", "gauge", "Open groups of the process."),
        ("covey_members", "gauge", "Members of the run's current view."),
        ("covey_generation", "gauge", "The number of the run's generation."),
        ("covey_view", "gauge", "The number of the generation's view."),
        ("covey_heartbeats_sent_total", "counter", "Pings to other members."),
        ("covey_heartbeats_answered_total", "counter", "Pings that were answered."),
        ("covey_suspicions_total", "counter", "How often a member was suspected because nothing was heard of it."),
        ("covey_elections_total", "counter", "Ballots about a view that stopped the operations of this process."),
        ("covey_events_total", "counter", "Events of the run, as `group.events` lists them.", ("kind",)),
        ("covey_recovery_seconds_total", "counter", "Time from the first sign of a loss until operations continued."),
        ("covey_step", "gauge", "The last step that the program has reported (`group.report`)."),
        ("covey_report", "gauge", "The last value of each name that the program has reported.", ("name",)),
        (
            "covey_step_seconds",
            "gauge",
            "How long the last reported step took: `part` is `compute` (outside of operations) or `sync` (in them).",
            ("part",),
        ),
    )
)  # fmt: skip


WINDOW_NS: Final = 60 * 10**9
"""The time that the share of communication is about."""
BOUNDS: Final = (
    *((f"{bucket_begin_ns(bucket + 1) / 1e9:.9g}", bucket) for bucket in range(0, BUCKETS - 1, 4)),
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
    yield _sample("covey_pool_bytes", pool.used_bytes + pool.idle_bytes)
    yield _sample("covey_pool_used_bytes", pool.used_bytes)
    yield _sample("covey_pool_waits_total", pool.waits)
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
    """Return the traffic by kind of lane and peer: the first LABELLED_PEERS seats, and the sum of all others."""
    found: dict[tuple[str, str], list[int]] = {}
    for (seat, lane), traffic in sorted(totals.traffic.items()):
        sums = found.setdefault((lane, str(seat) if seat < LABELLED_PEERS else OTHER_PEERS), [0] * 4)
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
