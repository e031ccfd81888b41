"""How many streams the lanes with one peer have: more, if that was tried and is clearly faster. Pure.

A stream that waits for acknowledgements, or slows down for each lost packet, leaves a part of a long path unused; many
streams use more of it. Where one stream fills the path, or where a bottleneck is shared, more of them gain nothing.
Only a trial tells which it is: GROWTH times as many streams are used for a while, and kept if each of LOOKS
measurements is clearly above all that were made before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from covey.runtime.lanes.tuning.trials import LaneTrial, Rests, TrialVerdict

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH: Final = 4
LEAST_GROWTH: Final = 2
"""What a trial multiplies the number of streams by, and the least that is worth one."""
LOOKS: Final = 3
"""Speeds that are measured at least before a trial, and with it."""
REMEMBERED: Final = 8
"""Speeds before a trial that it is compared with, if so many are known: the more, the rarer is a gain by chance."""
WINDOW_BYTES: Final = 1 << 20
WINDOW_SECONDS: Final = 0.75
"""Bytes that a lane sends, and seconds in which it is sending, before a speed is taken from them: a busy lane has one
at each look of the path monitor."""
LEAST_SENDING_SHARE: Final = 0.1
"""The share of the time in which a lane must be sending: one that is hardly used has nothing to gain."""


class SpeedWindow:
    """Turns counters of a lane, which only grow, into speeds of one stretch of time after the other."""

    def __init__(self) -> None:
        self._sent, self._busy, self._since = 0, list[float](), 0.0

    def take(self, sent: int, busy: Sequence[float], now: float) -> float | None:
        """Return the bytes a second since the last stretch, while the lane was sending; None if it is not over.

        `sent` is what all streams have sent so far, and `busy` the seconds in which each of them was sending.
        """
        is_known = len(self._busy) == len(busy)
        seconds = max((later - before for before, later in zip(self._busy, busy, strict=False)), default=0.0)
        if is_known and (sent - self._sent < WINDOW_BYTES or seconds < WINDOW_SECONDS):
            return None
        speed = (sent - self._sent) / seconds if is_known else None
        is_hardly_used = seconds < LEAST_SENDING_SHARE * (now - self._since)
        self._sent, self._busy, self._since = sent, list(busy), now
        return None if is_hardly_used else speed


class StreamChoice:
    """The number of streams of the lanes with one peer."""

    def __init__(self, first: int) -> None:
        """`first` is the number that lanes have before anything was tried."""
        self.count = self._kept = first
        """How many streams lanes should have; and how many have turned out to be best."""
        self.reason = ""
        """Why, in words; empty before the first trial."""
        self._trial: LaneTrial | None = None
        self._rests = Rests()
        self._speeds: deque[float] = deque(maxlen=REMEMBERED)
        """The last ones that were measured with `count` streams."""

    @property
    def is_trying(self) -> bool:
        """Whether `count` is only tried."""
        return self._trial is not None

    def take(self, streams: int, speed: float, now: float, most: int) -> TrialVerdict | None:
        """Take a speed of a lane with so many streams; return the verdict, if there is one on a trial.

        `most` is the largest number that may be tried now.
        """
        if streams != self.count:  # the lane is still to be replaced
            return None
        self._speeds.append(speed)
        if self._trial is not None:
            return self._judge(self._trial, speed, now)
        wanted = min(most, GROWTH * streams)
        if len(self._speeds) >= LOOKS and wanted >= LEAST_GROWTH * streams and self._rests.is_over(now):
            self._trial = LaneTrial(max(self._speeds), LOOKS)
            self._speeds.clear()
            self.count = wanted
            self.reason = f"to find out whether more than {_spelled(self._trial.before)} is possible"
        return None

    def _judge(self, trial: LaneTrial, speed: float, now: float) -> TrialVerdict | None:
        verdict = trial.judge(speed)
        if verdict is TrialVerdict.UNDECIDED:
            return None
        compared = f"{_spelled(speed)} instead of {_spelled(trial.before)}"
        if verdict is TrialVerdict.FASTER:
            self._kept, self._trial = self.count, None
            self.reason = compared
            self._rests.shorten()
        else:
            self._give_up(f"{self.count} were not faster, {compared}", now)
        return verdict

    def refused(self, now: float) -> None:
        """Note that no lane with the number that is tried can be opened: descriptors are short, or the peer refuses."""
        if self._trial is not None:
            self._give_up(f"{self.count} could not be opened", now)

    def _give_up(self, reason: str, now: float) -> None:
        self.count, self._trial, self.reason = self._kept, None, reason
        self._speeds.clear()
        self._rests.begin(now)


def _spelled(speed: float) -> str:
    return f"{speed / 1e6:.3g} MB/s"
