"""Lends the streams of a messenger to the compiled executor, which moves messages in one call each.

A stream is lent after a blocking call, if nothing else is under way. The next thread that takes the messenger's lock
gets all of them back first, so code that holds the lock never sees streams that are out of date. A long message that is
under way becomes a work like others, and the call that began it waits for that.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from covey.proto import message_stream
from covey.proto.message import HEADER_COST
from covey.proto.message_link import ACK_BATCH, LentStreams, UnfinishedMessage
from covey.runtime.counters import MessageTraffic
from covey.runtime.pool import POOLED_BYTES
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.lanes.message_sockets import RingSocket
    from covey.proto.matching import Matcher
    from covey.proto.message_link import MessageSizes
    from covey.runtime.messages.pending_works import PendingWorks


def short_sizes(sizes: MessageSizes) -> tuple[int, ...]:
    """Return the limits that the compiled executor has to know."""
    piece_bytes = message_stream.PAYLOAD_PIECE_BYTES
    credit = sizes.credit_bytes, sizes.credit_batch
    return sizes.eager_bytes, *credit, ACK_BATCH, HEADER_COST, piece_bytes, POOLED_BYTES


def unfinished_message(state: tuple[Any, ...]) -> UnfinishedMessage:
    """Return the message that `long_messages.c` describes by `state`."""
    _, array, tag, code, shape, message_id, is_send, moved, rest = state
    view = memoryview(array.reshape(-1).view(np.uint8))
    is_cleared, left = (bool(rest), 0) if is_send else (True, rest)
    return UnfinishedMessage(view, tag, code, shape, message_id, is_send, moved, is_cleared, left)


class LendingLock:
    """A lock whose holder has all streams. It has the methods that a `threading.Condition` needs."""

    def __init__(self, lending: StreamLending) -> None:
        self._lock, self._lending = threading.Lock(), lending

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire as `threading.Lock` does, and take back what was lent."""
        is_acquired = self._lock.acquire(blocking, timeout)
        if is_acquired and self._lending.lent:
            self._lending.take_back()
        return is_acquired

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


MessengerLock: TypeAlias = "LendingLock | threading.Lock"
"""The lock of a messenger: a plain one if its streams are never lent."""


class StreamLending:
    """The streams of a messenger that are lent. Callers hold the messenger's lock."""

    def __init__(self, matcher: Matcher, pending: PendingWorks, name: str) -> None:
        """`name` is that of the group, for error messages."""
        self._matcher, self._pending, self._name = matcher, pending, name
        self.traffic = MessageTraffic()
        self.lent: dict[int, RingSocket] = {}
        self._before: set[int] = set()
        """Ranks whose streams were lent, and were taken back for something else."""
        self.short: dict[int, Any] = {}
        """By rank: what moves messages with it, while its streams are lent. Any thread may read it."""
        self._unfinished: dict[tuple[Any, int], Work[Any]] = {}
        """By what has moved them, and its turn: the works of long messages whose calls have not asked for them yet."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the threads that wait for a message that passes without Python."""

    def lend(self, peer: int, ring_of: Callable[[int], RingSocket | None]) -> None:
        """Lend the streams with a rank, and those that were lent before, where nothing is under way.

        `ring_of` returns the ring of a rank that has one. The caller releases the lock next.
        """
        before, self._before = self._before, set()
        for rank in (peer, *(before - {peer})):
            if (ring := ring_of(rank)) is not None and (streams := self._matcher.lend(rank)) is not None:
                ring.lend(streams)
                self.lent[rank] = ring
                self.traffic.lent(ring.short)
                self.short[rank] = ring.short

    def take_back(self) -> None:
        """Take all streams back."""
        self.short.clear()
        has_waiting = False
        while self.lent:
            peer, ring = self.lent.popitem()
            self._before.add(peer)
            streams, kept, unfinished, is_waited_for = ring.take_back()
            self.traffic.taken_back(ring.short)
            if unfinished is None:
                self._matcher.take_back(peer, LentStreams(*streams), kept)
            else:
                self._go_on(peer, ring, LentStreams(*streams), kept, unfinished)
            has_waiting |= is_waited_for
        if has_waiting:
            self.wake()

    def _go_on(
        self, peer: int, ring: RingSocket, streams: LentStreams, kept: bytes, unfinished: tuple[Any, ...]
    ) -> None:
        """Take streams back in the middle of a long message, and make a work of it."""
        message = unfinished_message(unfinished)
        operation = self._matcher.take_back(peer, streams, kept, message)
        assert operation is not None
        turn, array = unfinished[:2]
        does = f"send of {len(message.view)} bytes to" if message.is_send else "receive from"
        work: Work[Any] = Work(
            f"{self._name}: {does} rank {peer} with tag {message.tag}",
            then=None if message.is_send else lambda _: array,
        )
        self._pending.add(operation, work)
        self._unfinished[ring.short, turn] = work

    def take_unfinished(self, short: Any, turn: int) -> Work[Any]:
        """Return the work of a long message that `short` has begun in that turn. With the lock."""
        return self._unfinished.pop((short, turn))
