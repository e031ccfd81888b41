"""Which way to train is best now: measured by all ranks together, so that all of them find the same."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.plan import training
from covey.runtime.group.internals import tell_of_training
from covey.torch.training.averaging import RankFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.group.group import Group

logger = logging.getLogger("covey")

RATE_SECONDS: Final = 0.15
"""A probe of the line that took at least so long measures its sustained rate, not what a queue of it swallows."""
FIRST_PROBE: Final = 1 << 16
"""Bytes of the first probe; each further one has four times as many, up to those of the gradients."""
WORTH_A_CHANGE: Final = 1.1
"""Another way has to be so many times faster than the one in use: changing costs an exchange, and figures vary."""

_NAMES: Final = [
    *(("ddp", codec.name) for codec in training.STEP_CODECS),
    *(("diloco", codec.name) for codec in training.OUTER_CODECS),
]
"""The kinds and codecs of all ways, the most exact first."""


class MachinesAndLine(NamedTuple):
    """What all ranks know alike."""

    figures: RankFigures
    """`step_seconds` are seconds for each sample here."""
    line: training.SlowestLine

    @property
    def speeds(self) -> dict[int, float]:
        """Samples per second by rank, of those that know theirs; the others have the average."""
        seconds = {rank: self.figures.step_seconds[rank] for rank in self.figures.contributors}
        known = [1 / each for each in seconds.values() if each > 0]
        average = sum(known) / len(known) if known else 1.0
        return {rank: 1 / each if each > 0 else average for rank, each in seconds.items()}


def measure(group: Group, sample_seconds: float, nbytes: int) -> MachinesAndLine:
    """Gather how fast the ranks are, and measure the line with sums of up to `nbytes`. Every rank calls it."""
    row = np.zeros(group.size)
    row[group.rank] = sample_seconds
    group.all_reduce(row)
    there = tuple(group.contributors)
    figures = RankFigures(there, row.tolist(), [0] * group.size)
    trips = []
    for _ in range(3):
        began = time.perf_counter()
        group.all_reduce(np.zeros(2))
        trips.append(time.perf_counter() - began)
    agreed = np.array([min(trips), 0.0])
    size, rate = FIRST_PROBE, 1.0
    while True:
        probe = np.ones(max(1, min(size, nbytes) // 4), np.float32)
        began = time.perf_counter()
        group.all_reduce(probe)
        agreed[1] = time.perf_counter() - began
        group.all_reduce(agreed, "max")
        rate = 2 * (len(there) - 1) / len(there) * probe.nbytes / max(1e-9, float(agreed[1]))
        if agreed[1] >= RATE_SECONDS or size >= nbytes:
            break
        size *= 4
    rounds = max(1, len(there) - 1)
    return MachinesAndLine(figures, training.SlowestLine(max(1.0, rate), float(agreed[0]) / rounds))


def possible_ways(found: MachinesAndLine, batch: int, nbytes: int, *, is_exact: bool) -> list[training.TrainingWay]:
    """Return the ways that keep what was promised, with their predictions; the best first.

    In DDP, ranks share a batch by their speeds; in DiLoCo each takes its part of a batch at its own pace.
    """
    speeds = found.speeds
    total = sum(speeds.values())
    sharing = [training.Learner(batch / total, batch * speed / total) for speed in speeds.values()]
    codecs = training.STEP_CODECS[:1] if is_exact else training.STEP_CODECS
    ways = [training.ddp(sharing, nbytes, found.line, codec) for codec in codecs]
    if not is_exact:
        members = own_pace(found, batch)
        ways += [training.diloco(members, nbytes, found.line, codec) for codec in training.OUTER_CODECS]
    fastest = max(way.useful for way in ways)
    best = next(way for way in ways if way.useful * training.CLEARLY >= fastest)
    return [best, *sorted((way for way in ways if way is not best), key=lambda way: -way.useful)]


def own_pace(found: MachinesAndLine, batch: int) -> Sequence[training.Learner]:
    """Return the members as DiLoCo has them: each takes steps of its part of the batch."""
    part = batch / len(found.speeds)
    return [training.Learner(part / speed, part) for speed in found.speeds.values()]


def choose(
    found: MachinesAndLine, batch: int, nbytes: int, now: training.TrainingWay | None, *, is_exact: bool
) -> training.TrainingWay:
    """Return the best way; the one in use, with a new prediction, unless another one is clearly better.

    A more exact one that is about as fast is better.
    """
    ways = possible_ways(found, batch, nbytes, is_exact=is_exact)
    same = next((way for way in ways if now is not None and (way.kind, way.codec) == (now.kind, now.codec)), None)
    if same is not None and ways[0].useful < WORTH_A_CHANGE * same.useful:
        is_more_exact = _NAMES.index(ways[0][:2]) < _NAMES.index(same[:2])
        return ways[0] if is_more_exact else same
    return ways[0]


def agree(group: Group, found: training.TrainingWay) -> training.TrainingWay:
    """Return what the lowest rank has found, on all ranks: the way, and how long a step takes in it.

    Processors may round predictions differently, and the ranks must not choose by them apart.
    """
    while True:
        row = np.zeros(3)
        if group.rank == min(group.contributors):
            row[:] = _NAMES.index(found[:2]) + 1, found.every, found.step_seconds
        group.all_reduce(row)
        if row[0]:  # else that rank was lost, and the next one says what it has found
            kind, codec = _NAMES[int(row[0]) - 1]
            return found._replace(kind=kind, codec=codec, every=int(row[1]), step_seconds=float(row[2]))


def alone_is_better(found: MachinesAndLine, used: training.TrainingWay, batch: int) -> float:
    """Return how many times faster the best machine alone would be: with batches of its own part."""
    return training.alone(own_pace(found, batch)).useful / used.useful


def predicted(way: training.TrainingWay) -> str:
    """Return what a way is predicted to bring, in words."""
    return f"{way.text}: {way.samples_per_second:.4g} samples/s, {way.useful:.4g} that count"


def tell(group: Group, way: training.TrainingWay, found: MachinesAndLine, batch: int) -> None:
    """Tell the run which way its ranks use from now on, and the user if one machine alone would be faster."""
    text = (
        f"{len(found.speeds)} ranks train together by {way.text}; "
        f"all_reduces at {found.line.bytes_per_second * 8 / 1e6:.3g} Mbit/s"
    )
    gain = alone_is_better(found, way, batch)
    if gain > training.CLEARLY:
        text += f". One machine alone would be {gain:.1f} times faster"
        logger.warning("%s", text)
    tell_of_training(group, text)
