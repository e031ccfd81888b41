"""Lines that allow bursts, on a clock that is only a number: each is a token bucket, as routers shape what they send.

A line is as fast as LINE_RATE while it has tokens, which it gains at its rate up to its burst; without tokens it is as
fast as its rate. Flows that share a line divide it fairly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from covey.lab.network_simulation import fair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LINE_RATE = 1.25e9
NOTHING = 1e-3
"""Fewer bytes than this are none: times are not exact."""


@dataclass(eq=False)
class Bucket:
    """A line."""

    rate: float
    burst: float
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst


def divided(paths: Sequence[Sequence[Bucket]], room: Mapping[Bucket, float]) -> list[float]:
    """Return the speeds of flows over lines of which each has so much room."""
    keys = {line: ("up", at, 0) for at, line in enumerate(room)}
    by_key = {keys[line]: speed for line, speed in room.items()}
    return fair([LINE_RATE] * len(paths), [[keys[line] for line in path] for path in paths], by_key)


class Lines:
    """All lines, and the clock."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.now = 0.0
        self._buckets = buckets

    def wait(self, seconds: float) -> None:
        """Let time pass in which nothing is sent."""
        self.now += seconds
        for bucket in self._buckets:
            bucket.tokens = min(bucket.burst, bucket.tokens + bucket.rate * seconds)

    def send(
        self, flows: Sequence[tuple[Sequence[Bucket], float]], pieces: int = 1, *, coupled: bool = False
    ) -> list[list[float]]:
        """Send over lines, all at once; return by flow when each of its pieces has arrived.

        Flows that are `coupled` are all as fast as the slowest, as in a ring.
        """
        left = [size for _, size in flows]
        arrived: list[list[float]] = [[] for _ in flows]
        while any(len(each) < pieces for each in arrived):
            going = [at for at, each in enumerate(arrived) if len(each) < pieces]
            paths = [flows[at][0] for at in going]
            room = {line: LINE_RATE if line.tokens > NOTHING else line.rate for path in paths for line in path}
            rates = divided(paths, room)
            if coupled:
                rates = [min(rates)] * len(going)
            used = dict.fromkeys(room, 0.0)
            for path, rate in zip(paths, rates, strict=True):
                for line in path:
                    used[line] += rate
            steps = [
                line.tokens / (used[line] - line.rate)
                for line in room
                if line.tokens > NOTHING and used[line] > line.rate
            ]
            for at, rate in zip(going, rates, strict=True):
                size = flows[at][1]
                steps.append(max(0.0, left[at] - size * (pieces - len(arrived[at]) - 1) / pieces) / rate)
            step = max(min(steps), 1e-9)
            self.now += step
            for line in self._buckets:
                gained = (line.rate - used.get(line, 0.0)) * step
                line.tokens = max(0.0, min(line.burst, line.tokens + gained))
            for at, rate in zip(going, rates, strict=True):
                left[at] -= rate * step
                if left[at] <= flows[at][1] * (pieces - len(arrived[at]) - 1) / pieces + NOTHING:
                    arrived[at].append(self.now)
        return arrived
