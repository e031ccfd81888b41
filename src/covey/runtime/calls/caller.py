"""What a function can know about the call that it serves."""

from __future__ import annotations

import contextvars
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.base.numbers import Seat


class Caller:
    """The call that a function serves: `node.caller()` returns it inside of the function."""

    def __init__(self, seat: Seat, name: str, deadline: float) -> None:
        self.seat, self.name, self.deadline = seat, name, deadline
        self.rank = -1
        """The rank that called, in the group of the node that was asked; -1 if it is not in that group."""
        self.is_cancelled = False
        """Whether the caller does not wait any more; a long function should look from time to time, and return."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline of the call, not below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def cancelled(self) -> None:
        """Note that the caller does not wait any more."""
        self.is_cancelled = True


current_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("covey_caller", default=None)
