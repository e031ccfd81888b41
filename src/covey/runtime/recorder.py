"""The recorder of one group: totals by operation, traffic by rank, and the last operations in a ring.

`native/recorder.c` does the same for groups whose plans the compiled executor runs. The thread of an operation writes,
any thread may read.
"""

from __future__ import annotations

import functools
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from covey.base.native import native
from covey.base.numbers import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDS: Final = 4096
"""The operations in the ring."""
BUCKETS: Final = 56
FIRST_BITS: Final = 10
"""The buckets of durations: the first is below 2**FIRST_BITS ns, then two for each octave, the last is open."""
MOST_PEERS: Final = 64
"""Ranks above this are counted, but not named in the record of an operation."""
RUNNING, RETURNED, FAILED = range(3)
OUTCOMES: Final = ("running", "returned", "failed")
"""By the numbers above: how outcomes are called in traces and spans."""
if sys.platform == "linux":
    clock_ns = time.monotonic_ns
else:  # where Python's monotonic clock may stop during sleep, and the one that the extension reads does not
    clock_ns = functools.partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)


class OperationTotals(NamedTuple):
    """What all operations of one kind have done."""

    operation: int
    calls: int
    failures: int
    ns: int
    sent: int
    """Bytes."""
    received: int
    buckets: tuple[int, ...]
    """How many lasted how long; see BUCKETS."""


class RankTraffic(NamedTuple):
    """What was moved between this rank and another one."""

    sent_bytes: int
    sends: int
    received_bytes: int
    receives: int


def bucket_of(ns: int) -> int:
    """Return the number of the bucket of a duration."""
    bits = ns.bit_length()
    if bits <= FIRST_BITS:
        return 0
    return min(1 + 2 * (bits - FIRST_BITS - 1) + (ns >> (bits - 2) & 1), BUCKETS - 1)


def bucket_begin_ns(bucket: int) -> int:
    """Return the least duration of a bucket."""
    octave, half = divmod(bucket - 1, 2)
    return (2 + half) << (FIRST_BITS - 1 + octave) if bucket else 0


def quantile(buckets: Sequence[int], share: float) -> float:
    """Return the seconds within which this share of operations ended, to within its bucket; 0 if none has run.

    Durations are taken as spread evenly over their bucket, and those of the last one as its least.
    """
    wanted = share * sum(buckets)
    for bucket, count in enumerate(buckets):
        if count and wanted <= count:
            begin = bucket_begin_ns(bucket)
            end = bucket_begin_ns(bucket + 1) if bucket < BUCKETS - 1 else begin
            return (begin + (end - begin) * wanted / count) / 1e9
        wanted -= count
    return 0.0


Record = tuple[int, int, int, int, int, int, int, int, int, int]
"""Sequence, operation, outcome, begin and end in ns (0 while it runs), bytes sent and received, a bit for each rank
that it moved something to or from, plans begun, view."""


_NATIVE_RECORD: Final = struct.Struct("=QQqqqqIHBB")
_NATIVE_TOTALS: Final = struct.Struct(f"={5 + BUCKETS}q")
_NATIVE_TRAFFIC: Final = struct.Struct("=4q")
"""How `native/recorder.c` keeps them in memory."""


class OperationProgress(NamedTuple):
    """How far the operations of a group are."""

    sequence: int
    """Number of the operation that began last; 0 if none has begun."""
    operation: int
    begun_ns: int
    ended_ns: int
    """0 while it runs."""


class Recorder(Protocol):
    """What both recorders do."""

    def begin(self, sequence: int, operation: int, /) -> None:
        """Note that an operation begins."""

    def end(self, view: int, has_failed: bool, /) -> None:
        """Note that the operation that began last has ended, in an attempt of this view."""

    def records(self, after: int, /) -> list[Record]:
        """Return the operations after this sequence, those of them that are still in the ring."""

    def totals(self) -> list[OperationTotals]:
        """Return the totals of each kind of operation that has run."""

    def traffic(self) -> list[RankTraffic]:
        """Return the traffic with each rank of the group."""

    def busy(self, since_ns: int, /) -> tuple[int, int]:
        """Return for how many ns after `since_ns` operations in the ring ran, and when the first of them began."""

    def running(self) -> int:
        """Return when the operation in progress began, in ns; 0 if there is none."""

    def progress(self) -> OperationProgress:
        """Return how far the operations are."""

    def spent(self) -> int:
        """Return the time in operations until now, in ns, that of the one in progress included. It takes 0.1 us."""


def make_recorder(size: int, *, is_native: bool) -> Any:
    """Return the recorder of a group of this size: a NativeRecorder for the compiled executor, or a PythonRecorder."""
    return NativeRecorder(size) if is_native else PythonRecorder(size)


