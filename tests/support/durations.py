"""At the end of a run of tests, print the time of each folder and the slowest tests.

Two times are counted: wall-clock time, and processor time of the test's process and of the children it has waited for.
The first is large and the second small where a test only waits.
"""

from __future__ import annotations

import json
import os
import resource
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_SHOWN = 20
FEWEST_TESTS = 100
"""Runs of fewer tests print nothing: a user that runs one file did not ask."""
_USED = "processor seconds"


@dataclass
class Spent:
    """The time of one or more tests, in seconds."""

    tests: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def add(self, other: Spent) -> None:
        self.tests += other.tests
        self.wall += other.wall
        self.cpu += other.cpu


class Durations:
    """Measures tests where they run, and adds up their reports where the result is printed."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = defaultdict(Spent)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_START] = _processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        now = _processor_seconds()
        item.user_properties[:] = [(_USED, now - item.stash[_START])]
        item.stash[_START] = now
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu = next((float(str(value)) for name, value in report.user_properties if name == _USED), 0.0)
        self.spent[report.nodeid].add(Spent(report.when == "setup", report.duration, cpu))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if path := os.environ.get("TEST_TIMES"):
            lines = json.loads(Path(path).read_text()) if Path(path).exists() else {}
            lines |= {nodeid: [round(spent.wall, 3), round(spent.cpu, 3)] for nodeid, spent in self.spent.items()}
            Path(path).write_text(json.dumps(lines, indent=0))
        if sum(spent.tests for spent in self.spent.values()) < FEWEST_TESTS:
            return
        terminalreporter.section("time of each folder, and the slowest tests")
        for line in summary(self.spent):
            terminalreporter.write_line(line)


def summary(spent: dict[str, Spent]) -> list[str]:
    """Return a table of folders, then one of the slowest tests."""
    folders: dict[str, Spent] = defaultdict(Spent)
    for nodeid, each in spent.items():
        parts = nodeid.partition("::")[0].split("/")
        folders["/".join(parts[:2])].add(each)
    lines = [f"{'tests':>6} {'wall':>8} {'processor':>10}"]
    for name, each in sorted(folders.items(), key=lambda pair: -pair[1].wall):
        lines.append(f"{each.tests:6} {each.wall:6.1f} s {each.cpu:8.1f} s  {name}")
    slowest = sorted(spent.items(), key=lambda pair: -pair[1].wall)[:MOST_SHOWN]
    return lines + [""] + [f"{each.wall:15.1f} s {each.cpu:8.1f} s  {nodeid}" for nodeid, each in slowest]


def _processor_seconds() -> float:
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


_START = pytest.StashKey[float]()
