"""How far relays are: what a node measures of its own, and what other nodes tell of theirs. Pure.

A connection through a relay takes the round trips of both ends to the relay together, so the relay with the least sum
is the best for a pair. Each end measures its own part, on the connection of its registration.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from covey.wire.messages import RELAYS_LIMIT, RelayTrip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SAMPLES: Final = 6
"""Round trips of which the shortest counts: the others were in a queue, or the process did not run."""
STALE_SECONDS: Final = 20.0
"""After so long without an answer, nothing is known of the round trip."""
CLEARLY_SHORTER: Final = 0.8
"""The round trip through another relay is clearly shorter if it is at most this share of the one in use..."""
CLEARLY_SHORTER_SECONDS: Final = 0.001
"""... and if the difference is at least this: below, it is the work of schedulers rather than of networks."""
TRIPS_LIMIT: Final = 4096
"""Nodes whose round trips are kept; those of the oldest are forgotten."""


class TripSamples:
    """The last round trips to one relay."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._answered_at = 0.0

    def asked(self, number: int, now: float) -> None:
        """Note that an echo is sent; the answers to the last SAMPLES echoes count."""
        self._asked[number] = now
        if len(self._asked) > SAMPLES:
            del self._asked[next(iter(self._asked))]

    def answered(self, number: int, now: float) -> None:
        """Take an answer, if it is one that is waited for."""
        if (asked_at := self._asked.pop(number, None)) is not None:
            self._samples.append(now - asked_at)
            self._answered_at = now

    def clear(self) -> None:
        """Forget everything: the connection has ended."""
        self._samples.clear()
        self._asked.clear()

    def shortest(self, now: float) -> float | None:
        """Return the shortest of the last round trips; None if there is none, or none that is fresh."""
        is_fresh = bool(self._samples) and now - self._answered_at <= STALE_SECONDS
        return min(self._samples) if is_fresh else None


class ToldTrips:
    """By the token of another node: its round trips to its relays, as it told them last."""

    def __init__(self) -> None:
        self._told: dict[bytes, dict[bytes, float]] = {}

    def told(self, token: bytes, trips: Iterable[RelayTrip]) -> None:
        """Note what the node with this token says."""
        self._told.pop(token, None)
        self._told[token] = {each.relay: each.seconds for each in trips}
        while len(self._told) > TRIPS_LIMIT:
            del self._told[next(iter(self._told))]

    def forget(self, token: bytes) -> None:
        """Forget a node."""
        self._told.pop(token, None)

    def of(self, token: bytes, relay: bytes) -> float | None:
        """Return the round trip of a node to a relay; None if it has told of none."""
        return self._told.get(token, {}).get(relay)


def to_tell(own: Mapping[bytes, float]) -> tuple[RelayTrip, ...]:
    """Return the round trips to tell other nodes of, the shortest first."""
    known = sorted(own.items(), key=lambda each: each[1])
    return tuple(RelayTrip(relay, min(3600.0, seconds)) for relay, seconds in known[:RELAYS_LIMIT])


def is_news(before: Iterable[RelayTrip], now: Iterable[RelayTrip]) -> bool:
    """Tell whether round trips differ so much from those that were told that other nodes may choose another relay."""
    old, new = ({each.relay: each.seconds for each in trips} for trips in (before, now))
    if old.keys() != new.keys():
        return True
    pairs = (sorted((old[relay], new[relay])) for relay in old)
    return any(longer - shorter >= CLEARLY_SHORTER_SECONDS / 2 and shorter <= 0.9 * longer for shorter, longer in pairs)


def is_clearly_shorter(one: float, other: float) -> bool:
    """Tell whether it is worth it to leave a relay with the round trip `other` for one with `one`."""
    return one <= CLEARLY_SHORTER * other and other - one >= CLEARLY_SHORTER_SECONDS
