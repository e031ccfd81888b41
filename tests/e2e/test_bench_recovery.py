"""`covey bench recovery` as people run it: real kills, real numbers, and nothing left behind."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

PHASES = ("detect", "freeze", "agree", "reconnect", "redo")


def measured(kills: int) -> dict[str, Any]:
    """Return the report of a bench, whose distribution is whole and whose results are right."""
    words = ["-n", "3", "--kills", str(kills), "--size", "4M", "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
    command = [sys.executable, "-m", "covey", "bench", "recovery", *words]
    done = forked.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["all_right"], len(report["kills"])) == (True, kills)
    for kill in report["kills"]:
        assert kill["survivors"] == 2
        assert kill["total_ms"] > 0
        assert {*kill["phases_ms"]} <= {*PHASES}
        assert {"detect", "freeze", "agree", "redo"} <= {*kill["phases_ms"]}
    summary = report["summary_ms"]
    assert all(row["p50"] <= row["p95"] <= row["max"] for row in summary.values())
    # Survivors whose lanes are open before their view is known have nothing to reconnect.
    seen = {phase for kill in report["kills"] for phase in kill["phases_ms"]}
    assert [*summary] == ["total", *(phase for phase in PHASES if phase in seen)]
    assert summary["total"]["max"] == max(round(kill["total_ms"], 3) for kill in report["kills"])
    return report


def test_two_kills_give_a_whole_distribution_of_right_results() -> None:
    measured(kills=2)


@pytest.mark.thorough
@pytest.mark.alone
def test_survivors_of_three_kills_go_on_within_two_seconds_and_their_phases_add_up() -> None:
    for kill in measured(kills=3)["kills"]:
        assert kill["total_ms"] < 2000
        # Told by two clocks and by another rank than the last one, perhaps: about the same, not the same.
        assert abs(sum(kill["phases_ms"].values()) - kill["total_ms"]) < 500


def test_nonsense_is_refused_before_anything_starts() -> None:
    command = [sys.executable, "-m", "covey", "bench", "recovery", "--lanes", "pigeon"]
    done = forked.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 2
    assert "unknown lane 'pigeon'; choose from shm, unix, tcp, secure" in done.stderr
