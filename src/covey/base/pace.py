"""Rate limits, for packets, dials, questions and log lines, and growing pauses between tries. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

PACED_KEYS_LIMIT: Final = 256
MOST_DOUBLINGS: Final = 60
"""So often a pause grows at most: enough for any pause, and its power fits a float."""


class Bucket:
    """A token bucket: allows `burst` events at once, and `rate` per second after that."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, float("-inf")

    def take(self, now: float) -> bool:
        """Take a token; return False if there is none."""
        if self.wait(now) > 0:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Return a token that was taken."""
        self._left = min(self._burst, self._left + 1)

    def wait(self, now: float) -> float:
        """Return the seconds until there is a token."""
        if now > self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
            self._at = now
        return max(0.0, (1 - self._left) / self._rate)


class Buckets:
    """A bucket per key, for the `PACED_KEYS_LIMIT` keys used last."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: dict[Hashable, Bucket] = {}

    def of(self, key: Hashable) -> Bucket:
        """Return the bucket of a key, which becomes the key used last."""
        bucket = self._buckets.pop(key, None) or Bucket(self._rate, self._burst)
        self._buckets[key] = bucket
        if len(self._buckets) > PACED_KEYS_LIMIT:
            del self._buckets[next(iter(self._buckets))]
        return bucket

    def take(self, key: Hashable, now: float) -> bool:
        """Take a token from the bucket of `key`; return False if there is none."""
        return self.of(key).take(now)


class Seldom:
    """Allows an event at most every `seconds`, and counts those it refused."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, float("-inf")
        self.unsaid = 0
        """The number of events refused since one was last allowed."""

    def may(self, now: float) -> bool:
        """Tell whether an event is allowed now; if so, it counts."""
        if now < self._at + self._seconds:
            self.unsaid += 1
            return False
        self._at = now
        return True


class Growing(NamedTuple):
    """Pauses between tries, each longer than the one before."""

    first: float
    most: float
    factor: float = 2.0

    def after(self, failures: int) -> float:
        """Return the pause after so many failures in a row; 0 if there was none."""
        if failures < 1:
            return 0.0
        return min(self.most, self.first * self.factor ** min(failures - 1, MOST_DOUBLINGS))
