"""A run of four ranks, watched through a kill, a stop, a wait and a slow rank: the overview names who and why."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.watch import collector as collecting
from covey.watch.actions import Actions
from covey.watch.collector import Collector

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from covey.watch.overview import RunSeen

PROGRAM = """
import os, sys, time
import numpy as np, covey

group = covey.join(on_loss="continue")
folder = sys.argv[1]
for step in range(10**9):
    while group.rank == 1 and os.path.exists(folder + "/hold"):
        time.sleep(0.01)
    time.sleep(0.01 + 0.06 * (group.rank == 2 and os.path.exists(folder + "/slow")))
    group.all_reduce(np.full(10, group.rank + step, np.float32))
    group.report(step=step, loss=1 / (step + 1 + group.rank), samples=8)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[bytes], Collector]]:
    monkeypatch.setattr(collecting, "COLLECT_EVERY", 0.1)
    (tmp_path / "watched.py").write_text(PROGRAM)
    argv = [sys.executable, "-m", "covey", "run", "-n", "4", str(tmp_path / "watched.py"), str(tmp_path)]
    keeper = forked.Popen(argv, stdout=forked.DEVNULL, stderr=forked.DEVNULL)
    try:
        with Collector.of_this_machine(str(keeper.pid)) as collector:
            yield keeper, collector
    finally:
        keeper.kill()
        keeper.wait(DEADLINE)


def shown(collector: Collector, is_so: Callable[[RunSeen], bool]) -> RunSeen:
    """Wait until the run is shown like this."""
    until, serial, run = time.monotonic() + DEADLINE, 0, None
    while time.monotonic() < until:
        overview = collector.next_after(serial, 1.0)
        if overview is not None:
            serial = overview.serial
            for run in overview.runs:
                if is_so(run):
                    return run
    raise AssertionError(f"not in time; last: {run}")


def test_a_run_is_watched_through_a_wait_a_slow_rank_a_stop_a_kill_and_its_end(
    tmp_path: Path, started: tuple[subprocess.Popen[bytes], Collector]
) -> None:
    keeper, collector = started
    run = shown(
        collector, lambda run: run.step is not None and run.step > 5 and run.ranks[0].sent_per_second is not None
    )
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]
    assert run.reported_by == "mean of 4 ranks"
    assert run.compute_seconds is not None
    (tmp_path / "hold").touch()
    run = shown(collector, lambda run: run.ranks[1].state == "late" and len(run.ranks[0].waits_for) == 1)
    assert run.ranks[0].waits_for == (1,)
    assert "behind; " in run.sentence.text
    assert run.sentence.text.startswith("Rank 1 ")
    (tmp_path / "hold").unlink()
    (tmp_path / "slow").touch()
    run = shown(collector, lambda run: run.sentence.text.startswith("Rank 2 is slower than the others"))
    (tmp_path / "slow").unlink()
    os.kill(run.ranks[3].pid, signal.SIGSTOP)
    run = shown(collector, lambda run: run.ranks[3].state == "lost")
    assert "stopped" in run.ranks[3].reason
    os.kill(run.ranks[2].pid, signal.SIGKILL)
    run = shown(collector, lambda run: run.ranks[2].state == "lost" and "Rank 2" in run.sentence.text)
    assert "its process has exited" in run.ranks[2].reason
    before = run.step
    run = shown(collector, lambda run: run.step is not None and before is not None and run.step > before)
    moments = collector.history(run.id)
    assert next(moment.step for moment in moments if moment.step is not None) == 0, "it begins where the run did"
    assert {event.kind for event in run.happenings} >= {"lost"}
    assert "asked to end" in Actions(collector, "from a test").stop(run.id)
    shown(collector, lambda run: run.state in ("ended", "failed"))
    keeper.wait(DEADLINE)
