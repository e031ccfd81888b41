"""Divide a batch among ranks by their speed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW_SHARE: Final = 0.3
"""The weight of the newest measurement: seven steps after a change, nine tenths of the average reflect it."""
_LEVELS: Final = 1 << 20
"""Speeds are rounded to this many parts of the highest, so that all ranks compute equal shares with integers."""


class Pace:
    """The samples per second of this rank, smoothed over the last steps."""

    def __init__(self) -> None:
        self.speed = 0.0
        """0 before the first measurement."""

    def measure(self, samples: int, seconds: float) -> None:
        """Add the measurement of a step; a step without samples does not count."""
        if samples and seconds > 0:
            speed = samples / seconds
            self.speed = speed if not self.speed else NEW_SHARE * speed + (1 - NEW_SHARE) * self.speed


def even(batch: int, count: int) -> list[int]:
    """Return `count` shares of a batch that differ by at most one sample."""
    return [batch * (i + 1) // count - batch * i // count for i in range(count)]


def by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """Return shares in proportion to speeds that add up to `batch`; each is at least 1 if there are enough samples.

    An unknown speed, one that is not a number above 0, counts as the average of the others.
    """
    weights = _whole(speeds)
    if batch < len(weights):
        first = sorted(range(len(weights)), key=lambda place: -weights[place])[:batch]
        return [int(place in first) for place in range(len(weights))]
    shares = [1] * len(weights)
    # A share below one sample becomes one. That leaves less for the others, so check them again.
    rest, sharing = batch, set(range(len(weights)))
    while slow := {place for place in sharing if weights[place] * rest < sum(weights[other] for other in sharing)}:
        sharing -= slow
        rest -= len(slow)
    total = sum(weights[place] for place in sharing)
    for place in sharing:
        shares[place] = weights[place] * rest // total
    left = batch - sum(shares)
    for place in sorted(sharing, key=lambda place: (-(weights[place] * rest % total), place))[:left]:
        shares[place] += 1
    return shares


def _whole(speeds: Sequence[float]) -> list[int]:
    known = [speed for speed in speeds if math.isfinite(speed) and speed > 0]
    if not known:
        return [1] * len(speeds)
    top, average = max(known), math.fsum(speed / len(known) for speed in known)
    used = [speed if math.isfinite(speed) and speed > 0 else average for speed in speeds]
    return [max(1, round(speed / top * _LEVELS)) for speed in used]
