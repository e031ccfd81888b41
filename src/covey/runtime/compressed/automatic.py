"""`compress="auto"`: the codec of each operation, from measurements that all ranks share.

Arrays of about the same size are one class. The first operations of a class are sent as they are, and timed. Before
the next ones, at calls with fixed numbers, the ranks exchange their times and the speeds of their codecs, and choose:
all from the same figures, so all alike. A codec stays chosen only if it turns out to be faster than none.

Lines that allow bursts are fast at first, so the first times may say little. Hence the ranks look several times what a
class takes with what was chosen, and time again what they gave up; the later times count.

The rank that enters an operation last waits for no other, so the shortest time of all ranks is that of the transfer.
"""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.compress.choice import CODEC_ERRORS, LEAST_SAVED_SHARE, SHARED, Speed, choose, codec_seconds
from covey.runtime.collectives.planner import TIMED_PLAIN_CALLS
from covey.runtime.collectives.size_class import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from covey.compress.choice import Auto
    from covey.compress.codec import Codec
    from covey.runtime.collectives.attempt import Attempt

SAMPLE_RUNS: Final = 3
"""How often a codec is run to measure it; the fastest run counts, since nothing makes one faster than it is."""
SAMPLE_ELEMENTS: Final = 1 << 16
"""The array on which the speed of a codec is measured: a quarter of a megabyte."""
REVIEWS: Final = (TIMED_PLAIN_CALLS + 1, TIMED_PLAIN_CALLS + 2, TIMED_PLAIN_CALLS + 4, TIMED_PLAIN_CALLS + 6)
"""Calls of a class, counted from 1, before which ranks exchange figures: to choose, and to compare what came of it."""
WORKING: Final = 0.5
"""If a codec works for more than this part of the time, little is left for the transfer. It may have been chosen only
because a machine stood still in a call without it, so such calls are timed again."""
REVIEW: Final = 128
"""After so many calls of a class all of this begins again: links change."""
SELDOM: Final = 32
"""Where no codec helped, each review comes after twice as many calls as the one before, up to so many times REVIEW."""
LATENCY: Final = 1e-4
"""Seconds of a small transfer; arrays that are worth compressing take much longer, so a guess is enough."""


class Choice(NamedTuple):
    """What was chosen for an operation."""

    codec: Codec | None
    reason: str


FIRST_CHOICE: Final = Choice(None, "none: the time without a codec is measured first")


class Size(NamedTuple):
    """Of an array: the number of its elements, and the bytes of one."""

    elements: int
    itemsize: int


class CodecStanding(NamedTuple):
    """What the ranks hold of a class, in common."""

    choice: Choice = FIRST_CHOICE
    plain: float = UNMEASURED
    """Seconds without a codec, when it was timed last."""
    tried: Codec | None = None
    coded: float = UNMEASURED
    """The codec that was tried, and its seconds."""
    is_confirmed: bool = False
    """Whether the time without a codec was measured again after that with one."""


class _Class:
    """The operations on arrays of about one size."""

    def __init__(self) -> None:
        self.calls, self.period = 0, REVIEW
        """Calls since the last review, and how many there are between two."""
        self.standing = CodecStanding()
        self.shortest = UNMEASURED
        """The shortest time on this rank since the ranks last exchanged figures."""

    def count(self, calls: int) -> None:
        """Note that so many calls have succeeded."""
        self.calls += calls
        if self.calls >= self.period:
            is_plain = self.standing.choice.codec is None
            self.period = min(2 * self.period, SELDOM * REVIEW) if is_plain else REVIEW
            self.calls, self.standing, self.shortest = 0, CodecStanding(self.standing.choice), UNMEASURED


