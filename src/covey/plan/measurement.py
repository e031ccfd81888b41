"""How ranks measure the links between them: which transfers, of how many bytes, when to stop, what follows. Pure."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from covey.base.numbers import FASTEST, SLOWEST
from covey.plan.moves import Plan, Recv, Send

MEASURED_PIECES: Final = 32
"""Into which a transfer is cut, so that its receiver can see how it goes on."""
SKIPPED: Final = 3
"""Pieces that are not timed at the beginning: ranks do not begin at the same moment, and a connection has to find its
speed. As many are not timed at the end, where other flows over a shared link may be over."""
LEAST_TAIL: Final = 8
"""Pieces from which the speed after a burst is taken, at least."""
LUMP: Final = 0.125
"""Pieces that follow each other within this part of the mean distance were read at once, and came before."""
DROP: Final = 1.2
"""A transfer began with a burst if its middle is so many times as fast as its slowest tail. Less is noise."""
FLATTERY: Final = 1.5
"""How many times as fast as the whole transfer its middle may be. A receiver that was not running finds many pieces at
once, and would take the link for much faster than it is."""
LEAST_PIECE, MOST_PIECE = 512, 240 << 10
"""Bytes of a piece. Thirty-two of the largest take 63 ms at 1 Gbit/s, and a fast link needs no more."""
SHARES: Final = (0.1, 0.9)
"""The parts of the time of two passes. The first one finds how many bytes every link moves in the second, so that flows
over a shared link are under way at the same time. The second counts: it is long, because bursts are short."""
MOST_SECONDS: Final = 1.0
"""What a measurement may take in all, if an operation does not take less."""
RISE: Final = 2.0
"""How many times as many bytes as the slowest link a link may move in the second pass, if it was faster in the first.
That may have been a burst: so a measurement is planned to take this part of the time that it may take."""
PARTS: Final = 4
"""An operation bears at most one of so many parts of the time that a measurement may take, and one round."""
LEAST_PART_SECONDS: Final = 0.02
"""What an operation may be held up in any case, so that a few ranks of a fast network can finish a pass."""
MOST_ROUNDS: Final = 15
"""Among up to 16 ranks all pairs are measured. Among more, some: every pair has a lane of its own."""


@lru_cache(maxsize=512)
def rotation(rank: int, size: int, step: int, sent: int, received: int, pieces: int) -> Plan:
    """Return this rank's plan to send `pieces` times `sent` elements to rank + step, and to receive from rank - step.

    `received` is what rank - step sends each time. All pieces are of the beginning of buffer 0, and arrive in the
    beginning of buffer 1. Every rank sends to one other rank, and receives from one.
    """
    target, source = (rank + step) % size, (rank - step) % size
    return Plan((Send(target, 0, 0, sent),) * pieces, (Recv(source, 1, 0, received),) * pieces)


@lru_cache(maxsize=64)
def swaps(partner: int, times: int) -> Plan:
    """Return a plan to swap one element with a partner, so many times in a row.

    Elements go from buffer 0 to buffer 1. The next one is sent when that of the partner has arrived, so two swaps take
    one round trip.
    """
    return Plan(
        tuple(Send(partner, 0, 0, 1, after) for after in range(times)),
        tuple(Recv(partner, 1, 0, 1) for _ in range(times)),
    )


def swap_rounds(size: int, most: int) -> list[int]:
    """Return the rounds in which pairs swap, about `most` of them: in round k, rank i meets rank i xor k.

    So each rank is in one pair at a time; a rank whose partner does not exist rests.
    """
    rounds = range(1, 1 << (size - 1).bit_length())
    return list(rounds) if size - 1 <= most else [1 << bit for bit in range((size - 1).bit_length())]


if TYPE_CHECKING:
    from collections.abc import Sequence

    Speeds = Sequence[Sequence[float]]
    """Bytes per second by source and target."""


def steps(size: int) -> list[int]:
    """Return the rounds of a pass among so many ranks, each as the distance that it sends over."""
    if size - 1 <= MOST_ROUNDS:
        return list(range(1, size))
    near = {1 << bit for bit in range((size - 1).bit_length()) if 1 << bit < size}
    return sorted(near | {size - step for step in near})[:MOST_ROUNDS]


def sustained(times: Sequence[float], began: float, piece: int) -> float:
    """Return the bytes per second that a link keeps up, from when each piece of so many bytes had arrived.

    `began` is when the first byte can have arrived. A line that allows bursts is fast until the allowance is used up.
    If a transfer becomes slower on its way, the speed is that of its end.
    """
    pieces = len(times)
    whole = piece * pieces / max(times[-1] - min(began, times[0]), 1e-9)
    apart = LUMP * (times[-1] - times[0]) / (pieces - 1)
    ends = [at for at in range(SKIPPED - 1, pieces - 1) if times[at + 1] - times[at] > apart]
    last = max((at for at in ends if at < pieces - SKIPPED), default=-1)
    starts = [at for at in ends if last - at >= LEAST_TAIL]
    if not starts:
        return whole  # nearly all of it was read at once
    speeds = [piece * (last - first) / (times[last] - times[first]) for first in starts]
    tail, middle = min(speeds), speeds[0]
    return min(tail if tail * DROP < middle else middle, FLATTERY * whole)


class LinkMeasurement:
    """The passes of one measurement. Every rank calls the same methods with the same figures, and so sends alike."""

    def __init__(self, size: int, swaps: Sequence[int]) -> None:
        """`swaps` are the rounds before the first pass, in which pairs measure their round trips."""
        self._size = size
        self.rounds = steps(size)
        self._swaps, self._steps = list(swaps), list(self.rounds)
        """Rounds that the current pass still has."""
        self._passes: list[Speeds] = []
        self._rate = math.inf
        """The least bytes per second that an operation moved."""
        self._round = self._part = self._most = 0.0
        """Seconds that a round is planned to take, that this operation may be held up, and all operations together."""
        self.spent = 0.0
        """Agreed seconds of the operations before this one."""
        self._elapsed = 0.0
        self._has_moved = False
        """Whether a round has been run in this operation."""

    def begin(self, nbytes: float, seconds: float) -> None:
        """Begin the part of one operation, in which every rank has just sent so many bytes in so many seconds."""
        self._rate = min(self._rate, max(SLOWEST, nbytes / seconds))
        self._most = min(seconds, MOST_SECONDS)
        self._round = SHARES[len(self._passes)] * self._most / RISE / len(self.rounds)
        self._part = max(LEAST_PART_SECONDS, self._most / PARTS)
        self._elapsed, self._has_moved = 0.0, False

    def next_swap(self) -> int | None:
        """Return the next round of swaps of this operation; None if there is none, or if its time is over."""
        return None if not self._swaps or self._is_over() else self._swaps.pop(0)

    def next_step(self) -> int | None:
        """Return the next round of this pass; None if there is none, or if the time of this operation is over."""
        if self._swaps or not self._steps or self._is_over():
            return None
        return self._steps.pop(0)

    def _is_over(self) -> bool:
        """Tell whether the time of this operation is over; it never is before a round has been run."""
        if self._has_moved and not self._elapsed + self._round < self._part:
            return True
        self._has_moved = True
        return False

    def note(self, elapsed: float) -> None:
        """Note how long the measurement has held up this operation; agreed, and whatever a rank says."""
        self._elapsed = elapsed

    def end(self) -> None:
        """End the part of this operation."""
        self.spent += self._elapsed if 0 <= self._elapsed < math.inf else self._most

    @property
    def is_pass_over(self) -> bool:
        """Whether the ranks exchange their figures."""
        return not self._swaps and not self._steps

    def piece(self, source: int, target: int) -> int:
        """Return the bytes of a piece from slot to slot in this pass."""
        rate = self._rate
        if self._passes:
            rate = min(self._passes[-1][source][target], RISE * rate)
        return max(LEAST_PIECE, min(MOST_PIECE, int(rate * self._round) // MEASURED_PIECES))

    def take(self, speeds: Speeds) -> bool:
        """Take what all ranks have found in a pass; return False if it is not speeds, which ends the measurement."""
        size = self._size
        pairs = {(slot, (slot + step) % size) for step in self.rounds for slot in range(size)}
        if any(not (math.isfinite(speeds[i][j]) and speeds[i][j] > 0) for i, j in pairs):
            return False
        bounded = [
            [min(FASTEST, max(SLOWEST, speeds[i][j])) if (i, j) in pairs else SLOWEST for j in range(size)]
            for i in range(size)
        ]
        self._passes.append(bounded)
        self._steps = list(self.rounds)
        return True

    @property
    def is_done(self) -> bool:
        """Whether all passes are over."""
        return len(self._passes) == len(SHARES)

    def speeds(self) -> Speeds:
        """Return what counts, once it is done."""
        return self._passes[-1]
