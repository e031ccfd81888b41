"""What a process tells about itself: the last operations of its groups, samples of its metrics, and its checks.

All travel in `messages.Inspected`. The operations are also what a process writes to a file when a group fails;
`covey trace` reads these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.wire.decoding import read_from_peer
from covey.wire.messages import RANKS_LIMIT, Name, Seconds, Story, Text, Worded

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS_LIMIT: Final = 4096
"""Operations of one group."""
GROUPS_LIMIT: Final = 64
"""Groups of one process."""
SAMPLES_LIMIT: Final = 10_000
LABELS_LIMIT: Final = 8
CHECKS_LIMIT: Final = 64
"""Checks of one process."""

Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class FlownOperation(msgspec.Struct, frozen=True, array_like=True):
    """One operation of a group, as a rank saw it."""

    sequence: Whole
    operation: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    """Its number in `base.operations`."""
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
    groups: Annotated[tuple[FlownGroup, ...], msgspec.Meta(max_length=GROUPS_LIMIT)]
    run_id: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Equal for processes of one run, and different for two runs of one name; empty if it is not known."""


def joined(flights: Sequence[Flight]) -> Flight:
    """Return the groups of several answers of one process as one."""
    groups = tuple(group for flight in flights for group in flight.groups)[:GROUPS_LIMIT]
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

    results: Annotated[tuple[CheckResult, ...], msgspec.Meta(max_length=CHECKS_LIMIT)]


_flights: msgspec.msgpack.Decoder[Flight] = msgspec.msgpack.Decoder(Flight)
_samples: msgspec.msgpack.Decoder[Samples] = msgspec.msgpack.Decoder(Samples)
_checks: msgspec.msgpack.Decoder[CheckResults] = msgspec.msgpack.Decoder(CheckResults)
encode = msgspec.msgpack.Encoder().encode


def decode_flight(data: bytes) -> Flight:
    """Decode the last operations of a process; raise RemoteProtocolError for anything else."""
    return read_from_peer(_flights, data, "the operations of a process")


def decode_samples(data: bytes) -> Samples:
    """Decode samples of metrics; raise RemoteProtocolError for anything else."""
    return read_from_peer(_samples, data, "samples of metrics")


def decode_checks(data: bytes) -> CheckResults:
    """Decode the results of checks; raise RemoteProtocolError for anything else."""
    return read_from_peer(_checks, data, "the results of checks")
