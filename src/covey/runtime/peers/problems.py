"""Why nodes are not linked with this one: refused nodes, and addresses that did not answer. On the control loop.

Other nodes can cause entries, so every table has a limit, and the log has a rate.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from covey.runtime.backoff import LimitedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.audit import Auditor
    from covey.wire.messages import Address, Card, Contact

REFUSED_LOG_SECONDS: Final = 10.0
"""The log reports refused nodes at most this often."""
PROBLEMS_LIMIT: Final = 64
"""Refused nodes, and addresses that did not answer; older entries are forgotten."""
TOLD_LIMIT: Final = 100
"""Refusals of which the program is told: nodes that are refused again and again must not hide other events."""
DEPARTED_LIMIT: Final = 256
"""Addresses of visitors that have left; older entries are forgotten."""


class Problems:
    """Refusals and failed dials of one node, for its log, its audit log, and commands that ask."""

    def __init__(self, seeds: tuple[str, ...], host: str, audit: Auditor, tell: Callable[[str, str], bool]) -> None:
        """Begin without problems.

        `tell` gets the name of a node that is refused for the first time, or for another reason, and the reason; it
        returns whether a process listens there.
        """
        self._seeds, self._host, self._audit = seeds, host, audit
        self.refusals: dict[str, str] = {}
        """Refused nodes by name and address, and why."""
        self.hung_up: dict[str, float] = {}
        """Seeds that close the connection at the door's challenge, and since when."""
        self._failures: dict[str, tuple[str, tuple[Address, ...]]] = {}
        """By seed or addresses: why dialling failed, and the addresses."""
        self._departed: dict[tuple[str, int], None] = {}
        """Where visitors listened that have left: that these addresses do not answer is no problem."""
        self._log = LimitedLog(REFUSED_LOG_SECONDS)
        self._tell = tell
        self._told = 0

    def refuse(self, card: Card, reason: str, source: str) -> None:
        """Note that a node at address `source` was refused."""
        name = _spell(card)
        self._audit.refused(source, reason, card)
        is_news = self.refusals.get(name) != reason
        self.refusals[name] = reason
        if len(self.refusals) > PROBLEMS_LIMIT:
            del self.refusals[next(iter(self.refusals))]
        if is_news:
            self._log.log(logging.WARNING, "%s was refused: %s", name, reason)
            if self._told < TOLD_LIMIT:
                self._told += self._tell(name, reason)

    def linked(self, remote: RemoteProcess) -> None:
        """Note that there is a link with a node: it is not refused, and has not left."""
        for listening in _listening(remote.card.contact, self._host):
            self._departed.pop(listening, None)
        self.refusals.pop(_spell(remote.card), None)

    def fail(self, where: str, reason: str, addresses: tuple[Address, ...]) -> None:
        """Note that dialling failed; `where` is the seed, or the addresses as text."""
        self._failures.pop(where, None)
        if where not in self._seeds and self.has_departed(addresses):
            return
        self._failures[where] = reason, addresses
        if len(self._failures) > PROBLEMS_LIMIT:
            del self._failures[next(iter(self._failures))]

    def hang_up(self, seed: str) -> None:
        """Note that a seed closed the connection at the door's challenge."""
        self.hung_up.setdefault(seed, time.monotonic())

    def answer(self, seed: str) -> None:
        """Note that a seed did more than close the connection."""
        self.hung_up.pop(seed, None)

    def reach(self, where: str) -> None:
        """Note that dialling worked."""
        self._failures.pop(where, None)

    def depart(self, visitor: RemoteProcess) -> None:
        """Note that a visitor has left, and forget that its addresses did not answer."""
        for listening in _listening(visitor.card.contact, self._host):
            self._departed.pop(listening, None)
            self._departed[listening] = None
        while len(self._departed) > DEPARTED_LIMIT:
            del self._departed[next(iter(self._departed))]
        for where, (_, addresses) in list(self._failures.items()):
            if where not in self._seeds and self.has_departed(addresses):
                del self._failures[where]

    def has_departed(self, addresses: tuple[Address, ...]) -> bool:
        """Tell whether these addresses, which are those of one node, belonged to a visitor that has left."""
        return any((each.ip, each.port) in self._departed for each in addresses)

    def report(self, linked: Iterable[RemoteProcess]) -> dict[str, str]:
        """Return a reason for each refused node and each failed dial; not for addresses of `linked` nodes."""
        reached = {listening for remote in linked for listening in _listening(remote.card.contact, self._host)}
        failures = {
            where: reason
            for where, (reason, addresses) in self._failures.items()
            if not any((address.ip, address.port) in reached for address in addresses)
        }
        return {**self.refusals, **failures}


def _spell(card: Card) -> str:
    return f"{card.name} ({card.contact.addresses[0].ip if card.contact.addresses else '?'})"


def _listening(contact: Contact, host: str) -> set[tuple[str, int]]:
    """Return the addresses and ports of a node, those on the loopback interface included if it runs on this host."""
    ips = ("127.0.0.1",) if contact.host == host else ()
    return {(ip, address.port) for address in contact.addresses for ip in (address.ip, *ips)}
