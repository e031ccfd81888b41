"""Counters of groups and of the process, as plain integers: the code that counts adds to them, and nothing else.

A group's counters change on the thread that uses the group, those of its messages under the messenger's lock, and those
of the process on the control loop. Any thread may read them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from covey.base.numbers import NAME_LIMIT
from covey.runtime.recorder import BUCKETS, OperationTotals, RankTraffic, make_recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.base.numbers import Seat
    from covey.proto.message import Receive

NO_LANE: Final = "none"
"""The kind of lane of traffic before any lane was opened."""

CODECS_LIMIT: Final = 32
"""Codecs that are counted each for itself."""


class MessageCounts(NamedTuple):
    """Messages, and the bytes of their payloads."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0

    def plus(self, more: Sequence[int]) -> MessageCounts:
        """Return the sum of these and other counts."""
        return MessageCounts(*(a + b for a, b in zip(self, more, strict=True)))


class PassingMessages(Protocol):
    """Counts messages that the compiled executor moves by itself."""

    def counts(self) -> tuple[int, int, int, int]: ...


class MessageTraffic:
    """The messages of one group on this rank. The holder of the messenger's lock changes it."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: tuple[MessageCounts, tuple[PassingMessages, ...]] = MessageCounts(), ()
        """In one attribute, so that a thread without the lock never misses a message, or counts it twice."""

    def counts(self) -> MessageCounts:
        """Return what was moved so far. On any thread."""
        counts, passing = self._state
        for each in passing:
            counts = counts.plus(each.counts())
        return counts

    def began(self, view: memoryview) -> None:
        """Count a message whose send begins."""
        counts, passing = self._state
        self._state = counts.plus((1, view.nbytes, 0, 0)), passing

    def ended(self, receives: Iterable[Receive]) -> None:
        """Count those of the ended receives that have got a message."""
        counts, passing = self._state
        for operation in receives:
            if operation.result is not None:
                payload = operation.out if operation.result.data is None else operation.result.data
                counts = counts.plus((0, 0, 1, 0 if payload is None else len(payload)))
        self._state = counts, passing

    def lent(self, passing: PassingMessages) -> None:
        """Count what passes from now on, too."""
        counts, others = self._state
        self._state = counts, (*others, passing)

    def taken_back(self, passing: PassingMessages) -> None:
        """Keep the counts of what has passed."""
        counts, others = self._state
        self._state = counts.plus(passing.counts()), tuple(each for each in others if each is not passing)


class CodecTraffic(NamedTuple):
    """What the operations compressed with one codec have sent from this rank."""

    operations: int
    sent_bytes: int
    plain_bytes: int
    """What would have been sent without compression."""


class GroupCounters:
    """The counters of one group on this rank; the group's engine owns them."""

    def __init__(self, name: str, rank: int, seats: Sequence[Seat], *, is_native: bool) -> None:
        """`seats` are the positions in the run of the group's ranks."""
        self.name, self.rank, self.seats = name, rank, tuple(seats)
        self.recorder: Any = make_recorder(len(seats), is_native=is_native)
        self.messages = MessageTraffic()
        self.codecs: dict[str, CodecTraffic] = {}
        self.codec, self.codec_reason = "", ""
        """Codec of the last compressed operation, and why `compress="auto"` chose it."""
        self.fault = ""
        """Why the group has ended, if it failed."""
        self.is_over = False
        """Whether the group is closed or was dropped. Its numbers stay in those of the process."""
        self._kinds: dict[int, str] = {}
        """By rank: the kind of the lane that was opened last."""
        self._earlier: list[tuple[int, str, RankTraffic]] = []
        """Traffic with a rank at the time when a lane of another kind replaced one of this kind."""

    def lane_opened(self, rank: int, kind: str) -> None:
        """Note that a lane to a rank was opened: what moves from now on moves over this kind."""
        before = self._kinds.get(rank, kind)
        if before != kind:
            self._earlier.append((rank, before, self.recorder.traffic()[rank]))
        self._kinds[rank] = kind
        process.lanes[kind] += 1

    def compressed(self, codec: str, sent_bytes: int, plain_bytes: int, reason: str = "") -> None:
        """Count an operation that was compressed; `reason` is why this codec was chosen."""
        codec = codec.encode("ascii", "replace").decode()[:NAME_LIMIT]
        if codec not in self.codecs and len(self.codecs) >= CODECS_LIMIT:
            codec = "other"
        self.codec, self.codec_reason = codec, reason
        before = self.codecs.get(codec, CodecTraffic(0, 0, 0))
        self.codecs[codec] = CodecTraffic(
            before.operations + 1, before.sent_bytes + sent_bytes, before.plain_bytes + plain_bytes
        )

    def traffic(self) -> dict[tuple[Seat, str], RankTraffic]:
        """Return what was moved, by the seat of the other rank and the kind of lane."""
        found: dict[tuple[Seat, str], RankTraffic] = {}
        totals = self.recorder.traffic()
        done = [RankTraffic(0, 0, 0, 0)] * len(totals)
        for rank, kind, until in list(self._earlier):
            _add_traffic(found, (self.seats[rank], kind), _minus(until, done[rank]))
            done[rank] = until
        for rank, total in enumerate(totals):
            if any(rest := _minus(total, done[rank])):
                _add_traffic(found, (self.seats[rank], self._kinds.get(rank, NO_LANE)), rest)
        return found


