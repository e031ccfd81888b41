"""Tasks of one object on the control loop: held while they run, logged if they fail, cancelled together."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    T = TypeVar("T")

logger = logging.getLogger("covey")


class Tasks:
    """The tasks that an object has started. On the control loop only."""

    def __init__(self, owner: str) -> None:
        """Name the owner as the log should: "task of OWNER failed"."""
        self._owner = owner
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
        tasks = [task for task in self._running if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
