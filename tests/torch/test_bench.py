"""`covey bench --torch` and `covey bench ddp` as people run them: both sides are right, and told apart."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.lab.bench.train import measure
from covey.lab.bench.train_courses import TrainCase
from covey.testing.netns import permitted

if TYPE_CHECKING:
    from pathlib import Path


def bench(*arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
    command = [sys.executable, "-m", "covey", "bench", *arguments]
    done = forked.run(
        command, popen=forked.TorchPopen, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("op", ["all_reduce", pytest.param("all", marks=pytest.mark.thorough)])
def test_every_operation_is_right_through_torch(op: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    bench(
        "--torch", f"--op={op}", "--sizes=4K", "--lanes=shm", "--against=gloo", "--quick", "--reps=1", f"--json={file}"
    )
    report = json.loads(file.read_text())
    assert report["settings"]["through_torch"]
    assert {"covey", "torch"} <= {*report["versions"]}
    assert {(row["contender"], row["lanes"]) for row in report["results"]} == {("covey shm", "shm"), ("gloo", "")}


@pytest.mark.thorough
def test_ddp_trains_to_the_same_parameters_on_both_sides() -> None:
    report = json.loads(bench("ddp", "--parameters=1", "--rounds=1", "--lanes=tcp", "--json"))
    assert {name: len(seconds) for name, seconds in report["seconds"].items()} == {
        "no communication": 1,
        "covey": 3,
        "gloo": 3,
    }


@pytest.mark.thorough
def test_training_is_compared_over_a_shaped_line(tmp_path: Path) -> None:
    file, picture = tmp_path / "courses.json", tmp_path / "losses.svg"
    ways = "alone,bound,gloo,ddp int8,diloco,together"
    bench("train", "--quick", "--models=lora", f"--ways={ways}", f"--add={file}", f"--plot={picture}")
    courses = json.loads(file.read_text())
    assert [(each["way"], each["line"]) for each in courses] == [
        ("alone", 0), ("bound", 0), ("gloo", 100), ("ddp int8", 100), ("diloco", 100), ("together", 100),
    ]  # fmt: skip
    assert all(each["points"] for each in courses)
    assert "polyline" in picture.read_text()
    before = file.read_bytes()
    shown = bench("train", "--quick", "--models=lora", f"--ways={ways}", f"--add={file}")  # nothing is missing
    assert "train_together" in shown
    assert "min left" not in shown
    assert file.read_bytes() == before
    assert "train_together" in bench("train", "--show", f"--add={file}")


@pytest.mark.thorough
def test_a_machine_is_lost_and_back_while_three_uneven_ones_train() -> None:
    if reason := permitted():
        pytest.skip(reason)
    case = TrainCase("lora", "loss", "together", 100, 0, 3, 12.0)
    (course,) = measure([case], lambda _: None, pytest.fail)
    assert course.case == case
    assert course.points[-1][0] > 6