class Tuner:
    """The choices of one group. Every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        self._classes: dict[tuple[Auto, int, int], _Class] = {}
        self._attempt = -1
        """The number of the attempt in which the last operation succeeded."""

    def reduce(
        self, attempt: Attempt, auto: Auto, size: Size, perform: Callable[[Codec | None], None]
    ) -> tuple[Choice, Callable[[], None]]:
        """Call `perform` with the codec to use; return the choice, and what to call when the operation succeeded."""
        if attempt.lane_family == "ring":
            perform(None)
            return Choice(None, SHARED), _nothing
        kind = _kind(auto, size)
        known = self._classes.get(kind)
        if known is None:
            known = self._classes[kind] = _Class()
        call = known.calls + 1
        standing = known.standing
        if call in REVIEWS:
            standing = _reviewed(attempt, auto, size, standing, known.shortest)
        choice = standing.choice if call > TIMED_PLAIN_CALLS else FIRST_CHOICE
        began, planned = time.perf_counter(), attempt.planning_seconds
        perform(choice.codec)
        seconds = time.perf_counter() - began - (attempt.planning_seconds - planned)

        def succeeded() -> None:
            has_lanes, self._attempt = attempt.number == self._attempt, attempt.number
            if call in REVIEWS:
                known.shortest = UNMEASURED
            if has_lanes or call == 1:  # else it has opened connections, after a loss
                known.shortest = seconds if call == TIMED_PLAIN_CALLS else min(known.shortest, seconds)
            known.standing = standing._replace(choice=choice)
            known.count(1)

        return choice, succeeded

    def skip_plain(self, auto: Auto, size: Size) -> tuple[int, str]:
        """Return how many operations of this size will be sent as they are, and why, and count them as done.

        Call it when an operation of this size has ended and none is on its way, so that all ranks get the same number.
        """
        known = self._classes.get(_kind(auto, size))
        if known is None or known.standing.choice.codec is not None:
            return 0, ""
        reason = known.standing.choice.reason
        count = known.period - known.calls if known.calls >= REVIEWS[-1] else 0
        known.count(count)
        return count, reason


def _kind(auto: Auto, size: Size) -> tuple[Auto, int, int]:
    return auto, size.elements.bit_length(), size.itemsize


def _nothing() -> None:
    pass


def _reviewed(attempt: Attempt, auto: Auto, size: Size, before: CodecStanding, shortest: float) -> CodecStanding:
    """Exchange figures with all ranks, and return what they hold from now on.

    `shortest` is what the class took on this rank since the last exchange, with what was chosen there.
    """
    codecs = [codec for codec, error in CODEC_ERRORS.items() if error <= auto.max_error]
    speeds = [speed for codec in codecs for speed in codec_speed(codec)]
    figures = np.array([shortest, *(1 / speed for speed in speeds)], np.float64)
    figures[1:] *= -1  # the least of all is the slowest
    attempt.all_reduce(figures, "min")
    if figures[0] == UNMEASURED:  # no call was timed: connections were opened, after a loss
        return before
    if not np.isfinite(figures).all() or not figures[0] > 0:  # every rank has these figures, and returns here
        return CodecStanding(Choice(None, "none: what a rank has measured is not a time"))
    slowest = [1 / -float(figure) for figure in figures[1:]]
    measured = {codec: Speed(*slowest[2 * at : 2 * at + 2]) for at, codec in enumerate(codecs)}
    return judged(attempt.size, auto, size, before, float(figures[0]), measured)


def judged(
    ranks: int, auto: Auto, size: Size, before: CodecStanding, seconds: float, speeds: Mapping[Codec, Speed]
) -> CodecStanding:
    """Return what follows from the time that a class took since the last review, with what was chosen there. Pure."""
    used, nbytes = before.choice.codec, 4 * size.elements
    moved = 2 * (ranks - 1) / ranks * size.elements * size.itemsize
    if used is not None:
        now = before._replace(tried=used, coded=seconds)
        if seconds >= before.plain:
            return now._replace(choice=Choice(None, f"none: {_compared(now)}"))
        work = codec_seconds(used, nbytes, ranks, math.inf, 0.0, speeds[used]) if used in speeds else 0.0
        if work > WORKING * seconds and not before.is_confirmed:
            why = f"none: it is timed again, because {used} itself takes much of {1e3 * seconds:.3g} ms"
            return now._replace(choice=Choice(None, why))
        return now
    now = before._replace(plain=seconds)
    if before.tried is None:
        rate = moved / max(seconds, 1e-9)
        chosen = choose(nbytes, ranks, rate, LATENCY, speeds, auto.max_error, itemsize=size.itemsize)
        return now._replace(choice=Choice(*chosen))
    now = now._replace(is_confirmed=True)
    if before.coded <= (1 - LEAST_SAVED_SHARE) * seconds:
        return now._replace(choice=Choice(before.tried, f"{before.tried}: {_compared(now)}"))
    return now._replace(choice=Choice(None, f"none: {_compared(now)}"))


def _compared(standing: CodecStanding) -> str:
    return f"{1e3 * standing.coded:.3g} ms with {standing.tried}, {1e3 * standing.plain:.3g} ms without"


@functools.cache
def codec_speed(codec: Codec) -> Speed:
    """Return how fast this process runs a codec."""
    x: NDArray[np.float32] = np.random.default_rng(0).standard_normal(SAMPLE_ELEMENTS, np.float32)
    wire = np.empty(codec.wire_bytes(x.size), np.uint8)
    rates = []
    for run in (functools.partial(codec.encode, x, wire), functools.partial(codec.decode_add, wire, x)):
        run()
        times = []
        for _ in range(SAMPLE_RUNS):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        rates.append(x.nbytes / max(min(times), 1e-9))
    return Speed(*rates)
