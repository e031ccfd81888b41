"""A messenger whose messages need no receives: a listener gets each of them, as calls between nodes want it.

Its ranks may be seats of the run, whose number grows. Nothing here waits for a lane: lanes are asked for, and what is
to be sent waits in the matcher until they open.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from covey.base.numbers import REALTIME
from covey.runtime.messages.messenger import Messenger
from covey.runtime.messages.shared_driving import SharedDriving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.runtime.work import Work


class ListeningMessenger(Messenger):
    """Is driven while it has lanes, because messages may come at any time (`shared_driving`)."""

    _driving_kind = SharedDriving
    _driving: SharedDriving
    _lends = False

    def __init__(
        self,
        *args: Any,
        tag: int,
        listener: Callable[[list[tuple[Any, bytes]]], None],
        gives_way: Callable[[], bool] | None = None,
        **named: Any,
    ) -> None:
        """Pass messages with `tag`, which have up to 64 KiB, to `listener`. For the rest, see `Messenger`.

        One thread at a time calls the listener, which must not block, with the sources and payloads of all messages
        that have arrived. Messages of a rank come in the order in which they were sent. `gives_way` tells whether
        something more urgent moves elsewhere.
        """
        super().__init__(*args, **named)
        self.driving = self._driving
        """The threads that drive: those of callers, and background threads."""
        self._lanes.gives_way, self._lanes.doubts = gives_way, True
        self._listener, self._tag = listener, tag
        self._matcher.listened.add(tag)
        self._queued: deque[tuple[int, bytes]] = deque()
        """Ranks and payloads that `flush` sends."""
        self._telling = threading.Lock()
        """Held by the thread that calls the listener."""
        self._asked: set[int] = set()
        """Ranks to which a lane was asked for."""

    # Messages

    def flush(self, messages: Iterable[tuple[int, bytes]] = ()) -> None:
        """Send messages of up to 64 KiB to ranks, in this order. Those to a lost rank are dropped.

        Give the kernel what it takes of them, and of what was sent before; the rest follows in the background. On a
        thread that runs jobs, all of it waits for a moment for what the next ones send.
        """
        self._queued.extend(messages)
        driving, unreached = self._driving, None
        if driving.job_thread is threading.current_thread() and time.monotonic() < driving.hold_until:
            return
        with self._lock:
            if driving.is_stopping:
                return
            while self._queued:
                rank, data = self._queued.popleft()
                if rank not in self._lanes.by_rank:
                    unreached = self._expect(rank, unreached)
                self._matcher.tell(data, rank, self._tag)
            if self._matcher.ready:
                self._lanes.flush_ready()
        if unreached or self._lanes.ended or self._matcher.completed:
            self._reach(unreached)
            self._settle()

    def push(self, view: memoryview, dst: int, tag: int, priority: int, share: float) -> Work[None]:
        """Start to send bytes; `view` is read until the work is done. If the rank is or gets lost, the work fails.

        `share` is that of the credit which it may use up.
        """
        with self._lock:
            unreached = self._expect(dst, None)
            operation = self._matcher.send(
                view, dst, tag, dtype_code=0, shape=(), is_object=True, priority=priority, share=share
            )
            if priority < REALTIME:
                self._hurry(dst, priority)
            work = self._start(operation, f"send of {len(view)} bytes to rank {dst} with tag {tag}")
        self._reach(unreached)
        return self._started(work)

    def pull(self, src: int, tag: int, out: memoryview) -> Work[Any]:
        """Start to receive into `out`. A message of another size is dropped, and the work fails with MismatchError."""
        with self._lock:
            unreached = self._expect(src, None)
            work = self._start(self._matcher.receive(src, tag, out), f"receive from rank {src} with tag {tag}")
        self._reach(unreached)
        return self._started(work)

    def _expect(self, rank: int, unreached: list[int] | None) -> list[int] | None:
        """Take a rank, with the lock, and add it to those that `_reach` asks for a lane if that was not done yet."""
        if rank >= self._size:
            self._size = self._matcher.size = rank + 1
        if rank in self._lanes.by_rank or rank in self._asked:
            return unreached
        self._asked.add(rank)
        return [*(unreached or ()), rank]

    def _reach(self, ranks: list[int] | None) -> None:
        for rank in ranks or ():
            self._renewal.ask(rank)

    def adopt(self, peer: int, sock: Any) -> None:
        """Use a socket as the lane to `peer`, which may be a new rank; see `Messenger.adopt`."""
        with self._lock:
            self._size = self._matcher.size = max(self._size, peer + 1)
        super().adopt(peer, sock)

    def delivered_bytes(self) -> int:
        """Return a number that changes while bytes are delivered."""
        with self._lock:
            return self._lanes.delivered_bytes()

    def has_more(self) -> bool:
        """Tell whether a thread has to drive even if none waits: while there are lanes."""
        return bool(self._lanes.by_rank) or super().has_more()

    def close(self, flush_deadline: float) -> None:
        """Deliver what was queued and sent, until `flush_deadline` at the latest; then end all works and lanes."""
        with self._lock:
            if not self._driving.is_stopping:
                for rank, data in self._queued:
                    self._matcher.tell(data, rank, self._tag)
                self._queued.clear()
                self._lanes.flush_ready()
        super().close(flush_deadline)

    def _settle(self) -> None:
        if self._lanes.ended or self._renewal.departed or self._matcher.completed:
            super()._settle()
        while self._matcher.heard and self._telling.acquire(blocking=False):
            try:
                while self._matcher.heard:
                    with self._lock:
                        heard, self._matcher.heard = self._matcher.heard, []
                    self._listener(heard)
            finally:
                self._telling.release()

    # Threads

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Drive until a work of the listener is done, or wait for it, until the deadline at the latest."""
        self._driving.drive(self, work, deadline)
