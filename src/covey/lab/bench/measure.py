"""The interleaved measurement: every contender is warm, and their rounds take turns in shuffled order."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.lab.bench.processes import RankProcesses
from covey.lab.bench.report import Measurement, Round
from covey.lab.bench.sweep import Case, Sweep, iterations_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from covey.lab.bench.messages import Measured


@dataclass(frozen=True, slots=True)
class Starting:
    """The contenders' processes are about to start, `ranks` for each."""

    ranks: int


@dataclass(frozen=True, slots=True)
class Started:
    """All ranks of all contenders are up, with these libraries."""

    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Advanced:
    """`rounds` more rounds of `case` are over: 0 when it begins, then 1 at a time."""

    case: Case
    rounds: int


@dataclass(frozen=True, slots=True)
class CaseDone:
    """Every contender has been measured in one case."""

    case: Case
    measurements: list[Measurement]


Event = Starting | Started | Advanced | CaseDone


def measure(sweep: Sweep, *, seed: int = 0) -> Generator[Event, None, None]:
    """Run the sweep and yield what happens; closing the iterator ends every process it started.

    Raises:
        RankFailedError: a rank crashed, raised, or computed a wrong result.
        DeadlineError: a rank did not answer in time.
    """
    rng = random.Random(seed)
    for ranks in sweep.ranks:
        yield Starting(ranks)
        with ExitStack() as stack:
            started = [
                stack.enter_context(RankProcesses(contender, ranks, busy=sweep.busy))
                for contender in sweep.contenders()
            ]
            for processes in started:
                processes.await_hello()
            yield Started({name: version for each in started for name, version in each.versions.items()})
            for case in sweep.cases(ranks):
                yield from _measure_case(sweep, case, started, rng)


def _measure_case(sweep: Sweep, case: Case, started: Sequence[RankProcesses], rng: random.Random) -> Iterator[Event]:
    yield Advanced(case, 0)
    iterations = {}
    for processes in started:
        processes.prepare(case)
        if processes.contender.engine == "covey" and processes.contender.lane != processes.lanes:
            raise ConfigError(
                f"{processes.contender.name} fell back to {processes.lanes}; "
                f"leave {processes.contender.lane} out of --lanes"
            )
        iterations[processes.contender] = _warm_up(processes, case, sweep.round_seconds)
    rounds: dict[RankProcesses, list[Round]] = {processes: [] for processes in started}
    for _ in range(sweep.repetitions):
        for processes in rng.sample(started, len(started)):
            rounds[processes].append(_as_round(processes.run(case, iterations[processes.contender])))
            yield Advanced(case, 1)
    yield CaseDone(
        case,
        [Measurement(case, processes.contender, tuple(rounds[processes]), processes.lanes) for processes in started],
    )


def _warm_up(processes: RankProcesses, case: Case, round_seconds: float) -> int:
    """Return how many iterations fill a round, by a cold try and then a warm one of a quarter of a round."""
    iterations = 2
    for budget in (round_seconds / 4, round_seconds):
        seconds = statistics.median(_as_round(processes.run(case, iterations)).seconds)
        iterations = iterations_for(seconds, budget)
    return iterations


def _as_round(answers: Sequence[Measured]) -> Round:
    return Round(
        nanoseconds=tuple(tuple(answer.nanoseconds) for answer in answers),
        cpu_seconds=tuple(answer.cpu_seconds for answer in answers),
    )