class NativeRecorder:
    """The recorder of the compiled executor, which counts transfers itself. What it has counted is read from bytes."""

    def __init__(self, size: int) -> None:
        self.native = native().module.Recorder(size)
        self.begin, self.end, self.spent = self.native.begin, self.native.end, self.native.spent

    def records(self, after: int, /) -> list[Record]:
        last, _, _, records = self.native.snapshot()
        found = []
        for wanted in range(max(after + 1, last - RECORDS + 1, 1), last + 1):
            fields = _NATIVE_RECORD.unpack_from(records, _NATIVE_RECORD.size * (wanted % RECORDS))
            sequence, peers, begun, ended, sent, received, view, phases, operation, outcome = fields
            if sequence == wanted:
                found.append((sequence, operation, outcome, begun, ended, sent, received, peers, phases, view))
        return found

    def totals(self) -> list[OperationTotals]:
        rows = enumerate(_NATIVE_TOTALS.iter_unpack(self.native.snapshot()[2]))
        return [
            OperationTotals(operation, calls, failures, ns, sent, received, tuple(buckets))
            for operation, (calls, failures, ns, sent, received, *buckets) in rows
            if calls
        ]

    def traffic(self) -> list[RankTraffic]:
        return [RankTraffic(*each) for each in _NATIVE_TRAFFIC.iter_unpack(self.native.traffic())]

    def busy(self, since_ns: int, /) -> tuple[int, int]:
        return _busy(self.records(0), since_ns)

    def running(self) -> int:
        sequence, _, begun, ended = self.native.progress()
        return begun if sequence and not ended else 0

    def progress(self) -> OperationProgress:
        return OperationProgress(*self.native.progress())


class PythonRecorder:
    """The recorder of groups whose plans run in Python, which calls `began_phase`, `sent` and `received`."""

    def __init__(self, size: int) -> None:
        self._records: list[Record | None] = [None] * RECORDS
        self._totals = [[0] * (5 + BUCKETS) for _ in OPERATIONS]
        """By operation: count, failures, ns, bytes sent and received, then the buckets."""
        self._traffic = [[0, 0, 0, 0] for _ in range(size)]
        self._last = self._operation = 0
        self._begun = 0
        """When the operation in progress began; 0 if there is none."""
        self._sent = self._received = self._peers = self._phases = 0
        """Counts of the operation in progress."""

    def begin(self, sequence: int, operation: int, /) -> None:
        self._last, self._operation, self._begun = sequence, operation, clock_ns()

    def end(self, view: int, has_failed: bool, /) -> None:
        begun = self._begun
        if not begun:
            return
        ended, operation, last, sent, received = (
            clock_ns(), self._operation, self._last, self._sent, self._received,
        )  # fmt: skip
        self._records[last % RECORDS] = (
            last, operation, FAILED if has_failed else RETURNED, begun, ended, sent, received, self._peers,
            self._phases, view,
        )  # fmt: skip
        lasted, totals = ended - begun, self._totals[operation]
        totals[0] += 1
        totals[2] += lasted
        if has_failed:
            totals[1] += 1
        if self._peers:
            totals[3] += sent
            totals[4] += received
        totals[5 + bucket_of(lasted)] += 1
        self._begun = self._sent = self._received = self._peers = self._phases = 0

    def began_phase(self) -> None:
        """Note that a plan of the operation begins."""
        self._phases += 1

    def sent(self, rank: int, nbytes: int) -> None:
        """Count a transfer to a rank."""
        traffic = self._traffic[rank]
        traffic[0] += nbytes
        traffic[1] += 1
        self._sent += nbytes
        self._peers |= 1 << rank if rank < MOST_PEERS else 0

    def received(self, rank: int, nbytes: int) -> None:
        """Count a transfer from a rank."""
        traffic = self._traffic[rank]
        traffic[2] += nbytes
        traffic[3] += 1
        self._received += nbytes
        self._peers |= 1 << rank if rank < MOST_PEERS else 0

    def records(self, after: int, /) -> list[Record]:
        found = []
        for sequence in range(max(after + 1, self._last - RECORDS + 1, 1), self._last + 1):
            record = self._records[sequence % RECORDS]
            if sequence == self._last and (begun := self._begun):
                progress = self._sent, self._received, self._peers, self._phases
                record = (sequence, self._operation, RUNNING, begun, 0, *progress, 0)
            if record is not None and record[0] == sequence:
                found.append(record)
        return found

    def totals(self) -> list[OperationTotals]:
        return [
            OperationTotals(operation, *numbers[:5], tuple(numbers[5:]))  # type: ignore[call-arg, arg-type]
            for operation, numbers in enumerate(map(tuple, self._totals))
            if numbers[0]
        ]

    def traffic(self) -> list[RankTraffic]:
        return [RankTraffic(*each) for each in self._traffic]

    def busy(self, since_ns: int, /) -> tuple[int, int]:
        return _busy(self.records(0), since_ns)

    def running(self) -> int:
        return self._begun

    def progress(self) -> OperationProgress:
        last, operation, begun = self._last, self._operation, self._begun
        if begun:
            return OperationProgress(last, operation, begun, 0)
        record = self._records[last % RECORDS]
        return OperationProgress(last, operation, *((0, 0) if record is None else record[3:5]))

    def spent(self) -> int:
        begun = self._begun
        return sum(numbers[2] for numbers in self._totals) + (clock_ns() - begun if begun else 0)


def _busy(records: list[Record], since_ns: int) -> tuple[int, int]:
    busy = first = 0
    for record in reversed(records):
        ended = record[4] or clock_ns()
        if ended <= since_ns:
            break
        first = max(record[3], since_ns)
        busy += ended - first
    return busy, first
