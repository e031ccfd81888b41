"""What an object runs on the control loop: tasks, work that recurs, and cores without I/O.

Tasks are held while they run, logged if they fail, and cancelled together. The effects of a core are performed in
order, and it is ticked at its deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.proto.core import TimedCore

    T = TypeVar("T")

logger = logging.getLogger("covey")
LEAST_TICK_SECONDS: Final = 0.001
"""Seconds to the next tick at least, so that a deadline in the past leaves time for messages."""
EffectT = TypeVar("EffectT")
EffectT_contra = TypeVar("EffectT_contra", contravariant=True)


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


class CoreListener(Protocol[EffectT_contra]):
    """Performs the effects of a core."""

    def perform(self, effect: EffectT_contra) -> None:
        """Perform one effect. It may call the core: the effects of that call come after those that are waiting."""

    def settled(self) -> None:
        """Note that all effects are performed."""

    def failed(self, error: ConfigError) -> None:
        """Note that an effect could not be performed, such as a write to disk; those after it are dropped."""


class CoreDriver(Generic[EffectT]):
    """Drives one core. Its owner passes inputs to the core itself, and calls `settle` after each."""

    def __init__(
        self,
        core: TimedCore[EffectT],
        listener: CoreListener[EffectT],
        *,
        is_ticking: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin; without `is_ticking` the core is not ticked until `run`. `clock` is that of the core's deadlines."""
        self._core, self._listener, self._clock = core, listener, clock
        self._is_ticking = is_ticking
        self._is_performing = self._is_closed = self._will_settle = False
        self._timer: asyncio.TimerHandle | None = None

    def settle(self) -> None:
        """Perform the effects of the core, and set the timer for its next deadline."""
        if self._is_performing or self._is_closed:
            return  # effects of an effect are performed after it
        self._is_performing = True
        try:
            while effects := self._core.effects():
                for effect in effects:
                    self._listener.perform(effect)
        except ConfigError as error:
            self._listener.failed(error)
        else:
            self._is_performing = False
            self._listener.settled()
        finally:
            self._is_performing = False
            self._set_timer()

    def settle_soon(self) -> None:
        """Settle when the present callback of the loop is over, with what comes until then; only while ticking."""
        if self._is_ticking and not self._will_settle:
            self._will_settle = True
            asyncio.get_running_loop().call_soon(self._settle_now)

    async def run(self) -> None:
        """Settle, and tick the core until cancelled."""
        self._is_ticking = True
        try:
            self.settle()
            await asyncio.get_running_loop().create_future()
        finally:
            self._is_ticking = False
            self._set_timer()

    def close(self) -> None:
        """Perform and tick no more."""
        self._is_closed, self._is_ticking = True, False
        self._set_timer()

    def _settle_now(self) -> None:
        self._will_settle = False
        self.settle()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._core.next_deadline() if self._is_ticking else math.inf
        if at != math.inf:
            pause = max(LEAST_TICK_SECONDS, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(pause, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._core.tick(self._clock())
        finally:
            self.settle()  # and set the timer again, whatever happened