class Totals:
    """The sum of the counters of several groups."""

    def __init__(self) -> None:
        self.operations: dict[int, OperationTotals] = {}
        self.traffic: dict[tuple[Seat, str], RankTraffic] = {}
        self.messages = MessageCounts()
        self.codecs: dict[str, CodecTraffic] = {}

    def add(self, group: GroupCounters) -> None:
        """Add the counters of a group."""
        self.add_operations(group.recorder.totals())
        for key, traffic in group.traffic().items():
            _add_traffic(self.traffic, key, traffic)
        self.messages = self.messages.plus(group.messages.counts())
        for codec, numbers in list(group.codecs.items()):
            before = self.codecs.get(codec, CodecTraffic(0, 0, 0))
            self.codecs[codec] = CodecTraffic(*(a + b for a, b in zip(before, numbers, strict=True)))

    def add_operations(self, totals: Iterable[OperationTotals]) -> None:
        for more in totals:
            before = self.operations.get(more.operation)
            if before is None:
                before = OperationTotals(more.operation, 0, 0, 0, 0, 0, (0,) * BUCKETS)
            buckets = tuple(a + b for a, b in zip(before.buckets, more.buckets, strict=True))
            sums = (a + b for a, b in zip(before[1:6], more[1:6], strict=True))
            self.operations[more.operation] = OperationTotals(more.operation, *sums, buckets)  # type: ignore[call-arg, arg-type]

    def copy(self) -> Totals:
        """Return totals that can be added to."""
        copy = Totals()
        copy.operations, copy.traffic, copy.codecs = dict(self.operations), dict(self.traffic), dict(self.codecs)
        copy.messages = self.messages
        return copy


class ProcessCounters:
    """The counters of this process, and the groups in it."""

    def __init__(self) -> None:
        self.since = time.time()
        """When this process began to count, in seconds since 1970."""
        self.heartbeats_sent = self.heartbeats_answered = self.suspicions = self.elections = 0
        self.calls_made = self.calls_failed = self.calls_served = 0
        self.recovery_seconds = 0.0
        self.lanes: Counter[str] = Counter()
        """Lanes of collectives that were opened, by kind."""
        self.events: Counter[str] = Counter()
        """Events of the run, by kind."""
        self.nodes: weakref.WeakSet[Any] = weakref.WeakSet()
        """The nodes of this process (`joining.node`): mostly one."""
        self._lock = threading.Lock()
        self._groups: list[GroupCounters] = []
        self._past = Totals()
        """Totals of the groups that are over."""
        self._spending: tuple[int, tuple[Callable[[], int], ...]] = 0, ()
        """The time in operations of the groups that are over, and what returns it for each of the others. In one
        attribute, so that a reader without the lock counts each group once."""

    def register(self, group: GroupCounters) -> None:
        """Count a new group among those of the process. Groups that are over free their memory here."""
        with self._lock:
            self._sweep()
            self._groups.append(group)
            self._spending = self._spending[0], self._spent_of_groups()

    def sweep(self) -> None:
        """Keep only the totals of the groups that are over."""
        with self._lock:
            self._sweep()

    def groups(self) -> list[GroupCounters]:
        """Return the counters of the open groups, in the order in which the groups were made."""
        with self._lock:
            self._sweep()
            return list(self._groups)

    def totals(self) -> Totals:
        """Return the sum over all groups that this process has had."""
        with self._lock:
            self._sweep()
            total = self._past.copy()
            for group in self._groups:
                total.add(group)
            return total

    def spent_ns(self) -> int:
        """Return the time in operations of all groups until now. On any thread, in a fraction of a microsecond."""
        spent, others = self._spending
        for each in others:
            spent += each()
        return spent

    def moved(self) -> dict[Seat, tuple[int, int]]:
        """Return the bytes that collectives have sent to each seat, and received from it."""
        with self._lock:
            found: dict[Seat, tuple[int, int]] = {}
            for (seat, _), each in self._past.traffic.items():
                sent, received = found.get(seat, (0, 0))
                found[seat] = sent + each.sent_bytes, received + each.received_bytes
            for group in self._groups:
                for seat, each in zip(group.seats, group.recorder.traffic(), strict=True):
                    if each.sent_bytes or each.received_bytes:
                        sent, received = found.get(seat, (0, 0))
                        found[seat] = sent + each.sent_bytes, received + each.received_bytes
        return found

    def coded(self) -> tuple[int, int]:
        """Return the bytes that compressed operations have sent, and what they would have sent otherwise."""
        with self._lock:
            codecs = [self._past.codecs, *(group.codecs for group in self._groups)]
            each = [traffic for held in codecs for traffic in list(held.values())]
        return sum(traffic.sent_bytes for traffic in each), sum(traffic.plain_bytes for traffic in each)

    def _sweep(self) -> None:
        for group in [group for group in self._groups if group.is_over]:
            self._past.add(group)
            self._groups.remove(group)
            self._spending = self._spending[0] + group.recorder.spent(), self._spent_of_groups()

    def _spent_of_groups(self) -> tuple[Callable[[], int], ...]:
        return tuple(group.recorder.spent for group in self._groups)

    def forked(self) -> None:
        """Begin anew in a forked child, in which nothing has happened yet."""
        self.__init__()  # type: ignore[misc]


process: Final = ProcessCounters()


def _minus(traffic: RankTraffic, before: RankTraffic) -> RankTraffic:
    return RankTraffic(*(a - b for a, b in zip(traffic, before, strict=True)))


def _add_traffic(traffic: dict[tuple[Seat, str], RankTraffic], key: tuple[Seat, str], more: RankTraffic) -> None:
    before = traffic.get(key, RankTraffic(0, 0, 0, 0))
    traffic[key] = RankTraffic(*(a + b for a, b in zip(before, more, strict=True)))


os.register_at_fork(after_in_child=process.forked)
