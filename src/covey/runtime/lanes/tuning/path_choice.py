"""Whether the lanes with a peer should move to another of its addresses. Pure.

An address is better than the one in use if it is reached without a relay, by a better kind of interface, or directly
instead of through a router, without being much farther away. Of two relays, the one with the shorter round trip is
better. One of the same kind may be faster: if it has just appeared, or if
its round trip is much shorter, it is worth a trial. Each has to be so several times, because one packet that is lost or
waits in a queue proves nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.proto.relay_trips import is_clearly_shorter
from covey.runtime.lanes.tuning.trials import Rests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.links.handshake import Where

SHORTER: Final = 0.5
"""A round trip is much shorter if it is at most this share of the other one..."""
SHORTER_SECONDS: Final = 0.001
"""... and if the difference is at least this: below, it is the work of schedulers rather than of networks."""


class Quality(NamedTuple):
    """What is known of an address that answers."""

    medium: int
    """The place of the interface's kind in the order of preference: 0 is the best."""
    is_routed: bool
    """Whether it is in no network of this machine."""
    round_trip: float
    network: str
    """Stands for the way there: addresses in one network of this machine are reached alike."""
    is_relayed: bool = False
    """Whether it is the address of a relay."""


class MoveReason(enum.Enum):
    """Why lanes should move, or why it is worth a trial. The value says so in words."""

    UNREACHABLE = "the address in use does not answer"
    MEDIUM = "it is reached by a better interface"
    APPEARED = "it has appeared, and is faster"
    ROUND_TRIP = "its round trip is shorter"
    DIRECT = "it needs no relay"
    RELAY = "the round trip through this relay is shorter"
    FASTER = "it was tried, and is much faster"
    STUCK = "what is sent over the other one is not acknowledged"

    @property
    def looks(self) -> int:
        """How often it must have been so."""
        return 3 if self is MoveReason.ROUND_TRIP else 2

    @property
    def needs_trial(self) -> bool:
        """Whether only a trial shows that the path is better."""
        return self in (MoveReason.APPEARED, MoveReason.ROUND_TRIP)


class PathChoice:
    """What was seen of the addresses of one peer."""

    def __init__(self) -> None:
        self._scores: dict[Where, tuple[MoveReason, int]] = {}
        """By address: why it may be better, and how often it was."""
        self._familiar: set[str] | None = None
        """The networks that are known, and have not just appeared; None before the first look."""
        self._rests = Rests()
        """Meanwhile paths of the same kind are no reason for a trial: what covey itself sends makes the round trip of
        the path in use longer, whichever it is."""

    @property
    def is_undecided(self) -> bool:
        """Whether another look may soon find a reason to move."""
        return bool(self._scores)

    def look(self, used: Where | None, seen: Mapping[Where, Quality], now: float) -> tuple[Where, MoveReason] | None:
        """Take the addresses that answer now; return one to move to, or to try, and why; None if there is none."""
        networks = {quality.network for quality in seen.values()}
        if self._familiar is None:
            self._familiar = networks
        scores = {}
        for way, quality in seen.items():
            reason = None if way == used else self._reason(seen.get(used) if used is not None else None, quality, now)
            before, score = self._scores.get(way, (reason, 0))
            if reason is not None:
                scores[way] = reason, score + 1 if before is reason else 1
            elif before is MoveReason.ROUND_TRIP and score > 1:  # queues come and go
                scores[way] = before, score - 1
        ready = [way for way, (reason, score) in scores.items() if score >= reason.looks]
        self._scores = {} if ready else scores
        self._familiar = (self._familiar & networks) | (networks if ready else set())
        if not ready:
            return None
        best = min(ready, key=lambda way: (seen[way].is_relayed, seen[way]))
        if scores[best][0].needs_trial:
            self._rests.begin(now)
        return best, scores[best][0]

    def _reason(self, used: Quality | None, other: Quality, now: float) -> MoveReason | None:
        """Return why an address may be better than the one in use, which is None if it does not answer."""
        if used is None:
            return MoveReason.UNREACHABLE
        if used.is_relayed and not other.is_relayed:
            return MoveReason.DIRECT
        if other.is_relayed:
            is_nearer = used.is_relayed and is_clearly_shorter(other.round_trip, used.round_trip)
            return MoveReason.RELAY if is_nearer else None
        if other[:2] < used[:2] and not _is_shorter(used.round_trip, other.round_trip):
            return MoveReason.MEDIUM
        if other[:2] > used[:2] or other.network == used.network or not self._rests.is_over(now):
            return None
        if self._familiar is not None and other.network not in self._familiar:
            return MoveReason.APPEARED
        return MoveReason.ROUND_TRIP if _is_shorter(other.round_trip, used.round_trip) else None


def _is_shorter(one: float, other: float) -> bool:
    return one <= SHORTER * other and other - one >= SHORTER_SECONDS
