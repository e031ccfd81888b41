"""The works of a messenger that have not ended: by operation, and by deadline those that no thread waits for.

Callers hold the messenger's lock, except for `end`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from covey.base.errors import DeadlineError
from covey.proto.message import MessageSend, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.matching import Matcher
    from covey.runtime.work import Work

Ended: TypeAlias = "list[tuple[Operation, Work[Any] | None]]"
"""Operations that are over, each with the work that stands for it, if there is one."""


class PendingWorks:
    """Works, from the start of their operation until it is over. Only the driving thread removes works by deadline."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._by_operation: dict[Operation, Work[Any]] = {}
        self.deadlines: list[tuple[float, int, Work[Any]]] = []
        """A heap; works that are done may still be in it."""
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._by_operation)

    def all(self) -> list[Work[Any]]:
        """Return all works."""
        return list(self._by_operation.values())

    def add(self, operation: Operation, work: Work[Any]) -> None:
        """Let a work stand for an operation."""
        self._by_operation[operation] = work

    def remove(self, operation: Operation) -> None:
        """Forget the work of an operation that was withdrawn."""
        del self._by_operation[operation]

    def operation_of(self, work: Work[Any]) -> Operation | None:
        """Return the operation of a work that is not over."""
        found = next((operation for operation, pending in self._by_operation.items() if pending is work), None)
        return None if found in self._matcher.completed else found

    # Deadlines, on time.monotonic()

    def expire(self, work: Work[Any], deadline: float) -> None:
        """Let a work fail at `deadline`, unless it is done by then."""
        heapq.heappush(self.deadlines, (deadline, next(self._order), work))

    def next_deadline(self) -> float:
        """Return the deadline of the next work that is not done; infinite if there is none."""
        while self.deadlines and self.deadlines[0][2].done():
            heapq.heappop(self.deadlines)
        return self.deadlines[0][0] if self.deadlines else math.inf

    def take_due(self) -> Work[Any] | None:
        """Remove and return a work whose deadline has passed, if there is one."""
        if self.deadlines and self.deadlines[0][0] <= time.monotonic():
            return heapq.heappop(self.deadlines)[2]
        return None

    # Ends

    def take_ended(self) -> Ended:
        """Remove and return what is over."""
        ended: Ended = [(operation, self._by_operation.pop(operation, None)) for operation in self._matcher.completed]
        self._matcher.completed.clear()
        return ended


def late_error(work: Work[Any], late: list[int], trouble: str) -> DeadlineError:
    """Return the error of a work whose timeout has ended while it waited for these ranks."""
    named = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    text = f"{work.description} was not done before its timeout ended; it waited for {named}{trouble}"
    return DeadlineError(text, late=tuple(late))


def end(ended: Ended, told: Callable[[BaseException], None]) -> bool:
    """End the works of operations that are over, and tell of their errors; return whether there were any works.

    Called without the lock: callbacks run.
    """
    works = []
    for operation, work in ended:
        if work is not None:
            if operation.error is not None:
                told(operation.error)
            work.conclude(None if isinstance(operation, MessageSend) else operation.result, operation.error)
            works.append(work)
    for work in works:  # after all have ended: a callback may wait for another of them
        work.notify()
    return bool(works)
