"""Shares of a batch by the speed of those who work on it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW_SHARE: Final = 0.3
"""How much the newest measurement counts: after seven steps nine tenths of the speed are newer than a change."""
_LEVELS: Final = 1 << 20
"""Speeds are rounded to so many parts of the highest, so that shares follow in whole numbers, alike everywhere."""


class Pace:
    """How many samples a second this rank works through, smoothed over the last steps."""

    def __init__(self) -> None:
        self.speed = 0.0
        """0 before the first measurement."""

    def measure(self, samples: int, seconds: float) -> None:
        """Count a step in; one without samples says nothing."""
        if samples and seconds > 0:
            speed = samples / seconds
            self.speed = speed if not self.speed else NEW_SHARE * speed + (1 - NEW_SHARE) * self.speed


def even(batch: int, count: int) -> list[int]:
    """Return shares that differ by one sample at most."""
    return [batch * (place + 1) // count - batch * place // count for place in range(count)]


def by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """Return shares in proportion to speeds, which add up to `batch`; everyone gets a sample if there are enough.

    Whose speed is not known, or is no number above 0, counts as the average of the others.
    """
    weights = _whole(speeds)
    if batch < len(weights):
        first = sorted(range(len(weights)), key=lambda place: -weights[place])[:batch]
        return [int(place in first) for place in range(len(weights))]
    shares = [1] * len(weights)
    # Who would get less than one sample gets one; that leaves less for the others, so look again.
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
