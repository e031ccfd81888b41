"""Who may use the page: a ticket from the link, once and soon, is worth the token, which every question then shows.

The token is in no address and no cookie: browsers show addresses to others, and send cookies to every port of a host.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

TICKET_SECONDS: Final = 300.0
"""How long a link can be used."""
TICKETS: Final = 16
"""Links that can be used at a time; a further one ends the oldest."""
UNSEEN_SECONDS: Final = 12 * 3600.0
"""How long the token is valid without a viewer."""


class Admission:
    """Gives out tickets and the token, and knows them again. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets: dict[str, float] = {}
        """Until when each is valid, the oldest first."""
        self._token = secrets.token_urlsafe(32)
        self._seen = clock()
        self.link_key = secrets.token_urlsafe(32)
        """Known to this user's commands, by a private file: it is worth new tickets, and nothing else."""

    def new_ticket(self) -> str:
        """Return what a link holds."""
        ticket = secrets.token_urlsafe(24)
        with self._lock:
            self._forget_old_tickets()
            while len(self._tickets) >= TICKETS:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[ticket] = self._clock() + TICKET_SECONDS
        return ticket

    def enter(self, ticket: str) -> str | None:
        """Return the token for a ticket, which is used up by that; None if it was used, is too old, or never was."""
        with self._lock:
            self._forget_old_tickets()
            found = [each for each in self._tickets if _is_same(each, ticket)]
            if not found:
                return None
            del self._tickets[found[0]]
            if self._has_ended():
                self._token = secrets.token_urlsafe(32)
            self._seen = self._clock()
            return self._token

    def admits(self, token: str) -> bool:
        """Tell whether this is the token; if so, it has a viewer now."""
        with self._lock:
            is_valid = _is_same(self._token, token) and not self._has_ended()
            if is_valid:
                self._seen = self._clock()
            return is_valid

    def admits_command(self, key: str) -> bool:
        """Tell whether a command of this user asks."""
        return _is_same(self.link_key, key)

    def _has_ended(self) -> bool:
        return self._clock() - self._seen > UNSEEN_SECONDS

    def _forget_old_tickets(self) -> None:
        now = self._clock()
        self._tickets = {ticket: until for ticket, until in self._tickets.items() if until > now}


def _is_same(mine: str, theirs: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(mine.encode(), theirs.encode(errors="replace"))
