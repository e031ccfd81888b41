"""`covey bench recovery` as people run it: real kills, real numbers, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.support.waiting import DEADLINE


@pytest.mark.alone
def test_three_kills_give_a_whole_distribution_of_right_results() -> None:
    command = [sys.executable, "-m", "covey", "bench", "recovery", "-n", "3", "--kills", "3", "--size", "4M", "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (report["all_right"], len(report["kills"])) == (True, 3)
    for kill in report["kills"]:
        assert kill["survivors"] == 2
        assert 0 < kill["total_ms"] < 2000
        assert {*kill["phases_ms"]} <= {"detect", "freeze", "agree", "reconnect", "redo"}
        assert {"detect", "freeze", "agree", "redo"} <= {*kill["phases_ms"]}
        # Told by two clocks and by another rank than the last one, perhaps: about the same, not the same.
        assert abs(sum(kill["phases_ms"].values()) - kill["total_ms"]) < 500
    summary = report["summary_ms"]
    assert all(row["p50"] <= row["p95"] <= row["max"] for row in summary.values())
    # Survivors whose lanes are open before their view is known have nothing to reconnect.
    seen = {phase for kill in report["kills"] for phase in kill["phases_ms"]}
    phases = ("detect", "freeze", "agree", "reconnect", "redo")
    assert [*summary] == ["total", *(phase for phase in phases if phase in seen)]
    assert summary["total"]["max"] == max(round(kill["total_ms"], 3) for kill in report["kills"])


def test_nonsense_is_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "covey", "bench", "recovery", "--lanes", "pigeon"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    assert "unknown lane 'pigeon'; choose from shm, unix, tcp, secure" in done.stderr
