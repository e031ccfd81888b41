"""The queue of a group's asynchronous operations, and the worker thread that performs them in order."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import BusyError
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.numbers import Rank
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine

logger = logging.getLogger("covey")

QUEUE_LIMIT: Final = 10_000
"""Operations that may be queued. A program that queues more does not wait for its works: that is an error."""


class Backlog:
    """The operations of a group that were issued and have not ended, in order."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Operations for the worker thread, each with its engine: an idle thread keeps none alive. None ends it."""
        self.unfinished = 0
        self.issued = 0
        """The number of the operation that was queued last; 0 if none was."""
        self._counting = threading.Lock()
        self._worker: threading.Thread | None = None
        self._works: dict[Work[Any], None] = {}
        """The works that have not ended."""

    @property
    def is_on_this_thread(self) -> bool:
        """Whether the calling thread is the worker thread."""
        return threading.current_thread() is self._worker

    def add(
        self,
        engine: Engine,
        call: Call,
        body: Callable[[Attempt], Any],
        then: Callable[[Any], Any] | None,
        limit: float,
        root: Rank,
    ) -> Work[Any]:
        """Queue an operation for `engine`, and return its work."""
        work: Work[Any] = Work(f"{call.text} of group {self._group!r}")
        with self._counting:
            if self.unfinished >= QUEUE_LIMIT:
                raise BusyError(
                    f"{QUEUE_LIMIT} operations of group {self._group!r} are queued already; wait for some of them"
                )
            # While none is unfinished, the last operation that began is the last that was issued.
            self.issued = 1 + (self.issued if self.unfinished else engine.operation.sequence)
            self.unfinished += 1
            self._works[work] = None
        self.queue.put((self, engine, work, call, body, then, limit, root))
        if self._worker is None:
            self._worker = threading.Thread(target=_work, args=(self.queue,), name=f"covey-{self._group}", daemon=True)
            self._worker.start()
        return work

    def run(self, engine: Engine, work: Work[Any], call: Call, *operation: Any) -> None:
        """Perform an operation. On the worker thread."""
        result, error = None, None
        try:
            if engine.is_over:
                engine.failure.refuse(call)
            result = engine.perform(call, *operation)
            work.contributors, work.info = engine.contributors, engine.operation.info
        except BaseException as failure:
            error = failure
        with self._counting:
            self.unfinished -= 1
        engine.open_shortcut()
        work.conclude(result, error)
        del self._works[work]
        try:
            work.notify()
        except BaseException:  # also sys.exit: later operations need this thread
            logger.exception("a callback of %s failed", work.description)
        finally:
            del work, error  # the traceback of the error has this frame

    def forked(self) -> list[Work[Any]]:
        """Forget the parent's thread, in a forked child; return the works that will never end here."""
        self._counting, self._worker = threading.Lock(), None
        while not self.queue.empty():
            self.queue.get()
        return list(self._works)

    def end(self, seconds: float) -> None:
        """Let the thread end after its current operation, and wait up to `seconds` for it."""
        self.queue.put(None)
        if self._worker is not None and not self.is_on_this_thread:
            self._worker.join(seconds)


def _work(work_queue: queue.SimpleQueue[Any]) -> None:
    """Perform queued operations, one after the other, until None comes out of the queue."""
    while (item := work_queue.get()) is not None:
        backlog, *operation = item
        backlog.run(*operation)
        del item, backlog, operation  # release large arrays before waiting for the next operation
