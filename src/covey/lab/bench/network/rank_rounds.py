"""Measures one collective on all ranks of a group together."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.lab.bench.engines import CoveyEngine
from covey.lab.bench.messages import Measured, PrepareOrder
from covey.lab.bench.report import Measurement, Round
from covey.lab.bench.sweep import ROUND_ITERATIONS, Case, CaseGrid, Contender, iterations_for
from covey.lab.bench.worker import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.group.group import Group

CONTENDER: Final = Contender("covey", "covey")
SLOW_SECONDS: Final = 2.0
"""An operation that takes longer than this is measured once."""


@dataclass(frozen=True)
class RankRounds:
    """The rounds of one case as one rank measured them."""

    nanoseconds: tuple[tuple[int, ...], ...]
    """For each round, the time of each iteration."""
    cpu_seconds: tuple[float, ...]
    """For each round, the processor time of this rank."""


def measure_case(group: Group, grid: CaseGrid, case: Case) -> Measurement | None:
    """Measure a case; every rank calls it. Returns the measurement on rank 0, None elsewhere.

    The first operation checks its result. One that takes over SLOW_SECONDS is measured once, whatever `grid` says.
    """
    engine = CoveyEngine(group)
    round_of = prepare(engine, PrepareOrder(case.operation.name, case.elements, case.dtype), None)
    rounds = [round_of(1)]
    slowest = _slowest(group, rounds[0])
    if slowest <= SLOW_SECONDS:
        warm = round_of(iterations_for(slowest, grid.round_seconds / 4))
        iterations = iterations_for(_slowest(group, warm), grid.round_seconds)
        rounds = [round_of(iterations) for _ in range(grid.repetitions)]
    own = RankRounds(tuple(tuple(each.nanoseconds) for each in rounds), tuple(each.cpu_seconds for each in rounds))
    by_rank = group.gather_object(own, type=RankRounds)
    if by_rank is None:
        return None
    return Measurement(case, CONTENDER, as_rounds(by_rank), engine.lanes())


def as_rounds(by_rank: Sequence[RankRounds]) -> tuple[Round, ...]:
    """Return the rounds of all ranks; RemoteProtocolError if a rank sent other rounds than rank 0 has measured."""
    shape = [len(each) for each in by_rank[0].nanoseconds]
    for rank, told in enumerate(by_rank):
        is_equal = [len(each) for each in told.nanoseconds] == shape and len(told.cpu_seconds) == len(shape)
        if not is_equal or not shape or not all(0 < count <= ROUND_ITERATIONS for count in shape):
            raise RemoteProtocolError(f"rank {rank} sent other rounds of a case than rank 0 has measured")
    return tuple(
        Round(tuple(told.nanoseconds[at] for told in by_rank), tuple(told.cpu_seconds[at] for told in by_rank))
        for at in range(len(shape))
    )


def _slowest(group: Group, measured: Measured) -> float:
    """Return what an iteration takes on the slowest rank; equal on all ranks, so that all do as many iterations."""
    return float(group.all_reduce(statistics.median(measured.nanoseconds) / 1e9, "max"))
