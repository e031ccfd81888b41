"""Puts the operations of several ranks on one time line, and finds which rank waited for which. Pure.

Ranks of one host have the same clock. The clocks of other hosts are compared by what heartbeats measured; an error of
half a round trip remains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from covey.base.numbers import operation_name
from covey.runtime.recorder import OUTCOMES, RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.wire.reports import Flight, FlownOperation


class RankCall(NamedTuple):
    """One operation on one rank, in nanoseconds of the common time line."""

    rank: int
    begun: int
    ended: int
    """When it ended; for one that runs, when its rank wrote it down."""
    operation: FlownOperation

    @property
    def name(self) -> str:
        return operation_name(self.operation.operation)


class RankWait(NamedTuple):
    """One rank waited for another in one operation."""

    group: str
    sequence: int
    waiting: RankCall
    late: int
    """The rank that began last."""
    ns: int


@dataclass(frozen=True)
class Stuck:
    """An operation that some ranks are in and others have not begun."""

    group: str
    sequence: int
    name: str
    inside: tuple[int, ...]
    missing: tuple[int, ...]
    """The ranks that have not begun it, as far as their operations are known."""


@dataclass(frozen=True)
class Timeline:
    """The operations of all ranks whose operations are known."""

    calls: dict[tuple[str, int], list[RankCall]]
    """By group and number of the operation."""
    flights: tuple[Flight, ...]
    taken: dict[tuple[str, int], int]
    """By group and rank: when the rank told its operations."""
    unmeasured: tuple[str, ...]
    """Hosts whose clock was compared with no other."""

    def waits(self) -> Iterator[RankWait]:
        """Yield each wait of a rank for the one that began the same operation last."""
        for (group, sequence), calls in sorted(self.calls.items()):
            last = max(calls, key=lambda call: call.begun)
            for call in calls:
                waited = min(last.begun, call.ended) - call.begun
                if call is not last and waited > 0:
                    yield RankWait(group, sequence, call, last.rank, waited)

    def stuck(self) -> list[Stuck]:
        """Return the operations in progress that not all ranks have begun.

        A rank that told its operations before another one began is not known to be missing there.
        """
        sizes = {group.name: group.size for flight in self.flights for group in flight.groups}
        found = []
        for (group, sequence), calls in sorted(self.calls.items()):
            running = [call for call in calls if call.operation.outcome == RUNNING]
            first = min((call.begun for call in running), default=0)
            others = set(range(sizes[group])) - {call.rank for call in calls}
            missing = {rank for rank in others if self.taken.get((group, rank), first) >= first}
            if running and missing:
                ranks = tuple(sorted(call.rank for call in running))
                found.append(Stuck(group, sequence, running[0].name, ranks, tuple(sorted(missing))))
        return found


def merge(flights: Sequence[Flight], measured: Mapping[str, float] | None = None) -> Timeline:
    """Return the time line of what several processes told.

    `measured` has, by host, by how many seconds its clock is ahead; without, what the processes measured is used.
    """
    ahead = clock_offsets(flights) if measured is None else dict(measured)
    calls: dict[tuple[str, int], list[RankCall]] = defaultdict(list)
    taken: dict[tuple[str, int], int] = {}
    for flight in flights:
        shift = flight.clock_ns - int(ahead.get(flight.host, 0.0) * 1e9)
        for group in flight.groups:
            taken.setdefault((group.name, group.rank), flight.taken_ns + shift)
            for operation in group.operations:
                ended = operation.ended_ns or max(flight.taken_ns, operation.begun_ns)
                call = RankCall(group.rank, operation.begun_ns + shift, ended + shift, operation)
                known = calls[group.name, operation.sequence]
                if all(other.rank != group.rank for other in known):  # the same rank may have written several files
                    known.append(call)
    hosts = {flight.host: flight.host_name for flight in flights}
    unmeasured = tuple(name for host, name in hosts.items() if host not in ahead)
    return Timeline(dict(calls), tuple(flights), taken, unmeasured)


def clock_offsets(flights: Sequence[Flight]) -> dict[str, float]:
    """Return by how many seconds the clock of each host is ahead of the first one's, for hosts that were measured."""
    host_of = {flight.seat: flight.host for flight in flights}
    edges: dict[str, dict[str, float]] = defaultdict(dict)
    for flight in flights:
        for seat, offset in flight.offsets:
            other = host_of.get(seat, flight.host)
            if other != flight.host:
                edges[flight.host].setdefault(other, offset)
                edges[other].setdefault(flight.host, -offset)
    known = {flights[0].host: 0.0} if flights else {}
    reached = list(known)
    for host in reached:
        for other, offset in sorted(edges[host].items()):
            if other not in known:
                known[other] = known[host] + offset
                reached.append(other)
    return known


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the time line as JSON that Perfetto and chrome://tracing show: a row for each group of each rank."""
    first = min((call.begun for calls in timeline.calls.values() for call in calls), default=0)
    places: dict[tuple[str, int], dict[str, int]] = {}
    """By group and rank: the numbers of its process and row."""
    events: list[dict[str, Any]] = []
    for flight in timeline.flights:
        label = f"rank {flight.groups[0].rank if flight.groups else flight.seat} ({flight.host_name}, {flight.pid})"
        events.append(_label("process_name", label, pid=flight.seat, tid=0))
        for row, group in enumerate(flight.groups):
            place = places.setdefault((group.name, group.rank), {"pid": flight.seat, "tid": row})
            events.append(_label("thread_name", group.name, **place))
    for (name, _), calls in sorted(timeline.calls.items()):
        for call in calls:
            shown = _slice(call.name, call.begun - first, call.ended - call.begun, places[name, call.rank])
            events.append({**shown, "args": _facts(call)})
    for wait in timeline.waits():
        place = places[wait.group, wait.waiting.rank]
        events.append(_slice(f"waits for rank {wait.late}", wait.waiting.begun - first, wait.ns, place))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"begin": first / 1e9}}


def _label(what: str, name: str, **place: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "args": {"name": name}, **place}


def _slice(name: str, begun: int, lasted: int, place: Mapping[str, int]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "covey", "ts": begun / 1e3, "dur": lasted / 1e3, **place}


def _facts(call: RankCall) -> dict[str, Any]:
    operation = call.operation
    return {
        "operation": operation.sequence,
        "outcome": OUTCOMES[operation.outcome],
        "sent": operation.sent,
        "received": operation.received,
        "peers": [rank for rank in range(64) if operation.peers >> rank & 1],
        "phases": operation.phases,
        "view": operation.view,
    }
