"""`covey bench metrics`: measures what counting and recording add to an operation, and how long reading takes."""

from __future__ import annotations

import timeit
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.native import native
from covey.base.numbers import OPERATIONS
from covey.cli.layout import Column
from covey.cli.terminal import FittedTable
from covey.runtime.counters import GroupCounters, process
from covey.runtime.metrics.flight import flight
from covey.runtime.metrics.samples import samples
from covey.runtime.recorder import RECORDS, PythonRecorder, make_recorder
from covey.wire.reports import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.numbers import Seat

OPERATION: Final = OPERATIONS.index("all_reduce")
ROUND_OPERATIONS: Final = 200
"""Operations of a round."""
RECORDING_ROUNDS: Final = 2000
SAMPLE_READS: Final = 50


class Cost(NamedTuple):
    """What something costs."""

    what: str
    seconds: float
    limit: float | None
    """What it should cost at most, in seconds; None if there is no limit."""


def recording_seconds(recorder: Any, rounds: int = RECORDING_ROUNDS) -> float:
    """Return what a recorder adds to one operation: the fastest of many rounds, without the call itself."""

    def operation() -> None:
        recorder.begin(5, OPERATION)
        if isinstance(recorder, PythonRecorder):  # the compiled executor counts these itself
            recorder.began_phase()
            recorder.sent(1, 4)
            recorder.received(1, 4)
        recorder.end(0, False)

    return _fastest(operation, ROUND_OPERATIONS, rounds) - _fastest(lambda: None, ROUND_OPERATIONS, rounds)


def _fastest(function: Callable[[], Any], number: int, rounds: int) -> float:
    return min(timeit.repeat(function, number=number, repeat=rounds)) / number


def measure(rounds: int = RECORDING_ROUNDS) -> list[Cost]:
    """Measure the recorders of this machine, and reading the numbers of a group with a full ring."""
    found = []
    if native().module is not None:
        seconds = recording_seconds(make_recorder(2, is_native=True), rounds)
        found.append(Cost("an operation, compiled", seconds, 200e-9))
    found.append(Cost("an operation, in Python", recording_seconds(make_recorder(2, is_native=False), rounds), 1e-6))
    members: tuple[Seat, ...] = (0, 1)  # type: ignore[assignment]
    group = GroupCounters("bench", 0, members, is_native=False)
    for sequence in range(1, RECORDS + 1):
        group.recorder.begin(sequence, OPERATION)
        group.recorder.sent(1, sequence)
        group.recorder.end(0, False)
    process.register(group)
    found.append(Cost("reading the metrics", _fastest(samples, 1, SAMPLE_READS), None))
    found.append(
        Cost(f"reading {RECORDS:,} operations", _fastest(lambda: encode(flight([group])), 1, SAMPLE_READS), None)
    )
    group.is_over = True
    return found


def report(costs: list[Cost]) -> FittedTable:
    """Return the table to print."""
    return FittedTable(
        [
            Column("COST OF", [cost.what for cost in costs]),
            Column("TIME", [_time(cost.seconds) for cost in costs], is_right=True),
            Column("LIMIT", ["" if cost.limit is None else _time(cost.limit) for cost in costs], is_right=True),
        ]
    )


def _time(seconds: float) -> str:
    return f"{1e9 * seconds:.0f} ns" if seconds < 1e-5 else f"{1e3 * seconds:.2f} ms"
