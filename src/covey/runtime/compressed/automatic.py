"""`compress="auto"`: the codec of each operation, from measurements that all ranks share.

Arrays of about the same size are one class. The first operation of a class is sent as it is, and timed. Before the next
ones, at calls with fixed numbers, the ranks exchange their times and the speeds of their codecs, and choose: all from
the same figures, so all alike. A codec stays chosen only if it turns out to be faster than none was.

The rank that enters an operation last waits for no other, so the shortest time of all ranks is that of the transfer.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.base.arithmetic import reduction
from covey.compress.choice import ERRORS, Speed, choose
from covey.plan import choose as plans

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from covey.compress.choice import Auto
    from covey.compress.codec import Codec
    from covey.runtime.collectives.attempt import Attempt

SAMPLE_ELEMENTS: Final = 1 << 16
"""The array on which the speed of a codec is measured: a quarter of a megabyte."""
EARLY: Final = frozenset({2, 3})
"""Calls of a class, counted from 1, before which ranks exchange figures: the first times without and with a codec."""
REVIEW: Final = 128
"""After so many calls of a class all of this begins again: links change."""
UNKNOWN: Final = np.inf
LATENCY: Final = 1e-4
"""Seconds of a small transfer; arrays that are worth compressing take much longer, so a guess is enough."""


class Choice(NamedTuple):
    """What was chosen for an operation."""

    codec: Codec | None
    reason: str


class _Class:
    """The operations on arrays of about one size."""

    def __init__(self) -> None:
        self.calls = 0
        self.choice = Choice(None, "none: the time without a codec is measured first")
        self.plain = self.coded = UNKNOWN
        """The shortest times on this rank without a codec and with the chosen one."""


class Tuner:
    """The choices of one group. Every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        self._classes: dict[tuple[Auto, int], _Class] = {}

    def reduce(
        self, attempt: Attempt, auto: Auto, nbytes: int, perform: Callable[[Codec | None], None]
    ) -> tuple[Choice, Callable[[], None]]:
        """Call `perform` with the codec to use; return the choice, and what to call when the operation succeeded."""
        if attempt.lane_family == "ring":
            perform(None)
            return Choice(None, "none: the ranks share memory"), _nothing
        known = self._classes.setdefault((auto, nbytes.bit_length()), _Class())
        call = known.calls % REVIEW + 1
        choice = known.choice if call > 1 else _Class().choice
        if call in EARLY:
            choice = _reviewed(attempt, auto, nbytes, known, is_first=call == 2)
        began = time.perf_counter()
        perform(choice.codec)
        seconds = time.perf_counter() - began

        def succeeded() -> None:
            known.calls += 1
            known.choice = choice
            if call == 1:
                known.plain, known.coded = seconds, UNKNOWN
            elif choice.codec is not None:
                known.coded = min(known.coded, seconds)

        return choice, succeeded


def _nothing() -> None:
    pass


def _reviewed(attempt: Attempt, auto: Auto, nbytes: int, known: _Class, *, is_first: bool) -> Choice:
    """Exchange figures with all ranks, and return what they choose."""
    codecs = [codec for codec, error in ERRORS.items() if error <= auto.max_error]
    speeds = [speed for codec in codecs for speed in _speed(codec)]
    figures = np.array([known.plain, known.coded, *(1 / speed for speed in speeds)], np.float64)
    figures[2:] *= -1  # the least of all is the slowest
    plan = plans.all_reduce(attempt.slot, attempt.size, figures.size, 8, attempt.lane_family, None)
    attempt.execute(plan, [figures], reduction("min", figures.dtype))
    if not np.isfinite(figures[2:]).all() or not figures[0] > 0:  # every rank has these figures, and returns here
        return Choice(None, "none: what a rank has measured is not a time")
    plain, coded = float(figures[0]), float(figures[1])
    if not is_first:
        if known.choice.codec is None or coded < plain:
            return known.choice
        return Choice(None, f"none: {1e3 * coded:.3g} ms with {known.choice.codec}, {1e3 * plain:.3g} ms without")
    moved = 2 * (attempt.size - 1) / attempt.size * nbytes
    slowest = [1 / -float(figure) for figure in figures[2:]]
    measured = {codec: Speed(*slowest[2 * at : 2 * at + 2]) for at, codec in enumerate(codecs)}
    return Choice(*choose(nbytes, attempt.size, moved / max(plain, 1e-9), LATENCY, measured, auto.max_error))


@functools.cache
def _speed(codec: Codec) -> Speed:
    """Return how fast this process runs a codec."""
    x: NDArray[np.float32] = np.random.default_rng(0).standard_normal(SAMPLE_ELEMENTS, np.float32)
    wire = np.empty(codec.wire_bytes(x.size), np.uint8)
    rates = []
    for run in (functools.partial(codec.encode, x, wire), functools.partial(codec.decode_add, wire, x)):
        run()
        began = time.perf_counter()
        run()
        rates.append(x.nbytes / max(time.perf_counter() - began, 1e-9))
    return Speed(*rates)
