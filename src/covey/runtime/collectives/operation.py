"""The operation that a group runs now: its call, its deadline, and what happens while it waits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from covey.runtime.collectives.call_log import Call
from covey.runtime.collectives.part import EnginePart
from covey.runtime.collectives.stalls import COMPARE_ROUND_SECONDS
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.engine import Engine

logger = logging.getLogger("covey")

NO_INFO: Final[dict[str, Any]] = {}

ANNOUNCE_SECONDS: Final = 0.2
"""After a stall of this length a rank asks the others which operation they are in."""
WAKE_SECONDS: Final = 1.0
"""How long ranks whose links rest have to answer: a link needs a handshake to wake."""


class CurrentOperation(EnginePart):
    """The latest operation of a group. `Engine.perform` sets the fields; one thread at a time runs an operation."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.call = Call(0, 0, 0, "")
        self.sequence = 0
        """Its number, counted from 1: the number of operations started."""
        self.returned = 0
        """The number of the last operation that returned, in a group that ends with its first loss."""
        self.timeout = self.deadline = 0.0
        self.is_announced = False
        """Whether the other ranks were asked where they are; those whose links rest are not, at first."""
        self.are_all_asked = False
        """Whether the ranks whose links rest were asked as well, since the last warning."""
        self.warn_at = 0.0
        """When to warn about the stall next; 0 before the first stall."""
        self.is_running = False
        self.info: dict[str, Any] = NO_INFO
        """What a program may want to know about how it was done; see `Work.info`."""

    def describe(self) -> str:
        """Return the operation as error messages name it."""
        return f"{self.call.text}, operation {self.sequence} of group {self.engine.name!r}"

    def check_deadline(self, trouble: str) -> None:
        """Fail the group if the deadline has passed; `trouble` says what keeps the operation from finishing."""
        if time.monotonic() >= self.deadline:
            engine = self.engine
            if engine.is_sparse:
                self._ask_all()
            late = engine.stalls.late(())
            names = f"{engine.roster.describe(late)} {engine.stalls.excuse(late)}; " if late else ""
            text = (
                f"{self.describe()} did not finish within the timeout of {self.timeout:g} s; "
                f"{names}the last problem was: {trouble}"
            )
            engine.failure.declare(Fault("DeadlineError", text, late))

    def stalled(self, attempt: Attempt, since: float, waiting_for: tuple[Rank, ...]) -> float:
        """Announce the stall or warn about it when it is time to; return when to call this again.

        Nothing has moved since `since`. Raises DeadlineError if the deadline has passed.
        """
        now = time.monotonic()
        stalls = self.engine.stalls
        if now >= self.deadline:
            self._time_out(attempt, waiting_for)
        if not self.is_announced and now >= since + ANNOUNCE_SECONDS:
            self.is_announced = True
            stalls.announce(self.sequence, wakes=False)
            if self.warn_at:  # this process itself was stopped: the others need time to answer
                self.warn_at = max(self.warn_at, now + COMPARE_ROUND_SECONDS)
        if not self.warn_at:
            self.warn_at, self.are_all_asked = now + self.engine.config.warn_after, False
        elif now >= self.warn_at and self.engine.is_sparse and not self.are_all_asked:
            self.are_all_asked = True
            stalls.announce(self.sequence)
            self.warn_at = now + WAKE_SECONDS
        elif now >= self.warn_at:
            self.are_all_asked = False
            self.warn_at = now + self.engine.config.warn_after
            waited = now - (self.deadline - self.timeout)
            late = stalls.late(waiting_for)
            roster = self.engine.roster
            logger.warning("rank %d has waited %.0f s in %s: %s %s", roster.rank, waited, self.describe(),
                           roster.describe(late), stalls.excuse(late))  # fmt: skip
        moments = (self.deadline, self.warn_at, since + ANNOUNCE_SECONDS)
        return min(moments[:2] if self.is_announced else moments)

    def _time_out(self, attempt: Attempt, waiting_for: tuple[Rank, ...]) -> None:
        """Fail the group with a DeadlineError that names the late ranks."""
        engine, stalls = self.engine, self.engine.stalls
        self._ask_all()  # a rank that could not answer before may answer now, and then is not late
        attempt.check()
        late = stalls.late(waiting_for)
        text = (
            f"{self.describe()} did not finish within the timeout of {self.timeout:g} s; "
            f"{engine.roster.describe(late)} {stalls.excuse(late)}"
        )
        engine.failure.declare(Fault("DeadlineError", text, late))
        attempt.check()

    def _ask_all(self) -> None:
        """Ask all ranks where they are, and give them time to answer."""
        engine = self.engine
        engine.stalls.announce(self.sequence)
        seconds = WAKE_SECONDS if engine.is_sparse else COMPARE_ROUND_SECONDS
        engine.lane_trouble.await_news(seconds, lambda: engine.failure.has_happened)
