"""How fast machines train together, in each way: predicted from the time of a step, the bytes and the line.

Samples of all ways do not count the same: between two outer steps of DiLoCo the members drift apart. `worth` says how
much of its samples counts, so that ways can be compared by `useful`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_BUCKET: Final = 1 << 20
"""Bytes of the first bucket of DistributedDataParallel, which is sent while the backward pass goes on."""
BUCKET: Final = 25 << 20
"""Bytes of its further buckets."""
BACKWARD: Final = 2 / 3
"""The part of a step's computation that is its backward pass: gradients of inputs and of parameters, each as much work
as the forward pass."""
FRAGMENTS: Final = 4
PERIODS: Final = (4, 6, 8, 12, 16, 20, 24, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256, 320, 400, 512)
"""The periods of DiLoCo that are considered."""
DILOCO_DRIFT: Final = 0.012
"""How many more samples DiLoCo needs for the same loss with two members and a period of one step ..."""
DRIFT_GROWTH: Final = 0.6
"""... and the power of the period with which that grows: fitted to the search of docs/guides/training-together.md."""
CABLE: Final = 1.25e8
"""Bytes per second of an ordinary network cable: 1 Gbit/s."""
CLEARLY: Final = 1.05
"""What is gained has to be more than this, or it is not worth a word: figures are not more exact."""


class Learner(NamedTuple):
    """A machine that trains."""

    step_seconds: float
    """What it computes in a step, without any exchange."""
    samples: float
    """How many samples it trains on in a step."""


class SlowestLine(NamedTuple):
    """What the slowest member sends to the others, while it receives as much."""

    bytes_per_second: float
    round_trip: float = 0.0


class CodecCost(NamedTuple):
    """What a codec makes of gradients."""

    name: str
    ratio: float
    """Bytes on the line for each byte of float32."""
    seconds_per_byte: float = 0.0
    """Seconds for a byte of float32, to encode it and to decode what arrives."""


EXACT: Final = CodecCost("", 1.0)
STEP_CODECS: Final = (EXACT, CodecCost("bf16", 0.5), CodecCost("int8", 0.254))
"""What is considered for the gradients of every step."""
OUTER_CODECS: Final = (EXACT, CodecCost("int8", 0.254), CodecCost("int4", 0.129))
"""What is considered for the changes of a period, which are larger against the rounding."""


class TrainingWay(NamedTuple):
    """A way to train, and what it is predicted to bring."""

    kind: str
    """`alone`, `ddp` or `diloco`."""
    codec: str
    """The name of the codec; "" for exact gradients."""
    every: int
    """Steps between two exchanges of the same parameter."""
    step_seconds: float
    """Seconds of a step of the slowest member; with own pace, each has its own."""
    samples_per_second: float
    worth: float
    """The part of the samples that counts, from 0 to 1."""

    @property
    def useful(self) -> float:
        """Samples per second that count."""
        return self.samples_per_second * self.worth

    @property
    def text(self) -> str:
        """The way in words."""
        if self.kind == "alone":
            return "one machine alone"
        codec = f" {self.codec}" if self.codec else ""
        return f"DDP{codec}" if self.kind == "ddp" else f"DiLoCo{codec} every {self.every} steps"


def exchange_seconds(members: int, nbytes: float, line: SlowestLine) -> float:
    """Return how long a mean over the members takes: each sends and receives 2 (n - 1) / n of it, in as many rounds."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) / members * nbytes / line.bytes_per_second + (members - 1) * line.round_trip


def alone(members: Sequence[Learner]) -> TrainingWay:
    """Predict the fastest machine without the others."""
    best = max(members, key=lambda member: member.samples / member.step_seconds)
    return TrainingWay("alone", "", 1, best.step_seconds, best.samples / best.step_seconds, 1.0)


def ddp(members: Sequence[Learner], nbytes: float, line: SlowestLine, codec: CodecCost = EXACT) -> TrainingWay:
    """Predict DistributedDataParallel: buckets are sent one after another, as soon as the slowest member has them."""
    slowest = max(member.step_seconds for member in members)
    begin, length = slowest * (1 - BACKWARD), slowest * BACKWARD
    sent = ended = 0.0
    while sent < nbytes:
        bucket = min(nbytes - sent, BUCKET if sent else FIRST_BUCKET)
        sent += bucket
        ready = begin + length * sent / nbytes
        taken = exchange_seconds(len(members), bucket * codec.ratio, line) + bucket * codec.seconds_per_byte
        ended = max(ended, ready) + taken
    step = max(slowest, ended)
    return TrainingWay("ddp", codec.name, 1, step, sum(member.samples for member in members) / step, 1.0)


