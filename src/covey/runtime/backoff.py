"""The one way to try again: growing pauses that a cause can cut short, an end, and lines that say what is waited for.

A `Backoff` belongs to one loop over tries of one thing. It does not try by itself: the loop says how each try ended,
and rests between two of them. After `TELL_FAILURE_SECONDS` without success it writes a line with what is waited for and
why the last try failed, also while a try is still under way. The clock is an argument, so that a test can move it.

`LimitedLog` bounds the lines that other machines can cause.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from typing import TYPE_CHECKING, Final

from covey.base import pace
from covey.base.text import printable

if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Iterator

    from covey.base.pace import Growing


logger = logging.getLogger("covey")

TELL_FAILURE_SECONDS: Final = 5.0
"""How long a thing may fail before a line says so."""
TELL_AGAIN_SECONDS: Final = 60.0
"""Seconds between two such lines."""

FORGET_SECONDS: Final = 30.0
"""After so long without a try, the next failure is a first one."""


class Backoff:
    """The tries of one thing: how many in a row have failed, since when, why, and how long to rest."""

    def __init__(
        self,
        what: str,
        pauses: Growing,
        *,
        within: float = math.inf,
        jitter: float = 0.0,
        level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pace the tries of `what`, a noun phrase that completes "waiting for".

        Tries end `within` so many seconds of the first failure in a row. A pause is shortened at random by up to
        `jitter` of its length, so that many processes do not try at the same moments.
        """
        self.what, self.failures, self.reason = what, 0, ""
        """`reason` is why the last try failed; both are reset by a success."""
        self._pauses, self._within, self._jitter, self._level, self._clock = pauses, within, jitter, level, clock
        self._since: float | None = None
        self._failed_at = self._told_at = -math.inf
        self._woken: asyncio.Event | None = None

    # The outcome of tries

    def begin(self) -> None:
        """Note that a try begins, if none has since the last success: the wait counts from now on."""
        if self._since is None:
            self._since = self._clock()

    def failed(self, why: object = "") -> None:
        """Note that a try failed, and why; write a line if it is time for one."""
        now = self._clock()
        if self._since is not None and now > self._failed_at + FORGET_SECONDS and self.failures:
            self._since, self.failures = now, 0
        self.begin()
        self._failed_at = now
        self.failures += 1
        self.reason = printable(str(why)) or self.reason
        self.tell()

    def worked(self) -> None:
        """Note that a try succeeded: the next failure is a first one. Says so if a line told of the failures."""
        if self._told_at > -math.inf:
            logger.log(self._level, "%s: succeeded after %.0f s", self.what, self.waited)
        self._since, self.failures, self.reason, self._told_at = None, 0, "", -math.inf

    @property
    def waited(self) -> float:
        """Seconds since the first try that was not followed by a success."""
        return 0.0 if self._since is None else self._clock() - self._since

    def has_lasted(self, seconds: float) -> bool:
        """Tell whether all tries of the last `seconds` failed, and there was one."""
        return self.waited >= seconds and self._clock() < self._failed_at + seconds

    @property
    def is_over(self) -> bool:
        """Whether no further try is due: this has failed for as long as it may."""
        return self.waited >= self._within

    @property
    def story(self) -> str:
        """What is waited for, for how long, and why the last try failed."""
        why = f": {self.reason}" if self.reason else "; nothing has answered yet"
        return f"waiting for {self.what} for {self.waited:.0f} s{why}"

    # Lines

    def tell(self) -> None:
        """Write a line if the tries have failed for a while, and none was written lately."""
        now = self._clock()
        if self.waited >= TELL_FAILURE_SECONDS and now >= self._told_at + TELL_AGAIN_SECONDS:
            self._told_at = now
            logger.log(self._level, "%s", self.story)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Also write the line while a try is under way that takes longer than that. On a loop."""
        import asyncio  # slow to load; a caller on a loop has it already

        self.begin()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(TELL_FAILURE_SECONDS - self.waited + 0.01, self.tell)
        try:
            yield
        finally:
            timer.cancel()

    # Rests

    @property
    def pause(self) -> float:
        """Seconds until the next try, which is never later than the end of all tries."""
        pause = self._pauses.after(self.failures)
        if self._jitter:
            import random  # slow to load

            pause *= 1.0 - self._jitter * random.random()
        return max(0.0, min(pause, self._within - self.waited))

    async def rest(self) -> None:
        """Return when the next try is due, or at `wake`. On a loop."""
        import asyncio  # slow to load; a caller on a loop has it already

        self._woken = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pause):
                await self._woken.wait()

    def wake(self) -> None:
        """End the rest: something has changed, and a try may succeed now. On the loop of the rest."""
        if self._woken is not None:
            self._woken.set()

    def rest_on(self, woken: threading.Event) -> bool:
        """Return when the next try is due, or `woken` is set; tell whether it is set. On a thread."""
        return woken.wait(self.pause)


class LimitedLog:
    """One kind of line: written at most once in some seconds, and counted in between."""

    def __init__(self, seconds: float, *, most: int = 2000) -> None:
        """Write at most one line in `seconds`, of at most `most` characters."""
        self._seldom, self._most = pace.Seldom(seconds), most

    def log(self, level: int, text: str, *args: object) -> bool:
        """Write a line, unless one was written within the limit; tell whether it was written."""
        if not self._seldom.may(time.monotonic()):
            return False
        unsaid, self._seldom.unsaid = self._seldom.unsaid, 0
        note = f" ({unsaid} more like this were left out)" if unsaid else ""
        logger.log(level, "%s%s", printable(text % args, self._most), note)
        return True
