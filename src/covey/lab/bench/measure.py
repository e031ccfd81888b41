"""The interleaved measurement: every contender is warm, and their rounds take turns in shuffled order.

And what goes with it: facts about the machine that the reader of a benchmark needs, and a bar that shows the progress.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from covey.base.errors import ConfigError
from covey.cli.terminal import is_lively
from covey.lab.bench.processes import RankProcesses
from covey.lab.bench.report import Measurement, Round
from covey.lab.bench.sweep import Case, Sweep, iterations_for

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rich.console import Console

    from covey.lab.bench.processes import Measured


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


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on: processor, kernel, interpreter, load, and the clock's date."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg(),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_model() -> str:
    """Return the processor's name from the kernel, or else from Python."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text(errors="replace").splitlines():
            key, _, value = text.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


@contextmanager
def counting(total: int, console: Console) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that shows a text and adds finished steps; it does nothing without a terminal."""
    if not is_lively(console):
        yield lambda text, steps: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=16), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, steps: bar.update(task, description=text, advance=steps)
