"""The processes that wait for the next generation, and what this process wants of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.peers.remote_process import RemoteProcess

SETTLE_SECONDS: Final = 0.3
"""A newcomer is a reason for another generation after this time: by then it should have dialled every member."""
DEFER_SECONDS: Final = 10.0
"""A newcomer that some members did not know when a generation was founded is a reason for another after this time."""


class Newcomers:
    """The processes that wait for the next generation. Changed on the control loop, read on any thread."""

    def __init__(self, added: Callable[[messages.Card], None] = lambda _card: None) -> None:
        """`added` is called for each process that begins to wait."""
        self._added = added
        self._waiting: dict[tuple[bytes, bytes], RemoteProcess] = {}
        """By id and life."""
        self._counts_from: dict[tuple[bytes, bytes], float] = {}
        """The time from which a newcomer is a reason for another generation."""

    def __iter__(self) -> Iterator[RemoteProcess]:
        return iter(list(self._waiting.values()))

    def __contains__(self, card: messages.Card) -> bool:
        return messages.key_of(card) in self._waiting

    def add(self, newcomer: RemoteProcess) -> None:
        """Note that a process waits."""
        key = messages.key_of(newcomer.card)
        if key not in self._waiting:
            self._added(newcomer.card)
        self._waiting[key] = newcomer
        self._counts_from.setdefault(key, time.monotonic() + SETTLE_SECONDS)

    def remove(self, newcomer: RemoteProcess) -> None:
        """Note that a process does not wait any more."""
        if self._waiting.get(messages.key_of(newcomer.card)) is newcomer:
            self.admit(newcomer.card)

    def admit(self, card: messages.Card) -> RemoteProcess | None:
        """Remove and return the process that is a member now; None if it does not wait here."""
        key = messages.key_of(card)
        self._counts_from.pop(key, None)
        return self._waiting.pop(key, None)

    def defer(self) -> None:
        """Note that a generation was founded without the remaining newcomers: not all members know them."""
        self._counts_from = dict.fromkeys(list(self._waiting), time.monotonic() + DEFER_SECONDS)

    @property
    def want_generation(self) -> bool:
        """Whether some newcomer is a reason for another generation now."""
        now = time.monotonic()
        return any(now > since for since in list(self._counts_from.values()))


@dataclass
class Wishes:
    """What the program of this process wants of the next generation. Set and read on any thread."""

    is_elastic: bool = False
    """Whether the program goes from generation to generation."""
    is_draining: bool = False
    """Whether this process wants to leave at the next step."""
    wanted_size: int = 1
    """A generation that has fewer members waits for more."""
    most_size: int = messages.MAX_MEMBERS
    rival: str = ""
    """Describes an older run of the same name, if this run has to end because of it."""

    def want_change(self, live: int, newcomers: Newcomers) -> bool:
        """Tell whether a generation with so many live members should end soon.

        That is if a process wants in or out, or too few are left.
        """
        is_awaited = live < self.most_size and newcomers.want_generation
        return self.is_elastic and (self.is_draining or bool(self.rival) or live < self.wanted_size or is_awaited)