def diloco(
    members: Sequence[Learner], nbytes: float, line: SlowestLine, codec: CodecCost = EXACT, every: int = 0
) -> TrainingWay:
    """Predict DiLoCo with overlap in the pace of each member; `every` 0 is the best period.

    The period counts steps of the slowest member.
    """
    if not every:
        return max((diloco(members, nbytes, line, codec, period) for period in PERIODS), key=lambda way: way.useful)
    slowest = max(member.step_seconds for member in members)
    taken = exchange_seconds(len(members), nbytes * codec.ratio, line) + (FRAGMENTS - 1) * line.round_trip
    period = max(every * slowest + nbytes * codec.seconds_per_byte, taken)
    samples = sum(member.samples * every * slowest / member.step_seconds for member in members)
    return TrainingWay("diloco", codec.name, every, period / every, samples / period, worth_of(every, len(members)))


def worth_of(every: int, members: int) -> float:
    """Return the part of the samples that counts with this period."""
    return 1 / (1 + DILOCO_DRIFT * (members - 1) * math.pow(every, DRIFT_GROWTH)) if members > 1 else 1.0


def ways(members: Sequence[Learner], nbytes: float, line: SlowestLine) -> list[TrainingWay]:
    """Return every way with its prediction; `nbytes` is what float32 gradients take.

    The first one is the best: the most exact one of those that are about as fast as the fastest. The others follow by
    their speed.
    """
    found = [alone(members)]
    if len(members) > 1:
        found += [ddp(members, nbytes, line, codec) for codec in STEP_CODECS]
        found += [diloco(members, nbytes, line, codec) for codec in OUTER_CODECS]
    fastest = max(way.useful for way in found)
    best = next(way for way in found if way.useful * CLEARLY >= fastest)
    return [best, *sorted((way for way in found if way is not best), key=lambda way: -way.useful)]


def verdict(used: TrainingWay, found: Sequence[TrainingWay]) -> str:
    """Say what is wrong with the way that is used, if another one is clearly better; "" if none is.

    If one machine alone is faster, the sentence begins with that.
    """
    single = next(way for way in found if way.kind == "alone")
    better = max((way for way in found if way.kind != "alone"), key=lambda way: way.useful, default=single)
    if better.useful < single.useful:
        better = single
    text = ""
    if used.kind != "alone" and used.useful < single.useful:
        text = f"training together is {single.useful / used.useful:.1f} times slower than one machine alone; "
    if better.useful < used.useful * CLEARLY or better.text == used.text:
        return text.removesuffix("; ")
    return f"{text}{better.text} would be {better.useful / used.useful:.1f} times faster"


def with_cable(members: Sequence[Learner], nbytes: float, line: SlowestLine, used: TrainingWay) -> float:
    """Return how many times faster the best way would be over a cable; 1 if the line is as fast as one already."""
    if line.bytes_per_second * CLEARLY >= CABLE or len(members) < 2:
        return 1.0
    wired = SlowestLine(CABLE, min(line.round_trip, 1e-3))
    return max(1.0, ways(members, nbytes, wired)[0].useful / used.useful)


def table(
    used: TrainingWay, members: Sequence[Learner], nbytes: float, line: SlowestLine, unit: str = "batches"
) -> list[str]:
    """Return the lines of a table of all ways beside the one that is used, the best first, and what would help.

    `unit` is what the samples of members are.
    """
    rows = [("way", "step", f"{unit}/s", "that count", "beside now")]
    for way in ways(members, nbytes, line):
        step, speed, useful = (f"{way.step_seconds * 1e3:.4g} ms", f"{way.samples_per_second:.4g}", f"{way.useful:.4g}")
        rows.append((way.text, step, speed, useful, f"{way.useful / used.useful:.2g}x"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    gain = with_cable(members, nbytes, line, used)
    return [*lines, f"over a cable of 1 Gbit/s: {gain:.1f}x"] if gain > CLEARLY else lines
