"""Dials the addresses of hints, a few at a time, until there is a link with the node there. On the control loop."""

from __future__ import annotations

import asyncio
import enum
import time
from typing import TYPE_CHECKING, Any, Final

from covey.runtime.peers.hints import AGAIN_SECONDS, Hints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from covey.runtime.peers.hints import Hint, Origin

HINTS_AT_ONCE: Final = 32
"""Hints that are dialled at the same time; the others wait."""
SCARCE_SECONDS: Final = 2.0
"""How long no hint is dialled after this process could not open a socket: descriptors are left to its run."""


class DialOutcome(enum.Enum):
    """The result of a dial."""

    LINKED = enum.auto()
    OURSELVES = enum.auto()
    """This process answered."""
    NO_NODE = enum.auto()
    """No node of the cluster answered, or none that may be linked with."""
    SCARCE = enum.auto()
    """This process can open no socket now; the hint may be good."""


class HintFollower:
    """The hints of one node, and those that are being dialled."""

    def __init__(
        self,
        dial: Callable[[Hint], Awaitable[DialOutcome]],
        is_linked: Callable[[Hint], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`dial` tries to make a link; `is_linked` tells whether there is one with the node at a hint's addresses."""
        self._dial, self._is_linked, self._spawn = dial, is_linked, spawn
        self._hints = Hints()
        self.dialling: set[Hint] = set()
        self._scarce_until = 0.0
        self._is_closed = False

    def found(self, hint: Hint, origin: Origin) -> None:
        """Note fresh evidence that a node may be at these addresses, and dial them if they are due."""
        self._hints.add(hint, origin, time.monotonic())
        self._follow()

    def forget(self, is_it: Callable[[Hint], bool]) -> None:
        """Drop the hints for which `is_it` is true: the nodes there have left. Fresh evidence adds them again."""
        self._hints.forget_all(is_it)

    def moved(self) -> None:
        """Dial again after this machine got other addresses: other nodes may be within reach now."""
        self._hints.wake(time.monotonic())
        self._follow()

    async def keep_following(self) -> None:
        """Dial hints again when they are due, until cancelled."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS / 4)
            self._follow()

    def close(self) -> None:
        """Dial no more hints."""
        self._is_closed = True

    def _follow(self) -> None:
        now = time.monotonic()
        if self._is_closed or now < self._scarce_until:
            return
        for hint in self._hints.due(now, HINTS_AT_ONCE - len(self.dialling), self._is_linked, self.dialling):
            self.dialling.add(hint)
            self._spawn(self._try(hint))

    async def _try(self, hint: Hint) -> None:
        try:
            outcome = await self._dial(hint)
        finally:
            self.dialling.discard(hint)
        match outcome:
            case DialOutcome.LINKED:
                self._hints.worked(hint)
            case DialOutcome.OURSELVES:
                self._hints.forget(hint)
            case DialOutcome.NO_NODE:
                self._hints.failed(hint, time.monotonic())
            case DialOutcome.SCARCE:
                self._scarce_until = time.monotonic() + SCARCE_SECONDS
