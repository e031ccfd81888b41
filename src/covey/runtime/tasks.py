"""Tasks of one object on the control loop: held while they run, logged if they fail, cancelled together.

And work that recurs: done every few moments while there is a need for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    T = TypeVar("T")

logger = logging.getLogger("covey")


class Tasks:
    """The tasks that an object has started. On the control loop only."""

    def __init__(self, owner: str) -> None:
        """Name the owner as the log should: "task of OWNER failed"."""
        self._owner = owner
        self.is_closing = False
        """Whether the owner frees what it has, or has freed it. Set and read on any thread."""
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine until it ends or `close` cancels it. An exception is logged."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of %s failed", self._owner, exc_info=error)

    async def close(self) -> None:
        """Cancel every task but the one that calls, and wait until they have ended."""
        self.is_closing = True
        tasks = [task for task in self._running if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Recurring:
    """Work that is done again and again while there is a need for it. On the control loop only."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        seconds: float,
        work: Callable[[float], object],
        *,
        is_needed: Callable[[], object],
    ) -> None:
        """Once begun, `work` is called every `seconds`, with the time since the last call, while `is_needed()`."""
        self._spawn, self._seconds, self._work, self._is_needed = spawn, seconds, work, is_needed
        self.is_going_on = False

    def begin(self) -> None:
        """Begin, unless it goes on already or there is no need."""
        if not self.is_going_on and self._is_needed():
            self.is_going_on = True
            self._spawn(self._go_on())

    async def _go_on(self) -> None:
        at = time.monotonic()
        try:
            while self._is_needed():
                await asyncio.sleep(self._seconds)
                before, at = at, time.monotonic()
                self._work(at - before)
        finally:
            self.is_going_on = False
