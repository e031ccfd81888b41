"""Trials: a change of how lanes are sent is kept if it is clearly faster than what was there before. Pure.

Several networks (`stripes`) and more streams (`stream_trials`) are judged here. After a trial the next
one comes later and later, because each takes a little of what it wants to improve.
"""

from __future__ import annotations

import enum
from typing import Final

CLEAR_GAIN: Final = 1.1
"""What a change must reach of the speed before it."""
FIRST_REST_SECONDS: Final = 10.0
MOST_REST_SECONDS: Final = 600.0
"""How long nothing is tried after a trial: twice as long each time."""


class Rests:
    """The pauses between trials."""

    def __init__(self) -> None:
        self._next, self._until = FIRST_REST_SECONDS, 0.0

    def begin(self, now: float) -> None:
        """Rest from now on, twice as long as the last time."""
        self._until = now + self._next
        self._next = min(MOST_REST_SECONDS, 2 * self._next)

    def is_over(self, now: float) -> bool:
        """Tell whether a trial may begin."""
        return now >= self._until

    def shorten(self) -> None:
        """Let the next rest be short: a trial has shown that something can be gained."""
        self._next = FIRST_REST_SECONDS


class TrialVerdict(enum.Enum):
    """What is known of a trial."""

    UNDECIDED = "undecided"
    FASTER = "faster"
    NOT_FASTER = "not faster"


class LaneTrial:
    """A change that is being tried, and the speed before it."""

    def __init__(self, before: float, looks: int = 1) -> None:
        """It is faster if it was so `looks` times in a row; once is enough if a speed is that of a long time."""
        self.before = before
        self._left = looks
        self.verdict = TrialVerdict.UNDECIDED

    def judge(self, speed: float) -> TrialVerdict:
        """Take a speed that was measured with the change. A verdict stays what it is."""
        if self.verdict is TrialVerdict.UNDECIDED:
            self._left -= 1
            if speed < CLEAR_GAIN * self.before:
                self.verdict = TrialVerdict.NOT_FASTER
            elif self._left <= 0:
                self.verdict = TrialVerdict.FASTER
        return self.verdict
