"""The table of metrics: their names, kinds, labels and meaning. docs/reference/metrics.md is made from it."""

from __future__ import annotations

from typing import Final, NamedTuple

PEERS_LIMIT: Final = 64
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
        ("covey_recovery_seconds_total", "counter", "Time from the first sign of a loss until operations went on."),
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
