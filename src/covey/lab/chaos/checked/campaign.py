"""Performs checked runs one after another, and prints their results."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.lab.chaos.checked.checked_run import CheckedRun, check_again
from covey.lab.chaos.checked.hosts import require_hosts
from covey.lab.chaos.checked.operations import MOST_RANKS
from covey.lab.chaos.checked.plan import draw
from covey.lab.chaos.cutting import require_cutting

if TYPE_CHECKING:
    from covey.lab.chaos.checked.checked_run import Result

SHOWN: Final = 12
"""How many problems of one run are shown."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """How many runs, of which kind; checked when built."""

    seed: int | None
    runs: int
    processes: int | None
    hosts: int | None
    kinds: tuple[str, ...]
    every: float
    count: int
    lanes: str
    as_json: bool

    def __post_init__(self) -> None:
        if self.hosts is not None:
            require_hosts()
        if self.processes is not None:
            least, size = (2 if self.hosts is None else 1), self.processes * (self.hosts or 1)
            if self.processes < least or size > MOST_RANKS:
                raise ConfigError(f"--check is for {least} to {MOST_RANKS} processes in all; got {size}")
        if not self.every > 0:
            raise ConfigError(f"--every {self.every:g} must be a number of seconds above 0")
        if not self.kinds or "cut" in self.kinds:
            require_cutting()

    def perform(self) -> int:
        """Perform all runs; return the exit code: 0 if every run passed its checks."""
        first = random.SystemRandom().randrange(1 << 31) if self.seed is None else self.seed
        results = []
        for number in range(self.runs):
            scene = draw(
                first + number,
                processes=self.processes,
                hosts=self.hosts,
                kinds=self.kinds,
                every=self.every,
                count=self.count,
                lanes=self.lanes,
            )
            where = "on this machine" if scene.is_one_host else f"on {len(scene.processes)} hosts"
            self._say(f"seed {scene.seed}: {scene.size} processes {where}, {len(scene.troubles)} faults")
            results.append(CheckedRun(scene, self._say).perform())
            if not self.as_json:
                tell(results[-1])
        if self.as_json:
            print(json.dumps({"right": all(r.is_right for r in results), "runs": list(map(as_object, results))}))
        elif self.runs > 1:
            figures = sum((result.figures for result in results), Counter[str]())
            right = sum(result.is_right for result in results)
            print(f"{right} of {self.runs} runs passed: {_figures(figures)}")
        return 0 if all(result.is_right for result in results) else 1

    def _say(self, text: str) -> None:
        """Show progress on standard error, on a terminal or if nothing else is printed."""
        if self.runs == 1 or sys.stderr.isatty():
            print(f"covey: {text}", file=sys.stderr, flush=True)


def check_records(folder: str, *, as_json: bool) -> int:
    """Check the records that an earlier run left in `folder`; return the exit code."""
    if not os.path.isdir(folder):
        raise ConfigError(f"there is no folder {folder} with the records of a run")
    try:
        result = check_again(folder)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is not the folder of a checked run: {error.filename} is missing") from error
    if as_json:
        print(json.dumps({"right": result.is_right, "runs": [as_object(result)]}))
    else:
        tell(result)
    return 0 if result.is_right else 1


def tell(result: Result) -> None:
    """Print the result of a run."""
    verdict = "passed" if result.is_right else "FAILED"
    what = f"seed {result.seed}: {verdict} in {result.seconds:.0f} s" if result.seed >= 0 else verdict
    print(f"{what}: {_figures(result.figures)}")
    for note in result.notes[:SHOWN]:
        print(f"  note: {note}")
    if not result.is_right:
        for problem in result.problems[:SHOWN]:
            print(f"  {problem}")
        if len(result.problems) > SHOWN:
            print(f"  and {len(result.problems) - SHOWN} more")
        if result.faults:
            print("  what was done:", *result.faults, sep="\n    ")
        print(
            f"  what the processes wrote is in {result.folder}; `covey chaos --records {result.folder}` checks it again"
        )
    sys.stdout.flush()


def as_object(result: Result) -> dict[str, Any]:
    """Return a result as plain values."""
    return {
        "seed": result.seed,
        "right": result.is_right,
        "seconds": round(result.seconds, 3),
        "problems": result.problems,
        "notes": result.notes,
        "faults": result.faults,
        "figures": dict(result.figures),
        "folder": "" if result.is_right else result.folder,
    }


def _figures(figures: Counter[str]) -> str:
    shown = ("operations", "operations after a loss", "raised", "messages", "generations", "processes", "evicted")
    return ", ".join(f"{figures[name]} {name}" for name in shown)
