"""How often something may happen: a bound on rates, for packets, dials, questions and lines in a log. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Hashable

KEYS_LIMIT: Final = 256


class Bucket:
    """Allows `burst` at once, and `rate` a second after that."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, float("-inf")

    def take(self, now: float) -> bool:
        """Use one, if there is one now."""
        if self.wait(now) > 0:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """Have one more, of those that were taken."""
        self._left = min(self._burst, self._left + 1)

    def wait(self, now: float) -> float:
        """Return in how many seconds there will be one."""
        if now > self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._rate)
            self._at = now
        return max(0.0, (1 - self._left) / self._rate)


class Buckets:
    """A bucket for each key, of which the last `KEYS_LIMIT` are remembered."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._buckets: dict[Hashable, Bucket] = {}

    def of(self, key: Hashable) -> Bucket:
        """Return the bucket of this key, which is the one remembered longest from now on."""
        bucket = self._buckets.pop(key, None) or Bucket(self._rate, self._burst)
        self._buckets[key] = bucket
        if len(self._buckets) > KEYS_LIMIT:
            del self._buckets[next(iter(self._buckets))]
        return bucket

    def take(self, key: Hashable, now: float) -> bool:
        """Use one of this key's, if there is one now."""
        return self.of(key).take(now)


class Seldom:
    """Lets something be said at most every `seconds`, and counts what was not."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._at = seconds, float("-inf")
        self.unsaid = 0
        """How often it was refused since it was last allowed."""

    def may(self, now: float) -> bool:
        """Tell whether it may be said now; then it counts as said."""
        if now < self._at + self._seconds:
            self.unsaid += 1
            return False
        self._at = now
        return True
