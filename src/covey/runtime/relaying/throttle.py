"""Bounds how many bytes a second all pipes of a relay copy together."""

from __future__ import annotations

import asyncio
import collections
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

BURST_SECONDS: Final = 0.1
"""Bytes of so much time may be copied at once."""
LEAST_BURST: Final = 1 << 16
LEAST_PAUSE: Final = 0.005


class Throttle:
    """A budget of bytes. A pipe that finds it empty is called back when it is not, in the order of asking."""

    def __init__(self, rate: float = math.inf) -> None:
        """`rate` is in bytes a second."""
        self._rate = rate
        self._burst = max(LEAST_BURST, rate * BURST_SECONDS)
        self._left, self._at = self._burst, -math.inf
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None

    def allowed(self, most: int, *, in_turn: bool = False) -> int:
        """Return how many bytes may be copied now, at most `most`; 0 if the budget is empty.

        While others wait, it is 0 except for the one that is called back, `in_turn`.
        """
        if self._rate == math.inf:
            return most
        self._refill()
        return max(0, min(most, int(self._left))) if in_turn or not self._waiting else 0

    def spend(self, count: int) -> None:
        """Note that bytes were copied."""
        self._left -= count

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when it is its turn and there is budget."""
        self._waiting.append(resume)
        self._set_timer()

    def forget(self, resume: Callable[[], None]) -> None:
        """Do not call `resume` any more."""
        self._waiting = collections.deque(each for each in self._waiting if each != resume)

    def close(self) -> None:
        """Call nothing any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) if self._at > 0 else self._left
        self._at = now

    def _set_timer(self) -> None:
        if self._waiting and self._timer is None:
            pause = max(LEAST_PAUSE, (LEAST_BURST / 4 - self._left) / self._rate)
            self._timer = asyncio.get_running_loop().call_later(pause, self._turn)

    def _turn(self) -> None:
        """Let those that wait go on while there is budget; each copies something, and may wait again."""
        self._timer = None
        self._refill()
        for _ in range(len(self._waiting)):
            if self._left < 1 or not self._waiting:
                break
            self._waiting.popleft()()
        self._set_timer()
