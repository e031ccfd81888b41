"""Hints: addresses where nodes may be, and when to try each. Nothing here dials.

A hint proves nothing, and a stranger can repeat a packet that it heard. So each hint is tried a few times, with growing
pauses, and then sleeps. Fresh evidence causes one try at once; a repeated packet is not fresh.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.messages import Address

AGAIN_SECONDS: Final = 1.0
"""How soon a hint is tried again after its first failure; the pauses double."""
SELDOM_SECONDS: Final = 15.0
TRIES: Final = 6
"""Failures in a row after which a hint sleeps: half a minute after the first failure."""
NAP_SECONDS: Final = 300.0
NAPS: Final = 12
"""How often a hint from a member is tried once more after a nap: multicast may not reach that node."""
HINTS_LIMIT: Final = 256


class Origin(enum.Enum):
    """Where a hint comes from."""

    MULTICAST = enum.auto()
    """The network: any machine on it may have repeated the packet."""
    MEMBER = enum.auto()
    """A node that holds the secret."""
    RELAY = enum.auto()
    """A relay, which may say what it likes."""
    HOST = enum.auto()
    """The registry of this host, which knows that the node is alive: the hint never sleeps."""


@dataclass(frozen=True)
class Hint:
    """Addresses at which one node may be."""

    addresses: tuple[Address, ...]
    same_host: bool = False
    """Whether they are on this host."""
    interface: str = ""
    """The interface by which to reach them; empty: any."""
    relay: bytes = b""
    """The token under which the node may be registered with this node's relays; empty: none."""


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
    """The hints of one node, each with its failures so far."""

    def __init__(self) -> None:
        self._hints: dict[Hint, _State] = {}

    def __len__(self) -> int:
        return len(self._hints)

    def add(self, hint: Hint, origin: Origin, now: float) -> None:
        """Note fresh evidence for a hint: it is due once now, and its later pauses stay as long as they were.

        A hint of this host may be added any number of times: only the first makes it due.
        """
        state = self._hints.get(hint)
        if state is None:
            if hint.addresses or hint.relay:
                self._make_room()
                self._hints[hint] = _State(origin, now, naps=NAPS if origin is Origin.MEMBER else 0)
        elif origin is not Origin.HOST:
            state.wake(now)

    def due(self, now: float, most: int, is_linked: Callable[[Hint], bool]) -> list[Hint]:
        """Return up to `most` hints to try now, fewest failures first; they are due again later.

        Hints for which `is_linked` is true are skipped for a while.
        """
        ready = []
        for hint, state in self._hints.items():
            if state.next_at > now or (state.is_asleep and not state.naps):
                continue
            if is_linked(hint):
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
        """Note that no node of the cluster answered at a hint."""
        if (state := self._hints.get(hint)) is not None:
            state.failures = min(TRIES, state.failures + 1)
            if state.is_asleep:
                state.next_at = now + NAP_SECONDS

    def worked(self, hint: Hint) -> None:
        """Note that there is a link with the node: after the link ends, the hint is tried like a new one."""
        if (state := self._hints.get(hint)) is not None:
            state.failures = 0

    def forget(self, hint: Hint) -> None:
        """Drop a hint: this process itself answered there."""
        self._hints.pop(hint, None)

    def forget_all(self, is_it: Callable[[Hint], bool]) -> None:
        """Drop every hint for which `is_it` is true."""
        for hint in [hint for hint in self._hints if is_it(hint)]:
            del self._hints[hint]

    def wake(self, now: float) -> None:
        """Try every sleeping hint once more: this machine has other addresses, so it may work now."""
        for state in self._hints.values():
            if state.is_asleep:
                state.wake(now)

    def _make_room(self) -> None:
        """Drop the hint with the most failures, the oldest of several; hints of this host are dropped last."""
        while len(self._hints) >= HINTS_LIMIT:
            worst = max(self._hints.values(), key=lambda state: (state.origin is not Origin.HOST, state.failures))
            del self._hints[next(hint for hint, state in self._hints.items() if state is worst)]
