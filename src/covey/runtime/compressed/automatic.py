"""`compress="auto"`: the codec of each operation, from measurements that all ranks share.

Arrays of about the same size are one class. The first operations of a class are sent as they are, and timed. Before
the next ones, at calls with fixed numbers, the ranks exchange their times and the speeds of their codecs, and choose:
all from the same figures, so all alike. A codec stays chosen only if it turns out to be faster than none was.

The rank that enters an operation last waits for no other, so the shortest time of all ranks is that of the transfer.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.compress.choice import ERRORS, SHARED, Speed, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from covey.compress.choice import Auto
    from covey.compress.codec import Codec
    from covey.runtime.collectives.attempt import Attempt

SAMPLE_RUNS: Final = 3
"""How often a codec is run to measure it; the fastest run counts, since nothing makes one faster than it is."""
SAMPLE_ELEMENTS: Final = 1 << 16
"""The array on which the speed of a codec is measured: a quarter of a megabyte."""
PLAIN_CALLS: Final = 2
"""Calls of a class that are sent as they are, and timed. The first one may have to open connections."""
CHOOSING, CHECKING = PLAIN_CALLS + 1, PLAIN_CALLS + 2
"""Calls of a class, counted from 1, before which ranks exchange figures: to choose, and to compare what came of it."""
REVIEW: Final = 128
"""After so many calls of a class all of this begins again: links change."""
SELDOM: Final = 32
"""Where no codec helped, each review comes after twice as many calls as the one before, up to so many times REVIEW."""
UNKNOWN: Final = np.inf
LATENCY: Final = 1e-4
"""Seconds of a small transfer; arrays that are worth compressing take much longer, so a guess is enough."""


class Choice(NamedTuple):
    """What was chosen for an operation."""

    codec: Codec | None
    reason: str


FIRST: Final = Choice(None, "none: the time without a codec is measured first")


class Size(NamedTuple):
    """Of an array: the number of its elements, and the bytes of one."""

    elements: int
    itemsize: int


class _Class:
    """The operations on arrays of about one size."""

    def __init__(self) -> None:
        self.calls, self.period = 0, REVIEW
        """Calls since the last review, and how many there are between two."""
        self.choice = FIRST
        self.plain = self.coded = UNKNOWN
        """The shortest times on this rank without a codec and with the chosen one."""

    def count(self, calls: int) -> None:
        """Note that so many calls have succeeded."""
        self.calls += calls
        if self.calls >= self.period:
            self.period = REVIEW if self.choice.codec is not None else min(2 * self.period, SELDOM * REVIEW)
            self.calls = 0


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
        choice = known.choice if call > PLAIN_CALLS else FIRST
        if call in (CHOOSING, CHECKING):
            choice = _reviewed(attempt, auto, size, known, is_first=call == CHOOSING)
        began = time.perf_counter()
        perform(choice.codec)
        seconds = time.perf_counter() - began

        def succeeded() -> None:
            known.choice = choice
            known.count(1)
            has_lanes, self._attempt = attempt.number == self._attempt, attempt.number
            if call <= PLAIN_CALLS:
                known.plain = seconds if call == 1 else min(known.plain, seconds)
                known.coded = UNKNOWN
            elif choice.codec is not None and has_lanes:  # else it has opened connections, after a loss
                known.coded = min(known.coded, seconds)

        return choice, succeeded

    def skip_plain(self, auto: Auto, size: Size) -> tuple[int, str]:
        """Return how many operations of this size will be sent as they are, and why, and count them as done.

        Call it when an operation of this size has ended and none is on its way, so that all ranks get the same number.
        """
        known = self._classes.get(_kind(auto, size))
        if known is None or known.choice.codec is not None:
            return 0, ""
        count = known.period - known.calls if known.calls >= CHECKING else 0
        known.count(count)
        return count, known.choice.reason


def _kind(auto: Auto, size: Size) -> tuple[Auto, int, int]:
    return auto, size.elements.bit_length(), size.itemsize


def _nothing() -> None:
    pass


def _reviewed(attempt: Attempt, auto: Auto, size: Size, known: _Class, *, is_first: bool) -> Choice:
    """Exchange figures with all ranks, and return what they choose."""
    codecs = [codec for codec, error in ERRORS.items() if error <= auto.max_error]
    speeds = [speed for codec in codecs for speed in codec_speed(codec)]
    figures = np.array([known.plain, known.coded, *(1 / speed for speed in speeds)], np.float64)
    figures[2:] *= -1  # the least of all is the slowest
    attempt.all_reduce(figures, "min")
    if not np.isfinite(figures[2:]).all() or not figures[0] > 0:  # every rank has these figures, and returns here
        return Choice(None, "none: what a rank has measured is not a time")
    plain, coded = float(figures[0]), float(figures[1])
    if not is_first:
        if known.choice.codec is None or coded < plain or coded == UNKNOWN:
            return known.choice
        return Choice(None, f"none: {1e3 * coded:.3g} ms with {known.choice.codec}, {1e3 * plain:.3g} ms without")
    moved = 2 * (attempt.size - 1) / attempt.size * size.elements * size.itemsize
    slowest = [1 / -float(figure) for figure in figures[2:]]
    measured = {codec: Speed(*slowest[2 * at : 2 * at + 2]) for at, codec in enumerate(codecs)}
    rate = moved / max(plain, 1e-9)
    return Choice(
        *choose(4 * size.elements, attempt.size, rate, LATENCY, measured, auto.max_error, itemsize=size.itemsize)
    )


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
