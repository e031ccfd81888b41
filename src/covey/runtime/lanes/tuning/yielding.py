"""What gives way to what, and how fast bulk may be sent to a machine while something more urgent is in use to it. Pure.

What an urgent packet waits for is the queue in front of the slowest link of the way, which TCP fills: on a line of 40
Mbit/s it holds tens of milliseconds. A sender that is spaced out by what that link carries leaves the queue nearly
empty. What it carries is the most that has arrived in some time: a moment in which the machines are busy makes it no
slower. Around that the rate follows the queue: how much longer than the shortest one the round trips of the bulk are.
With a queue it shrinks, without one it grows, since the link may carry more. A queue that stays although less is sent
is that of other machines, and is left to them.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Final, NamedTuple

LEAST_TARGET_SECONDS: Final = 0.002
"""The queue that is aimed at..."""
TARGET_PACKETS: Final = 6
"""... but not less than so many packets take: the kernel sends two at once, on each of a few connections."""
DRAIN_SECONDS: Final = 0.06
"""In about how much time a longer queue is brought to the target."""
LEAST_SHARE: Final = 0.5
"""Share of the rate that bulk may send while a queue is drained."""
STEP: Final = 0.01
"""By what share the rate changes with each look."""
RANGE: Final = (0.85, 1.25)
"""The rate as a share of what has arrived at most."""
SPAN_SECONDS: Final = 0.2
"""Over how much time the bytes that arrive are counted."""
SPANS_KEPT: Final = 40
"""How many such spans are remembered."""
FOREIGN_LOOKS: Final = 40
"""After so many looks in a row at a queue that is too long, it is taken for that of other machines..."""
FOREIGN_KEPT: Final = 400
"""... for so many looks."""
FULL_PACKET_BYTES: Final = 1500


class Urgency(enum.IntEnum):
    """Which connections give way to which."""

    CALLS = 0
    """Small calls."""
    FIRST = 1
    """Groups whose priority is above bulk."""
    PARTS = 2
    """The parts of large calls."""
    TENSORS = 3
    """Collectives and messages."""

    @property
    def gives_way(self) -> bool:
        """Whether something more urgent makes it slower."""
        return self >= Urgency.PARTS


class Look(NamedTuple):
    """What was seen of the bulk that is sent to a machine, since the last look."""

    seconds: float
    arrived: int
    """Bytes."""
    queue_seconds: float
    """How much longer than the shortest one the round trips are."""
    is_sending: bool
    """Whether there is more to send than the network takes."""
    speed: float = 0.0
    """Bytes a second, as the kernel has measured them last."""


class YieldingRate:
    """The rate of the bulk to one machine."""

    def __init__(self) -> None:
        self._rate = 0.0
        """Bytes a second; 0 until there was a queue."""
        self._spans: deque[float] = deque(maxlen=SPANS_KEPT)
        """What has arrived in the last spans, in bytes a second."""
        self._seconds, self._arrived = 0.0, 0
        """Seconds of the present span, and what arrived in it."""
        self._first = 0.0
        """What the kernel has measured, before a span is over."""
        self._last_queue = math.inf
        self._foreign = 0.0
        """The part of the queue that other machines fill, in seconds."""
        self._least, self._looks = 0.0, 0
        """The shortest queue of the last looks at one that was too long, and their number."""
        self._foreign_looks = 0

    def look(self, seen: Look) -> int | None:
        """Take what was seen; return the bytes a second that bulk may have from now on, None if all it can."""
        if not seen.is_sending:
            self._seconds, self._arrived = 0.0, 0
            return int(self._rate) or None
        self._count(seen)
        queue = self._own_queue(seen.queue_seconds)
        carries = self._carries()
        target = LEAST_TARGET_SECONDS
        if carries:
            target = max(target, TARGET_PACKETS * FULL_PACKET_BYTES / carries)
        if not self._rate:
            if queue <= target or not carries:
                return None
            self._rate = carries
        self._note_length(queue, target)
        if queue > target:
            self._rate *= 1 - STEP
        elif queue < target / 2:
            self._rate *= 1 + STEP
        least, most = RANGE
        self._rate = max(least * carries, min(most * carries, self._rate))
        return max(1, int(self._rate * max(LEAST_SHARE, min(1.0, 1 + (target - queue) / DRAIN_SECONDS))))

    def _count(self, seen: Look) -> None:
        self._seconds += seen.seconds
        self._arrived += seen.arrived
        if not self._spans:
            self._first = seen.speed
        if self._seconds >= SPAN_SECONDS:
            self._spans.append(self._arrived / self._seconds)
            self._seconds, self._arrived = 0.0, 0

    def _carries(self) -> float:
        """Return what the slowest link carries: the most of all spans but one, which a burst may have made fast."""
        most = sorted(self._spans)[-2:]
        return most[0] if most else self._first

    def _own_queue(self, queue: float) -> float:
        """Return the queue without that of other machines; one that is long for a moment is none."""
        self._last_queue, steady = queue, min(queue, self._last_queue)
        self._foreign_looks += 1
        self._foreign = 0.0 if self._foreign_looks > FOREIGN_KEPT else min(self._foreign, steady)
        return steady - self._foreign

    def _note_length(self, queue: float, target: float) -> None:
        if queue <= target:
            self._looks = 0
            return
        self._least = min(self._least, queue) if self._looks else queue
        self._looks += 1
        if self._looks == FOREIGN_LOOKS:
            self._foreign += self._least
            self._looks = self._foreign_looks = 0
