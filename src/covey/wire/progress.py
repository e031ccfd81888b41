"""How far a rank is, in one small answer: what views of a run ask each rank for once a second.

A reader forms rates from the counters of two answers. An answer has at most BYTES_LIMIT bytes: `encode_progress` leaves
out what does not fit, the least urgent first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.base.numbers import REPORT_NAME_LETTERS, REPORT_NAMES, REPORT_ROWS
from covey.wire.decoding import read_from_peer
from covey.wire.messages import RANKS_LIMIT, Name, Seconds, Text, Worded
from covey.wire.reports import PastEvent  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES_LIMIT: Final = 2000
"""Most bytes of one answer of a rank about its progress."""
PROGRESS_GROUPS_LIMIT: Final = 4
"""Groups of one process: the largest ones."""
PROGRESS_PEERS_LIMIT: Final = 16
"""Peers of one rank: those with the most traffic."""
DOUBTS_LIMIT: Final = 8
PROGRESS_EVENTS_LIMIT: Final = 16
ROWS_BYTES: Final = 200_000
"""Most bytes of one answer with rows of reports."""
GPUS_LIMIT: Final = 16
NO_EVENTS: Final = 65535
"""As the page of a question: the asker wants no events."""

Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
RankNumber = Annotated[int, msgspec.Meta(ge=-1, lt=RANKS_LIMIT)]
"""A rank of the generation; -1 for none."""
Step = Annotated[int, msgspec.Meta(ge=-(1 << 62), lt=1 << 62)]
Phrase = Annotated[str, msgspec.Meta(max_length=160)]
Speed = Annotated[float, msgspec.Meta(ge=-1, le=1e15)]
"""Bytes per second; -1 if it is not known."""
ReportName = Annotated[str, msgspec.Meta(pattern=rf"^[ -~]{{1,{REPORT_NAME_LETTERS}}}\Z")]
"""A name under which a program reports a number."""
Reported = Annotated[dict[ReportName, float], msgspec.Meta(max_length=REPORT_NAMES)]


class GroupProgress(Worded, frozen=True, array_like=True):
    """How far the operations of one group are."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    rank: RankNumber
    size: Annotated[int, msgspec.Meta(ge=0, le=RANKS_LIMIT)]
    sequence: Whole
    """Number of the operation that began last; 0 if none has begun."""
    operation: Annotated[int, msgspec.Meta(ge=0, lt=256)]
    """Its number in `base.numbers`."""
    is_running: bool
    age_ns: Whole
    """How long the operation in progress runs, or how long ago the last one ended."""
    spent_ns: Whole
    """The time in operations since the group was made."""
    fault: Phrase = ""
    """Why the group has ended, if it failed."""


class PeerProgress(msgspec.Struct, frozen=True, array_like=True):
    """What was moved between this rank and another, and how."""

    rank: RankNumber
    sent: Whole
    """Bytes, since the run began here."""
    received: Whole
    lane: Name
    medium: Name
    """`local`, `wired`, `wireless`, `virtual` or `unknown`."""
    round_trip: Seconds
    """-1 if it was not measured."""
    rate: Speed
    """What the lane has sent in all while it had something to send."""
    is_relayed: bool = False
    acknowledged: Whole = 0
    """Bytes that the other machine's kernel has got over the connections of the lane; 0 if that is not known."""
    busy_us: Whole = 0
    """Microseconds in which the network held up what the lane had to send; 0 if that is not known."""


class Doubt(Worded, frozen=True, array_like=True):
    """A member that is not well, as this rank sees it."""

    rank: RankNumber
    state: Name
    """As in `covey.MemberHealth`."""
    age: Seconds
    why: Phrase


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """What the program of a rank has reported of one step, or since the last one."""

    at: Seconds
    """Since 1970, by the clock of the rank."""
    step: Step | None
    values: Reported
    compute: Seconds = -1.0
    """Seconds of this step outside of operations; -1 if the program reported no step before."""
    sync: Seconds = -1.0
    """Seconds of this step in operations."""


class RankProgress(Worded, frozen=True, array_like=True):
    """How far a process is."""

    run: Text
    run_id: Annotated[bytes, msgspec.Meta(max_length=16)]
    """Equal for processes of one run, and different for two runs of one name."""
    rank: RankNumber
    """In the current generation; -1 while there is none."""
    generation: Whole
    view: Whole
    live: Annotated[int, msgspec.Meta(ge=0, le=RANKS_LIMIT)]
    """Members of the view."""
    size: Annotated[int, msgspec.Meta(ge=0, le=RANKS_LIMIT)]
    """Members with which the generation began."""
    began: Seconds
    """When this process was about to be in the run, since 1970."""
    taken_ns: Whole
    """When this was written down, on the monotonic clock of the rank."""
    spent_ns: Whole
    """The time in operations of all groups."""
    sent: Whole
    """Bytes that collectives have sent."""
    received: Whole
    coded: Whole
    """Bytes that compressed operations have sent, and what they would have sent otherwise."""
    plain: Whole
    pid: Whole
    host: Name
    """The name of the machine."""
    version: Name
    """Release of covey."""
    groups: Annotated[tuple[GroupProgress, ...], msgspec.Meta(max_length=PROGRESS_GROUPS_LIMIT)] = ()
    codec: Name = ""
    """Codec of the last compressed operation."""
    codec_reason: Phrase = ""
    plan: Phrase = ""
    """The plan that was chosen last for large sums, and why."""
    report: ReportRow | None = None
    """The last values of all names."""
    reported: Whole = 0
    """How often the program has reported."""
    doubts: Annotated[tuple[Doubt, ...], msgspec.Meta(max_length=DOUBTS_LIMIT)] = ()
    peers: Annotated[tuple[PeerProgress, ...], msgspec.Meta(max_length=PROGRESS_PEERS_LIMIT)] = ()
    next_event: Annotated[int, msgspec.Meta(ge=0, lt=NO_EVENTS)] = 0
    """The page of the question for events after those of this answer."""
    events: Annotated[tuple[PastEvent, ...], msgspec.Meta(max_length=PROGRESS_EVENTS_LIMIT)] = ()
    program: Phrase = ""
    is_recovering: bool = False
    """Whether operations have not continued yet after a loss."""


