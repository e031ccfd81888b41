"""What a process tells those that ask: operations, metrics, checks, events of the run, and measured links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.wire.decoding import read_from_peer
from covey.wire.messages import MAX_MEMBERS, RANKS_LIMIT, Bytes, Name, Seconds, Story, Text, Worded

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS_LIMIT: Final = 4096
"""Operations of one group."""
REPORTED_GROUPS_LIMIT: Final = 64
"""Groups of one process."""
SAMPLES_LIMIT: Final = 10_000
LABELS_LIMIT: Final = 8
TOLD_CHECKS_LIMIT: Final = 64
"""Checks of one process."""
Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
encode = msgspec.msgpack.Encoder().encode
REPORTED_EVENTS_LIMIT: Final = 100
"""Events in one message: the latest ones."""
EVENTS_BYTES_LIMIT: Final = 1 << 16
"""What a sender tells at most. Every member tells a newcomer, so that a long history would cost much."""
PHASES_LIMIT: Final = 16
Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_encode = msgspec.msgpack.Encoder().encode
Speed = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Bytes per second; 0 if it is not limited, or not known."""
NETWORK_LIMIT: Final = 256
"""Members of a network that is told: it has two figures for each pair of them, and fits into one control frame."""
LOGS_LIMIT: Final = 257
"""Logs of one machine: of its processes, and of `covey run` itself."""
LOG_RECORDS_LIMIT: Final = 4096
LOGS_BYTES: Final = 64 << 10
"""Most bytes of output in one answer."""
AUDIT_RECORD_LIMIT: Final = 16 << 10
LogName = Annotated[str, msgspec.Meta(pattern=r"^(keeper|[0-9]{1,6})\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, lt=NETWORK_LIMIT)]


class FlownOperation(msgspec.Struct, frozen=True, array_like=True):
    """One operation of a group, as a rank saw it."""

    sequence: Whole
    operation: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    """Its number in `base.numbers`."""
    outcome: Annotated[int, msgspec.Meta(ge=0, le=2)]
    """0: it runs; 1: it has returned; 2: it has raised."""
    begun_ns: Whole
    """On the monotonic clock of the rank's host."""
    ended_ns: Whole
    """0 while it runs."""
    sent: Whole
    """Bytes that the rank has sent."""
    received: Whole
    peers: Annotated[int, msgspec.Meta(ge=0)]
    """A bit for each of the first 64 ranks that it moved something to or from."""
    phases: Whole
    """Plans that it has begun."""
    view: Whole


class FlownGroup(Worded, frozen=True, array_like=True):
    """The last operations of one group."""

    name: Text
    rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_LIMIT)]
    size: Annotated[int, msgspec.Meta(ge=0, le=RANKS_LIMIT)]
    fault: Story
    """Why the group has ended; empty if it has not failed."""
    operations: Annotated[tuple[FlownOperation, ...], msgspec.Meta(max_length=RECORDS_LIMIT)]


class Flight(Worded, frozen=True, array_like=True):
    """The last operations of the groups of one process."""

    run: Text
    name: Name
    host: Name
    """Equal for processes of one host, which have the same clocks."""
    host_name: Name
    pid: Whole
    seat: Whole
    clock_ns: Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
    """Nanoseconds since 1970 when the monotonic clock of the host was at 0, by the clock of the host."""
    taken_ns: Whole
    """When this was written down, on the monotonic clock."""
    offsets: Annotated[tuple[tuple[Whole, Seconds], ...], msgspec.Meta(max_length=RANKS_LIMIT)]
    """By seat: by how many seconds the clock of another process was measured to be ahead."""
    groups: Annotated[tuple[FlownGroup, ...], msgspec.Meta(max_length=REPORTED_GROUPS_LIMIT)]
    run_id: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Equal for processes of one run, and different for two runs of one name; empty if it is not known."""


def joined(flights: Sequence[Flight]) -> Flight:
    """Return the groups of several answers of one process as one."""
    groups = tuple(group for flight in flights for group in flight.groups)[:REPORTED_GROUPS_LIMIT]
    return msgspec.structs.replace(flights[0], groups=groups)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The value of a metric, or of a part of a histogram, for some labels."""

    name: Name
    labels: Annotated[tuple[tuple[Name, Name], ...], msgspec.Meta(max_length=LABELS_LIMIT)]
    value: float


class Samples(msgspec.Struct, frozen=True, array_like=True):
    """The metrics of one process."""

    samples: Annotated[tuple[Sample, ...], msgspec.Meta(max_length=SAMPLES_LIMIT)]


class CheckResult(Worded, frozen=True, array_like=True):
    """The result of one check of a process."""

    name: Name
    is_ok: bool
    reason: Text
    """Why it has failed; empty if it has not."""


class CheckResults(msgspec.Struct, frozen=True, array_like=True):
    """The results of all checks of a process that say whether it is ready."""

    results: Annotated[tuple[CheckResult, ...], msgspec.Meta(max_length=TOLD_CHECKS_LIMIT)]


_flights: msgspec.msgpack.Decoder[Flight] = msgspec.msgpack.Decoder(Flight)


_samples: msgspec.msgpack.Decoder[Samples] = msgspec.msgpack.Decoder(Samples)


_checks: msgspec.msgpack.Decoder[CheckResults] = msgspec.msgpack.Decoder(CheckResults)


def decode_flight(data: bytes) -> Flight:
    """Decode the last operations of a process; raise RemoteProtocolError for anything else."""
    return read_from_peer(_flights, data, "the operations of a process")


def decode_samples(data: bytes) -> Samples:
    """Decode samples of metrics; raise RemoteProtocolError for anything else."""
    return read_from_peer(_samples, data, "samples of metrics")


