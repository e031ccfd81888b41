"""The operations of a group: the one that runs now, the attempt in which it runs, and those that are queued.

Blocking operations run on the thread that calls them. Asynchronous ones are queued, and one worker thread performs them
in order. The extension sets some fields of the current operation (`native/attributes.h`).
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from covey.base.errors import BusyError
from covey.runtime.collectives.call_log import Call
from covey.runtime.work import Work

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from covey.base.numbers import Rank
    from covey.runtime.collectives.roster import GroupRoster

logger = logging.getLogger("covey")

NO_INFO: Final[dict[str, Any]] = {}
QUEUE_LIMIT: Final = 10_000
"""Operations that may be queued. A program that queues more does not wait for its works: that is an error."""


class CurrentOperation:
    """The latest operation of a group. `Engine.perform` sets the fields; one thread at a time runs an operation."""

    def __init__(self, group: str) -> None:
        """`group` is the name of the group."""
        self._group = group
        self.call = Call(0, 0, 0, "")
        self.sequence = 0
        """Its number, counted from 1: the number of operations started."""
        self.returned = 0
        """The number of the last operation that returned, in a group that ends with its first loss."""
        self.timeout = self.deadline = 0.0
        self.is_announced = False
        """Whether the other ranks were asked where they are; those whose links are idle are not, at first."""
        self.are_all_asked = False
        """Whether the ranks whose links are idle were asked as well, since the last warning."""
        self.warn_at = 0.0
        """When to warn about the stall next; 0 before the first stall."""
        self.is_running = False
        self.info: dict[str, Any] = NO_INFO
        """What a program may want to know about how it was done; see `Work.info`."""

    def describe(self) -> str:
        """Return the operation as error messages name it."""
        return f"{self.call.text}, operation {self.sequence} of group {self._group!r}"


class StoppableAttempt(Protocol):
    """An attempt, to those that stop it or look at it."""

    ranks: tuple[Rank, ...]

    def stop(self) -> None: ...

    def read_headers(self) -> dict[Rank, bytes]: ...


class CurrentAttempt:
    """Refers to the attempt in which operations run now, without keeping it: what it refers to may refer to it."""

    def __init__(self, roster: GroupRoster, *, survives: bool) -> None:
        self._roster, self._survives = roster, survives
        self._attempt: Callable[[], StoppableAttempt | None] = lambda: None

    def follow(self, attempt: weakref.ref[StoppableAttempt]) -> None:
        """Refer to a new attempt from now on."""
        self._attempt = attempt

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks of the attempt."""
        attempt = self._attempt()
        return () if attempt is None else attempt.ranks

    @property
    def live(self) -> tuple[Rank, ...]:
        """The ranks that have not been lost: where losses end the group, the attempt has all ranks."""
        return self.ranks if self._survives else self._roster.present()

    def stop(self) -> None:
        """Stop the attempt."""
        attempt = self._attempt()
        if attempt is not None:
            attempt.stop()

    def read_headers(self) -> dict[Rank, bytes]:
        """Return the header that a shortcut has read, if it is not the expected one, by its sender."""
        attempt = self._attempt()
        return {} if attempt is None else attempt.read_headers()


class Performer(Protocol):
    """What performs the operations of a group (`collectives.engine`)."""

    operation: CurrentOperation

    @property
    def is_over(self) -> bool: ...

    @property
    def contributors(self) -> tuple[Rank, ...]: ...

    def refuse(self, call: Call) -> NoReturn: ...

    def perform(
        self,
        call: Call,
        body: Callable[[Any], Any],
        then: Callable[[Any], Any] | None,
        limit: float,
        root: Rank,
    ) -> Any: ...

    def open_shortcut(self) -> None: ...


class Backlog:
    """The operations of a group that were issued and have not ended, in order."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Operations for the worker thread, each with its performer: an idle thread keeps none alive. None ends it."""
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
        performer: Performer,
        call: Call,
        body: Callable[[Any], Any],
        then: Callable[[Any], Any] | None,
        limit: float,
        root: Rank,
        *,
        cancel: Callable[[Work[Any]], bool] | None = None,
    ) -> Work[Any]:
        """Queue an operation for `performer`, and return its work; `cancel` is that of `Work`."""
        work: Work[Any] = Work(f"{call.text} of group {self._group!r}", cancel=cancel)
        with self._counting:
            if self.unfinished >= QUEUE_LIMIT:
                raise BusyError(
                    f"{QUEUE_LIMIT} operations of group {self._group!r} are queued already; wait for some of them"
                )
            # While none is unfinished, the last operation that began is the last that was issued.
            self.issued = 1 + (self.issued if self.unfinished else performer.operation.sequence)
            self.unfinished += 1
            self._works[work] = None
        self.queue.put((self, performer, work, call, body, then, limit, root))
        if self._worker is None:
            self._worker = threading.Thread(target=_work, args=(self.queue,), name=f"covey-{self._group}", daemon=True)
            self._worker.start()
        return work

    def run(self, performer: Performer, work: Work[Any], call: Call, *operation: Any) -> None:
        """Perform an operation. On the worker thread."""
        result, error = None, None
        try:
            if performer.is_over:
                performer.refuse(call)
            result = performer.perform(call, *operation)
            work.contributors, work.info = performer.contributors, performer.operation.info
        except BaseException as failure:
            error = failure
        with self._counting:
            self.unfinished -= 1
        performer.open_shortcut()
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
