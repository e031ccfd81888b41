"""Where nodes may be: addresses that others told of, and when to try each. Nothing here dials.

A hint proves nothing, and a stranger can repeat what it heard, so every hint is tried a bounded number of times with
growing pauses. After that it sleeps. Fresh evidence is good for one try at once; what is only repeated is none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.messages import Address

AGAIN_SECONDS: Final = 1.0
"""How soon a hint that led nowhere is followed again, the first time; the pauses double."""
SELDOM_SECONDS: Final = 15.0
TRIES: Final = 6
"""Failures in a row after which a hint sleeps: half a minute after the first."""
NAP_SECONDS: Final = 300.0
NAPS: Final = 12
"""What a member told of is tried once more after a nap, so often: no multicast may lead there."""
HINTS_LIMIT: Final = 256


class Origin(enum.Enum):
    """Where a hint comes from."""

    MULTICAST = enum.auto()
    """Anybody on the network may have repeated it."""
    MEMBER = enum.auto()
    """A node that holds the secret told of it."""
    HOST = enum.auto()
    """This host, which knows that the node is alive: the hint never sleeps."""


@dataclass(frozen=True)
class Hint:
    """Addresses at which one node may be."""

    addresses: tuple[Address, ...]
    same_host: bool = False
    """Whether they are on this host."""
    interface: str = ""
    """The interface by which they are to be reached; empty: whichever leads there."""


@dataclass
class _State:
    origin: Origin
    next_at: float
    failures: int = 0
    naps: int = 0

    @property
    def is_asleep(self) -> bool:
        return self.failures >= TRIES and self.origin is not Origin.HOST

    @property
    def pause(self) -> float:
        return min(AGAIN_SECONDS * (1 << self.failures), SELDOM_SECONDS)

    def wake(self, now: float) -> None:
        self.failures, self.next_at = min(self.failures, TRIES - 1), now


class Hints:
    """Hints, each with what became of it so far."""

    def __init__(self) -> None:
        self._hints: dict[Hint, _State] = {}

    def __len__(self) -> int:
        return len(self._hints)

    def add(self, hint: Hint, origin: Origin, now: float) -> None:
        """Note fresh evidence for a hint: it is tried now, once, and with no shorter pauses after that.

        What this host knows may be added any number of times: it is no news.
        """
        state = self._hints.get(hint)
        if state is None:
            if hint.addresses:
                self._make_room()
                self._hints[hint] = _State(origin, now, naps=NAPS if origin is Origin.MEMBER else 0)
        elif origin is not Origin.HOST:
            state.wake(now)

    def due(self, now: float, most: int, is_met: Callable[[Hint], bool]) -> list[Hint]:
        """Return up to `most` hints to try now, those with the fewest failures first; they are due again later.

        Those of nodes that `is_met` are passed over for a while.
        """
        ready = []
        for hint, state in self._hints.items():
            if state.next_at > now or (state.is_asleep and not state.naps):
                continue
            if is_met(hint):
                state.next_at = now + SELDOM_SECONDS
                continue
            if state.is_asleep:
                state.naps -= 1
                state.wake(now)
            ready.append((state.failures, hint))
        chosen = [hint for _, hint in sorted(ready, key=lambda each: each[0])[:most]]
        for hint in chosen:
            self._hints[hint].next_at = now + self._hints[hint].pause
        return chosen

    def failed(self, hint: Hint, now: float) -> None:
        """Note that no node of the cluster answered there."""
        if (state := self._hints.get(hint)) is not None:
            state.failures = min(TRIES, state.failures + 1)
            if state.is_asleep:
                state.next_at = now + NAP_SECONDS

    def worked(self, hint: Hint) -> None:
        """Note that there is a link with the node there: if it ends, it is tried like a new one."""
        if (state := self._hints.get(hint)) is not None:
            state.failures = 0

    def forget(self, hint: Hint) -> None:
        """Note that there is no other node there."""
        self._hints.pop(hint, None)

    def forget_all(self, is_it: Callable[[Hint], bool]) -> None:
        """Forget every hint of which `is_it` is true."""
        for hint in [hint for hint in self._hints if is_it(hint)]:
            del self._hints[hint]

    def wake(self, now: float) -> None:
        """This machine is on another network: what failed before may work now, and is tried once more."""
        for state in self._hints.values():
            if state.is_asleep:
                state.wake(now)

    def _make_room(self) -> None:
        """Let the hint go that has failed most, and of those the oldest; what this host knows goes last."""
        while len(self._hints) >= HINTS_LIMIT:
            worst = max(self._hints.values(), key=lambda state: (state.origin is not Origin.HOST, state.failures))
            del self._hints[next(hint for hint, state in self._hints.items() if state is worst)]
