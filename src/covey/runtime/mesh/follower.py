"""Follows hints: dials where nodes may be, a few at a time, until there is a link with them. On the control loop."""

from __future__ import annotations

import asyncio
import enum
import time
from typing import TYPE_CHECKING, Any, Final

from covey.runtime.mesh.hints import AGAIN_SECONDS, Hints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from covey.runtime.mesh.hints import Hint, Origin

HINTS_AT_ONCE: Final = 32
"""Hints followed at the same time; the others wait."""
SCARCE_SECONDS: Final = 2.0
"""How long no hint is followed when this process could not open a socket: what it has is for its run."""


class Outcome(enum.Enum):
    """What came of dialling."""

    MET = enum.auto()
    OURSELVES = enum.auto()
    NOBODY = enum.auto()
    """No node of the cluster answered, or none that we want a link with."""
    SCARCE = enum.auto()
    """This process can open no socket now, which says nothing about the hint."""


class Follower:
    """The hints of one node, and those that are being followed."""

    def __init__(
        self,
        dial: Callable[[Hint], Awaitable[Outcome]],
        is_met: Callable[[Hint], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`dial` tries to make a link; `is_met` tells whether there is one with the node that a hint leads to."""
        self._dial, self._is_met, self._spawn = dial, is_met, spawn
        self._hints = Hints()
        self.dialling: set[Hint] = set()
        self._scarce_until = 0.0
        self._is_closed = False

    def found(self, hint: Hint, origin: Origin) -> None:
        """There is fresh evidence that a node may be there."""
        self._hints.add(hint, origin, time.monotonic())
        self._follow()

    def forget(self, is_it: Callable[[Hint], bool]) -> None:
        """Follow these hints no more, unless there is fresh evidence: the nodes there have left."""
        self._hints.forget_all(is_it)

    def moved(self) -> None:
        """This machine is to be reached at other addresses than before, so others may be within reach."""
        self._hints.wake(time.monotonic())
        self._follow()

    async def keep_following(self) -> None:
        """Follow hints again when they are due, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS / 4)
            self._follow()

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True

    def _follow(self) -> None:
        now = time.monotonic()
        if self._is_closed or now < self._scarce_until:
            return
        for hint in self._hints.due(now, HINTS_AT_ONCE - len(self.dialling), self._is_met_or_dialled):
            self.dialling.add(hint)
            self._spawn(self._try(hint))

    def _is_met_or_dialled(self, hint: Hint) -> bool:
        return hint in self.dialling or self._is_met(hint)

    async def _try(self, hint: Hint) -> None:
        try:
            outcome = await self._dial(hint)
        finally:
            self.dialling.discard(hint)
        match outcome:
            case Outcome.MET:
                self._hints.worked(hint)
            case Outcome.OURSELVES:
                self._hints.forget(hint)
            case Outcome.NOBODY:
                self._hints.failed(hint, time.monotonic())
            case Outcome.SCARCE:
                self._scarce_until = time.monotonic() + SCARCE_SECONDS
