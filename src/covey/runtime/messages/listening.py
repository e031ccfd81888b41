"""A messenger whose messages need no receives: a listener gets each of them, as calls between nodes want it.

Its ranks may be seats of the run, whose number grows. Nothing here waits for a lane: lanes are asked for, and what is
to be sent waits in the matcher until they open.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from covey.proto.message import Receive
from covey.runtime.messages.messenger import Messenger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from covey.proto.message import Operation, Received
    from covey.runtime.work import Work


class ListeningMessenger(Messenger):
    """Drives while it has lanes, because messages may come at any time."""

    def __init__(
        self, *args: Any, tags: Collection[int], listener: Callable[[list[Received]], None], **named: Any
    ) -> None:
        """Pass messages with one of `tags`, which have up to 64 KiB, to `listener`. For the rest, see `Messenger`.

        One thread at a time calls the listener, which must not block, with all messages that have arrived. Messages of
        a rank come in the order in which they were sent.
        """
        super().__init__(*args, **named)
        self._listener = listener
        self._matcher.listened.update(tags)
        self._heard: deque[Received] = deque()
        """Messages for the listener, in the order of their arrival."""
        self._telling = threading.Lock()
        """Held by the thread that calls the listener."""
        self._asked: set[int] = set()
        """Ranks to which a lane was asked for."""

    def grow(self, size: int) -> None:
        """Take ranks below `size`, too."""
        if size > self._size:
            with self._lock:
                self._size = self._matcher.size = max(self._size, size)

    def push(self, view: memoryview, dst: int, tag: int) -> None:
        """Queue bytes for `flush`; `view` is read until they are sent. If the rank is lost, they are dropped."""
        with self._lock:
            if not self._driving.is_stopping:
                self._matcher.send(view, dst, tag, dtype_code=0, shape=(), is_object=True)
        self._ask_for_lane(dst)

    def flush(self) -> None:
        """Give the kernel what was pushed, as far as it takes it; the rest follows in the background."""
        with self._lock:
            if not self._driving.is_stopping:
                self._lanes.flush_ready()
        self._settle()

    def pull(self, src: int, tag: int, out: memoryview) -> Work[Any]:
        """Start to receive into `out`. A message of another size is dropped, and the work fails with MismatchError."""
        with self._lock:
            work = self._start(self._matcher.receive(src, tag, out), f"receive from rank {src} with tag {tag}")
        self._ask_for_lane(src)
        return self._started(work)

    def _ask_for_lane(self, peer: int) -> None:
        if peer not in self._lanes.by_rank and peer not in self._asked:
            self._asked.add(peer)
            self._renew_lane(peer, None, 0.0)

    def has_more(self) -> bool:
        """Tell whether a thread has to drive even if none waits: while there are lanes."""
        return bool(self._lanes.by_rank) or super().has_more()

    def _take_heard(self, over: list[tuple[Operation, Work[Any] | None]]) -> None:
        for operation, work in over:
            if work is None and isinstance(operation, Receive) and operation.result is not None:
                self._heard.append(operation.result)

    def _settle(self) -> None:
        super()._settle()
        while self._heard and self._telling.acquire(blocking=False):
            try:
                while self._heard:
                    heard = [self._heard.popleft() for _ in range(len(self._heard))]
                    self._listener(heard)
            finally:
                self._telling.release()
