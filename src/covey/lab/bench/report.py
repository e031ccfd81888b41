"""Derives statistics, ratios, tables and JSON from raw rounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.text import Text

from covey.cli.layout import Column, Piece, lay_out
from covey.lab.bench.sweep import COMPARED_LANES, Case, Contender, Sweep, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BENCH_FORMAT: Final = 1
"""Version of the JSON layout."""
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one contender, measured by all its ranks."""

    nanoseconds: tuple[tuple[int, ...], ...]
    """For each rank, the time of each iteration."""
    cpu_seconds: tuple[float, ...]
    """For each rank, its processor time for all iterations together."""

    @property
    def seconds(self) -> list[float]:
        """The latency of each iteration: that of its slowest rank."""
        return [max(taken) / 1e9 for taken in zip(*self.nanoseconds, strict=True)]


@dataclass(frozen=True)
class Measurement:
    """One contender in one case."""

    case: Case
    contender: Contender
    rounds: tuple[Round, ...]
    lanes: str = ""
    """The kinds of lane used, if the library reports them."""

    @cached_property
    def seconds(self) -> list[float]:
        """The latencies of all iterations of all rounds."""
        return [seconds for turn in self.rounds for seconds in turn.seconds]

    @cached_property
    def p50(self) -> float:
        return float(np.percentile(self.seconds, 50))

    @cached_property
    def p99(self) -> float:
        return float(np.percentile(self.seconds, 99))

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the operation's buffer by median time, per second; 0 if it has none."""
        return self.case.bytes / self.p50

    @property
    def bus_bandwidth(self) -> float:
        """Algorithm bandwidth times the operation's factor: comparable between rank counts and operations."""
        return self.algorithm_bandwidth * self.case.operation.bus_factor(self.case.ranks)

    @property
    def cpu_per_gib(self) -> float | None:
        """Processor seconds of all ranks together for each GiB of the operation's buffer; None if it has none."""
        total = len(self.seconds) * self.case.bytes
        return sum(sum(turn.cpu_seconds) for turn in self.rounds) * GIB / total if total else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster covey is than an opponent in one case: the opponent's median over covey's."""

    case: Case
    contender: Contender
    opponent: Contender
    value: float


def ratios(measurements: Iterable[Measurement]) -> list[Ratio]:
    """Compare every covey lane with its opponents (COMPARED_LANES), case by case."""
    measurements = list(measurements)
    return [
        Ratio(ours.case, ours.contender, theirs.contender, theirs.p50 / ours.p50)
        for ours in measurements
        for theirs in measurements
        if ours.case == theirs.case
        and ours.contender.engine == "covey"
        and ours.contender.lane in COMPARED_LANES.get(theirs.contender.name, ())
    ]


def table(measurements: Sequence[Measurement], width: int | None) -> Text:
    """Lay out the measurements of one operation and one number of ranks, sizes in order.

    If `width` characters are too few, columns that follow from others are left out first; JSON has them all.
    """
    case = measurements[0].case
    found = {(r.case, r.contender, r.opponent.name): r.value for r in ratios(measurements)}
    opponents = list(dict.fromkeys(m.contender.name for m in measurements if m.contender.engine != "covey"))
    opponents = [name for name in opponents if any(key[2] == name for key in found)]
    title = f"{case.operation.name}, {case.ranks} ranks, {case.dtype}"
    cases = [row.case for row in measurements]
    sizes = [(size_text(each), "bold") if at == 0 or cases[at - 1] != each else "" for at, each in enumerate(cases)]
    bandwidths = list(zip(*map(_bandwidth_cells, measurements), strict=True))
    columns = [
        Column("size", sizes, is_right=True),
        Column("contender", [(row.contender.name, "cyan" * (row.contender.engine == "covey")) for row in measurements]),
        Column("p50", [format_seconds(row.p50) for row in measurements], is_right=True),
        Column("p99", [format_seconds(row.p99) for row in measurements], leave_out=5, is_right=True),
        Column("alg GB/s", bandwidths[0], leave_out=6, is_right=True),
        Column("bus GB/s", bandwidths[1], leave_out=4, is_right=True),
        Column("CPU s/GiB", bandwidths[2], leave_out=7, is_right=True),
        *(
            Column(
                f"vs {name}",
                [_ratio_cell(found.get((row.case, row.contender, name))) for row in measurements],
                leave_out=number,
                is_right=True,
            )
            for number, name in enumerate(opponents)
        ),
    ]
    lines = [Text.assemble(*line) for line in lay_out(columns, width, "bold")]
    return Text("\n").join([Text(title, "bold"), *lines, Text()])


def size_text(case: Case) -> str:
    return format_bytes(case.size_bytes) if case.bytes else "-"


def line(case: Case, measurements: Sequence[Measurement]) -> str:
    """Return the medians of a case in one line of plain text."""
    return f"{case}: " + ", ".join(f"{row.contender.name} {format_seconds(row.p50)}" for row in measurements)


def as_json(
    sweep: Sweep, measurements: Sequence[Measurement], machine: dict[str, Any], versions: dict[str, str]
) -> dict[str, Any]:
    """Return everything that was measured, down to each iteration of each rank, as plain values."""
    return {
        "format": BENCH_FORMAT,
        "machine": machine,
        "versions": versions,
        "settings": {
            "operations": list(sweep.operations),
            "sizes": list(sweep.sizes),
            "ranks": list(sweep.ranks),
            "lanes": list(sweep.lanes),
            "against": list(sweep.opponents),
            "dtype": sweep.dtype,
            "repetitions": sweep.repetitions,
            "round_seconds": sweep.round_seconds,
            "busy": sweep.busy,
            "through_torch": sweep.through_torch,
        },
        "results": [result_json(row) for row in measurements],
        "ratios": [
            _cell(ratio.case)
            | {"contender": ratio.contender.name, "opponent": ratio.opponent.name, "times_faster": ratio.value}
            for ratio in ratios(measurements)
        ],
    }


def result_json(row: Measurement) -> dict[str, Any]:
    """Return one measurement, down to each iteration of each rank, as plain values."""
    return _cell(row.case) | {
        "contender": row.contender.name,
        "lanes": row.lanes,
        "iterations": len(row.seconds),
        "p50_seconds": row.p50,
        "p99_seconds": row.p99,
        "algorithm_bytes_per_second": row.algorithm_bandwidth,
        "bus_bytes_per_second": row.bus_bandwidth,
        "cpu_seconds_per_gib": row.cpu_per_gib,
        "rounds": [
            {"nanoseconds_by_rank": turn.nanoseconds, "cpu_seconds_by_rank": turn.cpu_seconds} for turn in row.rounds
        ],
    }


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits and the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-9)} ns"


def _cell(case: Case) -> dict[str, Any]:
    return {
        "operation": case.operation.name,
        "ranks": case.ranks,
        "dtype": case.dtype,
        "size_bytes": case.size_bytes,
        "bytes": case.bytes,
    }


def three_digits(value: float) -> str:
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _bandwidth_cells(row: Measurement) -> list[str]:
    if row.cpu_per_gib is None:
        return ["-", "-", "-"]
    return [three_digits(v) for v in (row.algorithm_bandwidth / 1e9, row.bus_bandwidth / 1e9, row.cpu_per_gib)]


def _ratio_cell(value: float | None) -> Piece:
    if value is None:
        return "", ""
    style = "bold green" if value >= 2 else "green" if value >= 1 else "yellow" if value >= 0.8 else "red"
    return f"{three_digits(value)}x", style
