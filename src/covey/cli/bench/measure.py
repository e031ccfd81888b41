"""The interleaved measurement: every contender is warm, and their rounds take turns in shuffled order."""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.cli.bench.crew import Crew
from covey.cli.bench.report import Measurement, Round
from covey.cli.bench.sweep import Case, Sweep, iterations_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from covey.cli.bench.messages import Measured


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
    """So many more rounds of `case` are over: 0 when it begins, then 1 at a time."""

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
            crews = [stack.enter_context(Crew(contender, ranks, busy=sweep.busy)) for contender in sweep.contenders()]
            for crew in crews:
                crew.greet()
            yield Started({name: version for crew in crews for name, version in crew.versions.items()})
            for case in sweep.cases(ranks):
                yield from _measure_case(sweep, case, crews, rng)


def _measure_case(sweep: Sweep, case: Case, crews: Sequence[Crew], rng: random.Random) -> Iterator[Event]:
    yield Advanced(case, 0)
    iterations = {}
    for crew in crews:
        crew.prepare(case)
        if crew.contender.engine == "covey" and crew.contender.lane != crew.lanes:
            raise ConfigError(
                f"{crew.contender.name} fell back to {crew.lanes}; leave {crew.contender.lane} out of --lanes"
            )
        iterations[crew.contender] = _warm_up(crew, case, sweep.round_seconds)
    rounds: dict[Crew, list[Round]] = {crew: [] for crew in crews}
    for _ in range(sweep.repetitions):
        for crew in rng.sample(crews, len(crews)):
            rounds[crew].append(_as_round(crew.run(case, iterations[crew.contender])))
            yield Advanced(case, 1)
    yield CaseDone(case, [Measurement(case, crew.contender, tuple(rounds[crew]), crew.lanes) for crew in crews])


def _warm_up(crew: Crew, case: Case, round_seconds: float) -> int:
    """Return the iterations of a round, from a first guess (cold) and a second (warm, over a quarter of a round)."""
    iterations = 2
    for budget in (round_seconds / 4, round_seconds):
        seconds = statistics.median(_as_round(crew.run(case, iterations)).seconds)
        iterations = iterations_for(seconds, budget)
    return iterations


def _as_round(answers: Sequence[Measured]) -> Round:
    return Round(
        nanoseconds=tuple(tuple(answer.nanoseconds) for answer in answers),
        cpu_seconds=tuple(answer.cpu_seconds for answer in answers),
    )