class ReportRows(msgspec.Struct, frozen=True, array_like=True):
    """What the program of a rank has reported since it began, oldest first."""

    rows: Annotated[tuple[ReportRow, ...], msgspec.Meta(max_length=REPORT_ROWS)]


class GpuReading(Worded, frozen=True, array_like=True):
    """One GPU. None is not known."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    busy: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    memory_used: Whole | None
    memory_total: Whole | None
    temperature: Annotated[float, msgspec.Meta(ge=-300, le=10_000)] | None


class Readings(msgspec.Struct, frozen=True, array_like=True):
    """How a machine is used. None is not known."""

    cores: Whole | None
    processor: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    memory_used: Whole | None
    memory_total: Whole | None
    temperature: Annotated[float, msgspec.Meta(ge=-300, le=10_000)] | None
    gpus: Annotated[tuple[GpuReading, ...], msgspec.Meta(max_length=GPUS_LIMIT)] = ()


_progress: msgspec.msgpack.Decoder[RankProgress] = msgspec.msgpack.Decoder(RankProgress)
_reports: msgspec.msgpack.Decoder[ReportRows] = msgspec.msgpack.Decoder(ReportRows)
_readings: msgspec.msgpack.Decoder[Readings] = msgspec.msgpack.Decoder(Readings)
encode = msgspec.msgpack.Encoder().encode


def encode_progress(progress: RankProgress, events: list[PastEvent], first_event: int) -> bytes:
    """Encode what a rank tells, with as many of the events from the number `first_event` on as fit.

    What does not fit is left out: links, then reasons and plans, then the ends of long names, then reports.
    """
    data, shorten = encode(progress), _shorter(progress)
    while len(data) > BYTES_LIMIT and (shorter := next(shorten, None)) is not None:
        progress, data = shorter, encode(shorter)
    told: list[PastEvent] = []
    room = BYTES_LIMIT - len(data)
    for event in events[:PROGRESS_EVENTS_LIMIT]:
        size = len(encode(event))
        if size > room and not told and size > BYTES_LIMIT // 2:  # it would never fit
            event = msgspec.structs.replace(event, text=event.text[:200], names=event.names[:4], ranks=event.ranks[:64])
            size = len(encode(event))
        if size > room:
            break
        room -= size
        told.append(event)
    following = (first_event + len(told)) % NO_EVENTS
    return encode(msgspec.structs.replace(progress, events=tuple(told), next_event=following))


def _shorter(progress: RankProgress) -> Iterator[RankProgress]:
    """Yield the same with less and less in it."""
    cut = msgspec.structs.replace
    for field, most in (("peers", 4), ("peers", 0), ("doubts", 2), ("groups", 1)):
        yield (progress := cut(progress, **{field: getattr(progress, field)[:most]}))
    yield (progress := cut(progress, plan="", codec_reason="", program=""))
    groups = tuple(cut(group, name=group.name[:20], fault=group.fault[:60]) for group in progress.groups)
    yield (progress := cut(progress, doubts=(), groups=groups, codec=progress.codec[:20]))
    yield (progress := cut(progress, run=progress.run[:24], host=progress.host[:24]))
    report = progress.report
    while report is not None and report.values:
        report = cut(report, values=dict(list(report.values.items())[:-4]))
        yield (progress := cut(progress, report=report))


def decode_progress(data: bytes) -> RankProgress:
    """Decode how far a process is; raise RemoteProtocolError for anything else."""
    return read_from_peer(_progress, data, "the progress of a process")


def encode_reports(rows: list[ReportRow]) -> bytes:
    """Encode rows of reports; of more than fit, every second one, or every fourth, and so on, and the last one."""
    rows = rows[-REPORT_ROWS:]
    while len(data := encode(ReportRows(tuple(rows)))) > ROWS_BYTES and len(rows) > 1:
        rows = [*rows[:-1:2], rows[-1]]
    return data


def decode_reports(data: bytes) -> ReportRows:
    """Decode what a program has reported; raise RemoteProtocolError for anything else."""
    return read_from_peer(_reports, data, "the reports of a program")


def decode_readings(data: bytes) -> Readings:
    """Decode how a machine is used; raise RemoteProtocolError for anything else."""
    return read_from_peer(_readings, data, "the readings of a machine")