def decode_checks(data: bytes) -> CheckResults:
    """Decode the results of checks; raise RemoteProtocolError for anything else."""
    return read_from_peer(_checks, data, "the results of checks")


class PastEvent(Worded, frozen=True, array_like=True):
    """An event; the fields are those of `covey.Event`."""

    kind: Name
    time: Seconds
    generation: Ordinal
    view: Ordinal
    ranks: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=RANKS_LIMIT)], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ]
    names: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    phases: Annotated[dict[Name, Seconds], msgspec.Meta(max_length=PHASES_LIMIT)]
    text: Text


class PastEvents(msgspec.Struct, frozen=True, array_like=True):
    """Events of a run, oldest first."""

    events: Annotated[tuple[PastEvent, ...], msgspec.Meta(max_length=REPORTED_EVENTS_LIMIT)]


_past: msgspec.msgpack.Decoder[PastEvents] = msgspec.msgpack.Decoder(PastEvents)


def encode_past(events: list[PastEvent]) -> bytes:
    """Encode the latest of these events, as many as the limits allow."""
    kept: list[PastEvent] = []
    size = 0
    for event in reversed(events[-REPORTED_EVENTS_LIMIT:]):
        size += len(_encode(event))
        if size > EVENTS_BYTES_LIMIT:
            break
        kept.append(event)
    return _encode(PastEvents(tuple(reversed(kept))))


def decode_past(data: bytes) -> PastEvents:
    """Decode events of a run; raise RemoteProtocolError for anything else."""
    return read_from_peer(_past, data, "events of a run")


class NetworkMember(Worded, frozen=True, array_like=True):
    """A member, and the links from it."""

    id: Bytes
    """Its public key; empty in a run that uses a launcher's token."""
    name: Text
    host_name: Text
    host: Number
    """Equal for members on one machine."""
    site: Number
    up: Speed
    """What its machine can send to others in all."""
    down: Speed
    rates: Annotated[tuple[Speed, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    """What it sends to each member."""
    round_trips: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    ages: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=NETWORK_LIMIT)] = ()
    """How much older than the network, or younger, the figures of the link to each member are; empty if none is."""


class MeasuredNetwork(Worded, frozen=True, array_like=True):
    """The figures that the members of one group have agreed on."""

    members: Annotated[tuple[NetworkMember, ...], msgspec.Meta(max_length=NETWORK_LIMIT)]
    trunks: Annotated[
        tuple[Annotated[tuple[Speed, ...], msgspec.Meta(max_length=NETWORK_LIMIT)], ...],
        msgspec.Meta(max_length=NETWORK_LIMIT),
    ]
    """What all members of a site together send to another one."""
    age: Seconds
    """Seconds since they were measured."""
    sender: Text
    """The name of the sender."""
    medium: Name
    """How the sender's machine is connected: `wired`, `wireless`, `virtual` or `unknown`."""
    plan: Text
    """The plan that was chosen last, and why; empty if none was."""


_network: msgspec.msgpack.Decoder[MeasuredNetwork] = msgspec.msgpack.Decoder(MeasuredNetwork)


def encode_network(network: MeasuredNetwork, age: float, medium: str) -> bytes:
    """Encode what was measured so many seconds ago, for a sender whose machine is connected like this."""
    return _encode(msgspec.structs.replace(network, age=age, medium=medium))


def decode_network(data: bytes) -> MeasuredNetwork:
    """Decode what was measured of a network; raise RemoteProtocolError for anything else."""
    return read_from_peer(_network, data, "a measured network")


class OutputKnown(msgspec.Struct, frozen=True, array_like=True):
    """Up to where an asker knows the logs of a machine: those that are not named, it does not know."""

    logs: Annotated[tuple[tuple[LogName, Whole], ...], msgspec.Meta(max_length=LOGS_LIMIT)]
    """Their names, and the offsets at which what is new begins."""
    wants_all: bool = False
    """Whether logs that it does not know are told from their beginning; else from shortly before their end."""


class ToldRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a process has written at one moment."""

    stream: Annotated[int, msgspec.Meta(ge=1, le=2)]
    rank: Annotated[int, msgspec.Meta(ge=-1, lt=RANKS_LIMIT)]
    """-1 if it is not known."""
    at: Seconds
    """Since 1970, by the clock of its machine."""
    lines_before: Whole
    data: Annotated[bytes, msgspec.Meta(max_length=AUDIT_RECORD_LIMIT)]


class ToldLog(msgspec.Struct, frozen=True, array_like=True):
    """Records of one log, in order."""

    name: LogName
    next: Whole
    """Up to where the asker knows it now."""
    records: Annotated[tuple[ToldRecord, ...], msgspec.Meta(max_length=LOG_RECORDS_LIMIT)]


class ToldOutput(Worded, frozen=True, array_like=True):
    """What the processes of a run have printed on one machine."""

    machine: Text
    """The name of the machine."""
    logs: Annotated[tuple[ToldLog, ...], msgspec.Meta(max_length=LOGS_LIMIT)]
    has_more: bool = False
    """Whether there is more to be asked for at once."""


_known: msgspec.msgpack.Decoder[OutputKnown] = msgspec.msgpack.Decoder(OutputKnown)
_output: msgspec.msgpack.Decoder[ToldOutput] = msgspec.msgpack.Decoder(ToldOutput)


def decode_known(data: bytes) -> OutputKnown:
    """Decode up to where an asker knows the output; raise RemoteProtocolError for anything else."""
    return read_from_peer(_known, data, "what is known of the output of a machine")


def decode_output(data: bytes) -> ToldOutput:
    """Decode the output that a machine tells; raise RemoteProtocolError for anything else."""
    return read_from_peer(_output, data, "the output of a machine")
