"""Hints: addresses where nodes may be, when to try each, and what tries them. On the control loop.

A hint proves nothing, and a stranger can repeat a packet that it heard. So each hint is tried a few times, with growing
pauses, and then sleeps. Fresh evidence causes one try at once; a repeated packet is not fresh.
A `HintFollower` dials them, a few at a time, until there is a link with the node there.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.pace import Growing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine

    from covey.wire.messages import Address, Contact

AGAIN_SECONDS: Final = 1.0
"""How soon a hint is tried again after its first failure; the pauses double."""
HINT_WAIT_SECONDS: Final = 5.0
"""How long a hint waits, in all, while others are dialled that may be of the same node."""
HINT_CHECK_EVERY: Final = 0.25
"""How often it is looked whether a hint still has to wait."""
SELDOM_SECONDS: Final = 15.0
HINT_PAUSES: Final = Growing(AGAIN_SECONDS, SELDOM_SECONDS)
HINT_TRIES: Final = 6
"""Failures in a row after which a hint sleeps: half a minute after the first failure."""
NAP_SECONDS: Final = 300.0
NAPS: Final = 12
"""How often a hint from a member is tried once more after a nap: multicast may not reach that node."""
HINTS_LIMIT: Final = 256
HINTS_AT_ONCE: Final = 32
"""Hints that are dialled at the same time; the others wait."""
SCARCE_SECONDS: Final = 2.0
"""How long no hint is dialled after this process could not open a socket: descriptors are left to its run."""


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

    def is_of(self, contact: Contact, host: str) -> bool:
        """Tell whether it is of a node that listens at `contact`; `host` is this one."""
        if self.relay and self.relay == contact.relay:
            return True
        if self.same_host and contact.host != host:
            return False
        return any(  # asked of every node for every hint, so without sets
            mine.port == address.port and ("127.0.0.1" if self.same_host else mine.ip) == address.ip
            for mine in contact.addresses
            for address in self.addresses
        )

    def may_be(self, other: Hint) -> bool:
        """Tell whether another hint may be of the same node: they have an address in common."""
        ports = {address.port for address in self.addresses} & {address.port for address in other.addresses}
        if not ports or (self.same_host and other.same_host):
            return bool(ports)
        own, others = ({(each.ip, each.port) for each in hint.addresses} for hint in (self, other))
        return bool(own & others)


@dataclass
class _State:
    origin: Origin
    next_at: float
    failures: int = 0
    naps: int = 0
    waits_until: float = math.inf
    """How long it waits for another hint that is dialled; inf if it has not waited yet."""

    @property
    def is_asleep(self) -> bool:
        return self.failures >= HINT_TRIES and self.origin is not Origin.HOST

    def is_due(self, now: float) -> bool:
        return self.next_at <= now and (self.naps > 0 or not self.is_asleep)

    @property
    def pause(self) -> float:
        return HINT_PAUSES.after(self.failures + 1)

    def wake(self, now: float) -> None:
        self.failures, self.next_at = min(self.failures, HINT_TRIES - 1), now


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

    def due(
        self, now: float, most: int, is_linked: Callable[[Hint], bool], dialled: Collection[Hint] = ()
    ) -> list[Hint]:
        """Return up to `most` hints to try now, fewest failures first; they are due again later.

        Hints for which `is_linked` is true are skipped for a while. One that may be of the same node as a hint that is
        being `dialled` waits for that, so that a node which several ways of discovery find gets one link and not one
        for each; but not for long, since a stranger may name an address together with others that do not answer.
        """
        ready = [hint for hint, state in self._hints.items() if state.is_due(now) and hint not in dialled]
        chosen: list[Hint] = []
        for hint in sorted(ready, key=lambda hint: self._hints[hint].failures):
            if len(chosen) >= most:
                break
            state = self._hints[hint]
            if is_linked(hint):
                state.next_at = now + SELDOM_SECONDS
                continue
            if now < state.waits_until and any(map(hint.may_be, (*dialled, *chosen))):
                state.waits_until, state.next_at = (
                    min(state.waits_until, now + HINT_WAIT_SECONDS),
                    now + HINT_CHECK_EVERY,
                )
                continue
            if state.is_asleep:
                state.naps -= 1
                state.wake(now)
            state.next_at = now + state.pause
            chosen.append(hint)
        return chosen

    def failed(self, hint: Hint, now: float) -> None:
        """Note that no node of the cluster answered at a hint."""
        if (state := self._hints.get(hint)) is not None:
            state.failures = min(HINT_TRIES, state.failures + 1)
            if state.is_asleep:
                state.next_at = now + NAP_SECONDS

    def worked(self, hint: Hint) -> None:
        """Note that there is a link with the node: after the link ends, the hint is tried like a new one."""
        if (state := self._hints.get(hint)) is not None:
            state.failures, state.waits_until = 0, math.inf

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
