"""When a rank at its own pace sends: after a time that all ranks have computed alike, whatever it has done by then."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from covey.torch.training.averaging import RankFigures

LATEST: Final = 4
"""With overlap, an outer step is taken at most this part of the period after its changes were sent: later ones cost
loss, because the ranks drift apart meanwhile."""
MEDIAN_OF: Final = 9
"""The last inner steps whose median time is that of a step."""


class PeriodClock:
    """When a rank at its own pace sends its fragments.

    The length of a period follows from figures that all ranks have; its beginning is this rank's own. A rank that waits
    for others in an outer step is ahead of them: its period then began later by what it has waited.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MEDIAN_OF)
        self._began_at = self._step_at = 0.0
        self.period_seconds = 0.0
        """0 before the ranks know how long their steps take: then steps count."""

    @property
    def step_seconds(self) -> float:
        return float(statistics.median(self._times)) if self._times else 0.0

    def start(self) -> None:
        """Note that an inner step begins."""
        self._step_at = time.monotonic()

    def stop(self) -> None:
        """Note that an inner step has ended."""
        if self._step_at:
            self._times.append(max(1e-6, time.monotonic() - self._step_at))

    def begin_period(self, turn: int, count: int) -> None:
        """Be in a period in which `turn` of `count` fragments were sent."""
        self._began_at = time.monotonic() - self.period_seconds * turn / count
        self._step_at = 0.0

    def end_period(self) -> None:
        self._began_at += self.period_seconds
        if not self.period_seconds or self._began_at + self.period_seconds < time.monotonic():
            self._began_at = time.monotonic()  # this rank is a whole period behind: do not catch up

    def shift(self, waited: float) -> None:
        self._began_at += waited

    def is_due(self, turn: int, count: int) -> bool:
        return time.monotonic() >= self._began_at + self.period_seconds * (turn + 1) / count

    def has_flown(self, sent_at: float) -> bool:
        return time.monotonic() >= sent_at + self.period_seconds / LATEST

    def agree(self, figures: RankFigures, every: int, fragments: int) -> None:
        """Set the period: in it, all ranks together take `every` steps for each; the slowest one for each fragment."""
        known = [figures.step_seconds[rank] for rank in figures.contributors if figures.step_seconds[rank] > 0]
        if not known:
            return
        before = self.period_seconds
        pace = math.fsum(1 / seconds for seconds in known) / len(known)
        self.period_seconds = max(every / pace, fragments * max(known))
        if not before:
            self._began_at = time.monotonic()
