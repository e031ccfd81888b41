"""A messenger whose messages need no receives: a listener gets each of them, as calls between nodes want it.

Its ranks may be seats of the run, whose number grows. Nothing here waits for a lane: lanes are asked for, and what is
to be sent waits in the matcher until they open.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from covey.runtime.messages.messenger import Messenger
from covey.runtime.messages.shared_driving import SharedDriving

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from covey.runtime.work import Work


class ListeningMessenger(Messenger):
    """Is driven while it has lanes, because messages may come at any time (`shared_driving`)."""

    _driving_kind = SharedDriving
    _driving: SharedDriving

    def __init__(
        self,
        *args: Any,
        tags: Collection[int],
        listener: Callable[[list[tuple[int, bytes]]], None],
        gives_way: Callable[[], bool] | None = None,
        **named: Any,
    ) -> None:
        """Pass messages with one of `tags`, which have up to 64 KiB, to `listener`. For the rest, see `Messenger`.

        One thread at a time calls the listener, which must not block, with the sources and payloads of all messages
        that have arrived. Messages of a rank come in the order in which they were sent. `gives_way` tells whether
        something more urgent moves elsewhere.
        """
        super().__init__(*args, **named)
        self._lanes.gives_way, self._lanes.doubts = gives_way, True
        self._listener = listener
        self._matcher.listened.update(tags)
        self._queued: deque[tuple[int, int, bytes]] = deque()
        """Ranks, tags and payloads that `flush` sends."""
        self._telling = threading.Lock()
        """Held by the thread that calls the listener."""
        self._asked: set[int] = set()
        """Ranks to which a lane was asked for."""

    @property
    def size(self) -> int:
        """Ranks below this are taken."""
        return self._size

    def grow(self, size: int) -> None:
        """Take ranks below `size`, too."""
        with self._lock:
            self._size = self._matcher.size = max(self._size, size)

    def tell(self, data: bytes, dst: int, tag: int) -> None:
        """Queue a message of up to 64 KiB for `flush`. If the rank is lost, it is dropped."""
        self._queued.append((dst, tag, data))
        self._ask_for_lane(dst)

    def push(self, view: memoryview, dst: int, tag: int) -> Work[None]:
        """Start to send bytes; `view` is read until the work is done. If the rank is or gets lost, the work fails."""
        with self._lock:
            operation = self._matcher.send(view, dst, tag, dtype_code=0, shape=(), is_object=True)
            work = self._start(operation, f"send of {len(view)} bytes to rank {dst} with tag {tag}")
        self._ask_for_lane(dst)
        return self._started(work)

    def delivered_bytes(self) -> int:
        """Return a number that changes while bytes are delivered."""
        with self._lock:
            return self._lanes.delivered_bytes()

    def flush(self) -> None:
        """Give the kernel what was queued, as far as it takes it; the rest follows in the background."""
        if not self._driving.holds_flush:
            super().flush()

    def _flush_with_lock(self) -> None:
        queued = self._queued
        while queued:
            dst, tag, data = queued.popleft()
            self._matcher.tell(data, dst, tag)
        super()._flush_with_lock()

    def pull(self, src: int, tag: int, out: memoryview) -> Work[Any]:
        """Start to receive into `out`. A message of another size is dropped, and the work fails with MismatchError."""
        with self._lock:
            work = self._start(self._matcher.receive(src, tag, out), f"receive from rank {src} with tag {tag}")
        self._ask_for_lane(src)
        return self._started(work)

    def _ask_for_lane(self, peer: int) -> None:
        if peer not in self._lanes.by_rank and peer not in self._asked:
            self._asked.add(peer)
            self._renewal.ask(peer)

    def has_more(self) -> bool:
        """Tell whether a thread has to drive even if none waits: while there are lanes."""
        return bool(self._lanes.by_rank) or super().has_more()

    def close(self, flush_deadline: float) -> None:
        """Deliver what was queued and sent, until `flush_deadline` at the latest; then end all works and lanes."""
        with self._lock:
            if not self._driving.is_stopping:
                self._flush_with_lock()
        super().close(flush_deadline)

    # Threads

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Drive until a work of the listener is done, or wait for it, until the deadline at the latest."""
        self._driving.drive(self, work, deadline)

    def work_ended(self) -> None:
        """Wake the thread that drives, if it is another one: the work that it waits for may have ended."""
        self._driving.works_ended()

    def attend(self) -> None:
        """Expect messages that no caller waits for."""
        self._driving.attend()

    def run_soon(self, job: Callable[[], None], elsewhere: Callable[[], None]) -> bool:
        """Run a short job on this thread, once what has arrived is handled and another thread may receive.

        If another job takes long before it, `elsewhere` is called instead. Return False if this thread cannot run jobs.
        """
        if not self._driving.may_run_jobs(self):
            return False
        self._driving.add_job(job, elsewhere)
        return True

    def _settle(self) -> None:
        super()._settle()
        while self._matcher.heard and self._telling.acquire(blocking=False):
            try:
                while self._matcher.heard:
                    with self._lock:
                        heard, self._matcher.heard = self._matcher.heard, []
                    self._listener(heard)
            finally:
                self._telling.release()
