"""Clocks: one that also runs while the machine sleeps, and how far those of other processes are ahead."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from covey.base.numbers import Seat

_WITH_SLEEP: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""On macOS it is CLOCK_MONOTONIC that runs on, and `time.monotonic` that does not."""
AGEING: Final = 1.05
"""Factor by which a stored round trip is inflated per new sample, so that old offsets expire."""


def waking_clock() -> float:
    """Return seconds by a clock that is never set, and that also runs while the machine sleeps."""
    return time.monotonic() if _WITH_SLEEP is None else time.clock_gettime(_WITH_SLEEP)


class ClockOffsets:
    """The best measurement for each peer: that of the shortest round trip. On the control loop; any thread may read."""

    def __init__(self) -> None:
        self._best: dict[Seat, tuple[float, float]] = {}
        """By seat: the round trip, made longer with every measurement since, and the offset."""

    def measured(self, seat: Seat, round_trip: float, offset: float) -> None:
        """Take a measurement, in seconds; half of the round trip is the most by which the offset can be wrong."""
        best = self._best.get(seat)
        if best is None or round_trip <= best[0] * AGEING:
            self._best[seat] = round_trip, offset
        else:
            self._best[seat] = best[0] * AGEING, best[1]

    def offsets(self) -> dict[Seat, float]:
        """Return by how many seconds the clock of each peer is ahead."""
        return {seat: offset for seat, (_, offset) in sorted(self._best.copy().items())}
