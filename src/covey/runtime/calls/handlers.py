"""Runs the functions that other nodes call: plain ones on a few threads, asynchronous ones on a loop of their own.

Neither runs on the control loop, nor on a thread that moves messages: a function may take as long as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger("covey")

IDLE_SECONDS: Final = 10.0
"""How long an idle handler thread stays."""


class HandlerThreads:
    """Threads that run functions. There are as many as run at the same time; its owner bounds that."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        """Threads, and how many of them wait for a job that is not queued yet."""

    def run(self, job: Callable[[], None]) -> None:
        """Run a job, which raises nothing, on some thread. Returns at once.

        Raises:
            RuntimeError: the system starts no thread, and there is none yet that could run it later.
        """
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._start_one()
        self._jobs.put(job)

    def _start_one(self) -> None:
        try:
            threading.Thread(target=self._work, name=f"{self._name} handler", daemon=True).start()
            self._threads += 1
        except RuntimeError:
            if not self._threads:
                raise
            self._idle -= 1  # below 0: the job waits for one of the busy threads

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # else a job is about to be queued for this thread
                        self._idle -= 1
                        self._threads -= 1
                        return
                continue
            if job is None:
                return
            try:
                job()
            except BaseException:  # functions are guarded; this is a fault of covey
                logger.exception("a handler thread goes on after an error")
            del job  # it holds the arguments
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """End the threads, each after the function that it runs."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)


class HandlerLoop:
    """An asyncio loop on a thread of its own, for asynchronous functions; started on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._is_closed = False

    def run(
        self, key: object, coroutine: Coroutine[Any, Any, None], never_ran: Callable[[], None] = lambda: None
    ) -> None:
        """Run a coroutine, which raises nothing, as the task of this key. Returns at once.

        A task can be cancelled before its coroutine runs for the first time: then `never_ran` is called, on the loop.
        """
        with self._lock:
            if self._is_closed:
                coroutine.close()
                return
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._serve, args=(self._loop,), name=f"{self._name} loop", daemon=True).start()
            self._loop.call_soon_threadsafe(self._start, key, coroutine, never_ran)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            with contextlib.suppress(Exception):
                loop.run_until_complete(asyncio.gather(*self._tasks.values(), return_exceptions=True))
                loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def _start(self, key: object, coroutine: Coroutine[Any, Any, None], never_ran: Callable[[], None]) -> None:
        assert self._loop is not None
        task = self._tasks[key] = self._loop.create_task(coroutine)
        task.add_done_callback(lambda task: self._ended(key, task, never_ran))

    def _ended(self, key: object, task: asyncio.Task[None], never_ran: Callable[[], None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if task.cancelled():
            never_ran()
        elif (error := task.exception()) is not None:
            logger.error("a handler of calls failed: %r", error)

    def cancel(self, key: object) -> None:
        """Cancel the task of a key, if it runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cancel, key)

    def _cancel(self, key: object) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    def close(self) -> None:
        """Cancel all tasks, and end the loop."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop, self._loop)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        for task in self._tasks.values():
            task.cancel()
        loop.stop()
