"""Bulk leaves the queue of the slowest link nearly empty, and still fills the link."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.runtime.lanes.tuning.rate_limits import SENDING_DIVIDE_SECONDS
from covey.runtime.lanes.tuning.yielding import LEAST_SHARE, LEAST_TARGET_SECONDS, RANGE, Look, YieldingRate

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 25
"""Of the model for each look."""
MEGABYTE = 1e6


@dataclass
class Line:
    """A line with a queue in front of it, which holds `seconds` at most, and a sender that always has more to send."""

    rate: float
    seconds: float = 0.05
    others: float = 0.0
    """The queue that other machines fill."""
    noise: Callable[[], float] = lambda: 0.0
    queued: float = 0.0
    yielding: YieldingRate = field(default_factory=YieldingRate)
    pace: float | None = None
    longest: float = 0.0

    def run(self, seconds: float) -> float:
        """Return the share of the line that was used."""
        self.longest, total = 0.0, 0.0
        looks = int(seconds / SENDING_DIVIDE_SECONDS)
        for _ in range(looks):
            arrived = 0.0
            for _ in range(STEPS):
                step = SENDING_DIVIDE_SECONDS / STEPS
                sent = 2 * self.rate * step if self.pace is None else self.pace * step
                moved = min(self.queued + sent, self.rate * step)
                self.queued = min(self.queued + sent - moved, self.rate * self.seconds)
                arrived += moved
            total += arrived
            self.longest = max(self.longest, self.queued / self.rate)
            delay = self.queued / self.rate + self.others + self.noise()
            self.pace = self.yielding.look(Look(SENDING_DIVIDE_SECONDS, int(arrived), delay, is_sending=True))
        return total / (self.rate * looks * SENDING_DIVIDE_SECONDS)


@in_turn(rate=[0.6 * MEGABYTE, 5 * MEGABYTE, 120 * MEGABYTE])
def test_a_full_queue_is_drained_and_stays_short_while_the_line_is_full(rate: float) -> None:
    line = Line(rate, queued=0.05 * rate)
    assert line.run(1.0) > 0.8
    assert line.run(10.0) > 0.95
    target = max(LEAST_TARGET_SECONDS, 6 * 1500 / rate)
    assert line.longest < 3 * target


def test_the_rate_follows_a_line_that_gets_faster_or_slower() -> None:
    line = Line(5 * MEGABYTE)
    line.run(5.0)
    line.rate = 15 * MEGABYTE
    line.run(10.0)
    assert line.run(5.0) > 0.95
    line.rate = 6 * MEGABYTE
    line.run(15.0)
    assert line.run(5.0) > 0.95
    assert line.longest < 0.006


def test_a_queue_that_other_machines_fill_is_left_to_them() -> None:
    line = Line(5 * MEGABYTE)
    line.run(3.0)
    line.others = 0.04
    line.run(3.0)
    assert line.run(8.0) > 0.85


@in_turn(seed=seeds(5))
def test_busy_machines_do_not_make_bulk_slower_and_slower(seed: int) -> None:
    moments = random.Random(seed)
    line = Line(5 * MEGABYTE, noise=lambda: moments.choice([0.0, 0.0, 0.001, 0.008, 0.02]))
    line.run(5.0)
    assert line.run(60.0) > 0.8


def test_nothing_is_slowed_down_without_a_queue_or_without_bulk() -> None:
    rate = YieldingRate()
    for _ in range(100):
        assert rate.look(Look(0.025, 1_000_000, 0.0005, is_sending=True)) is None
        assert rate.look(Look(0.025, 0, 0.5, is_sending=False)) is None


def test_the_kernel_s_speed_counts_until_one_is_measured() -> None:
    rate = YieldingRate()
    first = rate.look(Look(0.0, 0, 0.05, is_sending=True, speed=5 * MEGABYTE))
    assert first is not None
    assert LEAST_SHARE * RANGE[0] * 5 * MEGABYTE <= first <= 5 * MEGABYTE
    for _ in range(20):
        last = rate.look(Look(0.025, 25_000, 0.001, is_sending=True, speed=5 * MEGABYTE))
    assert last == pytest.approx(MEGABYTE, rel=0.3)
