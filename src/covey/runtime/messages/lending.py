"""Lends the streams of a messenger to the compiled executor, which moves short messages in one call each.

A stream is lent after a blocking call, if nothing else is under way. The next thread that takes the messenger's lock
gets all of them back first, so code that holds the lock never sees streams that are out of date.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from covey.proto.message import HEADER_COST
from covey.proto.message_link import ACK_BATCH, LentStreams
from covey.runtime.counters import MessageTraffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.lanes.ring_socket import RingSocket
    from covey.proto.matching import Matcher
    from covey.proto.message_link import MessageSizes


def short_sizes(sizes: MessageSizes) -> tuple[int, int, int, int, int]:
    """Return the limits that the compiled executor has to know."""
    return sizes.eager_bytes, sizes.credit_bytes, sizes.credit_batch, ACK_BATCH, HEADER_COST


class MessengerLock:
    """A lock whose holder has all streams. It has the methods that a `threading.Condition` needs."""

    def __init__(self, matcher: Matcher) -> None:
        self._lock = threading.Lock()
        self._matcher = matcher
        self.traffic = MessageTraffic()
        self._lent: dict[int, RingSocket] = {}
        self._before: set[int] = set()
        """Ranks whose streams were lent, and were taken back for something else."""
        self.short: dict[int, Any] = {}
        """By rank: what moves short messages with it, while its streams are lent. Any thread may read it."""
        self.wake: Callable[[], None] = lambda: None
        """Wakes the threads that wait for a short message."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire as `threading.Lock` does, and take back what was lent."""
        is_acquired = self._lock.acquire(blocking, timeout)
        if is_acquired and self._lent:
            self._take_back()
        return is_acquired

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def lend(self, peer: int, ring_of: Callable[[int], RingSocket | None]) -> None:
        """Lend the streams with a rank, and those that were lent before, where nothing is under way.

        `ring_of` returns the ring of a rank that has one. The caller releases the lock next.
        """
        before, self._before = self._before, set()
        for rank in (peer, *(before - {peer})):
            if (ring := ring_of(rank)) is not None and (streams := self._matcher.lend(rank)) is not None:
                ring.lend(streams)
                self._lent[rank] = ring
                self.traffic.lent(ring.short)
                self.short[rank] = ring.short

    def _take_back(self) -> None:
        self.short.clear()
        has_waiting = False
        while self._lent:
            peer, ring = self._lent.popitem()
            self._before.add(peer)
            streams, kept, is_waited_for = ring.take_back()
            self.traffic.taken_back(ring.short)
            self._matcher.take_back(peer, LentStreams(*streams), kept)
            has_waiting |= is_waited_for
        if has_waiting:
            self.wake()
