"""What compression has saved in a group so far, and what "auto" chose."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster
    from covey.runtime.compressed.automatic import Tuner
    from covey.runtime.counters import GroupCounters

MOST_PASSING: Final = 4096
"""Calls that are remembered."""


class Compression(NamedTuple):
    """What compressed operations of a group have sent from this rank."""

    operations: int
    sent_bytes: int
    plain_bytes: int
    """What would have been sent without compression."""
    codec: str
    """Of the last compressed operation; empty before the first."""
    reason: str
    """Why `compress="auto"` chose it."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0


class Savings:
    """The counters of one group."""

    def __init__(self, facts: GroupFacts, roster: GroupRoster, counters: GroupCounters) -> None:
        self._facts, self._roster, self._counters = facts, roster, counters
        self.total = Compression(0, 0, 0, "", "")
        self._passing: dict[tuple[Any, ...], tuple[dict[str, Any], float]] = {}
        """Calls that are sent as they are: what is noted of each, and how many more of them there may be."""

    @functools.cached_property
    def tuner(self) -> Tuner:
        """What `compress="auto"` has measured."""
        from covey.runtime.compressed.automatic import Tuner  # slow to load, and most programs do not need it

        return Tuner()

    def let_pass(self, key: tuple[Any, ...], info: dict[str, Any], times: float = math.inf) -> None:
        """Let the next `times` calls with this key be sent as they are, without asking again why."""
        if len(self._passing) > MOST_PASSING:
            self._passing.clear()
        self._passing[key] = info, times

    def passes(self, key: tuple[Any, ...] | None) -> bool:
        """Tell whether a call is one that is sent as it is, and count it."""
        passing = self._passing.get(key) if key is not None else None
        if passing is None or key is None:
            return False
        info, times = passing
        if times > 1:
            self._passing[key] = info, times - 1
        else:
            del self._passing[key]
        self.add(info)
        return True

    def add(self, info: dict[str, Any]) -> None:
        """Count an operation that is sent, or has succeeded; an event tells when "auto" chose another codec."""
        self._counters.compressed(info["codec"], info["sent_bytes"], info["plain_bytes"], info.get("reason", ""))
        last, reason = self.total, info.get("reason", "")
        self.total = Compression(
            last.operations + 1,
            last.sent_bytes + info["sent_bytes"],
            last.plain_bytes + info["plain_bytes"],
            info["codec"],
            reason,
        )
        facts, node = self._facts, self._roster.node
        if reason and info["codec"] != last.codec and node is not None:
            from covey.runtime.events import CODEC, Event  # loaded with the node

            node.events.add(Event(CODEC, time.time(), facts.generation, 0, text=f"{facts.name}: {reason}"))
