"""Collectives that the program may cancel while they are queued: all ranks cancel one, or none does.

An operation that is issued inside of `group.cancellable()` begins with a vote, the maximum of a number of each rank. A
rank votes when the turn of the operation comes on it: for the cancellation, if its program has asked for that before.
One such vote is enough. So the answer is the same on all ranks, and comes before any rank moves data of the operation.
The vote is a step of the operation, so it is agreed under losses in the same way. A rank that asks before its own turn
is always heard, unless it is lost: then its vote counts only if all remaining ranks have it.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import CancelledError
from covey.runtime.collectives.call_log import Call, fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.work import Work

CANCELLABLE_CALLS: Final = 1024
"""Descriptions of such calls that are cached."""


@functools.lru_cache(CANCELLABLE_CALLS)
def cancellable(call: Call) -> Call:
    """Return the description of a call that may be cancelled: every rank must issue it in this way."""
    text = f"{call.text} in group.cancellable()"
    return call._replace(text=text, fingerprint=fingerprint_of(text))


class _Cancelled:
    """What an operation returns in place of its result if it was cancelled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


class Cancellation:
    """Whether one operation is to be cancelled, as far as this rank knows. Any thread may call any method."""

    def __init__(self, call: Call, rank: int, group: str) -> None:
        self._text, self._rank = f"{call.text} of group {group!r}", rank
        self._lock = threading.Lock()
        self._is_wanted = self._has_begun = False

    def ask(self, _: Work[Any]) -> bool:
        """Ask for the cancellation; return False if the operation has begun on this rank."""
        with self._lock:
            self._is_wanted = self._is_wanted or not self._has_begun
            return self._is_wanted

    def _vote(self) -> int:
        with self._lock:
            self._has_begun = True
            return 1 + self._rank if self._is_wanted else 0

    def voted(self, body: Callable[[Attempt], Any]) -> Callable[[Attempt], Any]:
        """Return an operation that votes first, and then does what `body` does, or nothing."""

        def vote(attempt: Attempt) -> Any:
            votes = np.array([self._vote()], np.int32)
            attempt.all_reduce(votes, "max")
            return _Cancelled(int(votes[0]) - 1) if votes[0] else body(attempt)

        return vote

    def concluded(self, then: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Return what makes the caller's result of the operation's, or raises CancelledError."""

        def conclude(result: Any) -> Any:
            if isinstance(result, _Cancelled):
                raise CancelledError(f"{self._text} was cancelled on all ranks: rank {result.rank} asked for it")
            return result if then is None else then(result)

        return conclude
