"""Threads and a loop for code of the program: functions that other nodes call, callbacks, and what frees its objects.

Nothing of it runs on the control loop, or on a thread while that moves messages: it may take as long as it likes, and
raise what it likes. A function can ask which call it serves (`Caller`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.base.numbers import Seat


class Caller:
    """The call that a function serves: `node.caller()` returns it inside of the function."""

    def __init__(self, seat: Seat, name: str, deadline: float, depth: int = 0) -> None:
        self.seat, self.name, self.deadline, self.depth = seat, name, deadline, depth
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


logger = logging.getLogger("covey")

IDLE_HANDLER_SECONDS: Final = 10.0
"""How long an idle handler thread stays."""


class HandlerThreads:
    """Threads that run jobs: as many as there are jobs at the same time, up to a number; then jobs wait."""

    def __init__(self, name: str, most: float = math.inf) -> None:
        self._name, self._most = name, most
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = self._idle = 0
        """Threads, and how many of them wait for a job that is not queued yet; below 0: so many jobs wait."""

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on some thread; what it raises is logged. Returns at once.

        Raises:
            RuntimeError: the system starts no thread, and there is none yet that could run it later.
        """
        with self._lock:
            if self._is_closed:
                threading.Thread(target=self._run_safely, args=(job,), name=self._name, daemon=True).start()
                return
            if self._idle <= 0 and self._threads < self._most:
                self._start_one()
            else:
                self._idle -= 1
        self._jobs.put(job)

    def _start_one(self) -> None:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._threads += 1
        except RuntimeError:
            if not self._threads:
                raise
            self._idle -= 1

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_HANDLER_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:  # else a job is about to be queued for this thread
                        self._idle -= 1
                        self._threads -= 1
                        return
                continue
            if job is None:
                return
            self._run_safely(job)
            del job  # it holds the arguments
            with self._lock:
                self._idle += 1

    def _run_safely(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:  # SystemExit, too: a thread of covey does not end by what the program raises
            logger.exception("%s: a thread continues after an error", self._name)

    def close(self) -> None:
        """End the threads, each after the job that it runs; jobs that still come get a thread of their own."""
        with self._lock:
            self._is_closed = True
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

        A task can be cancelled before its coroutine runs for the first time: then `never_ran` is called, on the loop;
        or here, once the loop is closed.

        Raises:
            RuntimeError: the system starts no thread for the loop.
        """
        with self._lock:
            try:
                if not self._is_closed:
                    if self._loop is None:
                        self._start_loop()
                    assert self._loop is not None
                    self._loop.call_soon_threadsafe(self._start, key, coroutine, never_ran)
                    return
            except BaseException:
                coroutine.close()
                raise
        coroutine.close()
        never_ran()

    def _start_loop(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            threading.Thread(target=self._serve, args=(loop,), name=f"{self._name} loop", daemon=True).start()
        except BaseException:
            loop.close()
            raise
        self._loop = loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while True:
                try:
                    loop.run_forever()
                    break
                except BaseException:  # SystemExit of a task or a callback that a function has left behind
                    logger.exception("%s: the loop of asynchronous functions continues after an error", self._name)
        finally:
            with contextlib.suppress(BaseException):
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks have ended
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
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._stop, self._loop)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        for task in self._tasks.values():
            task.cancel()
        loop.stop()
