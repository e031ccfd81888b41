"""`covey demo` as a newcomer runs it: real processes, short."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import RankFailedError
from covey.cli.demo import crew
from covey.cli.demo.reports import Joined, Round

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

COVEY = [sys.executable, "-m", "covey"]
DEADLINE = 90.0
UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def seed() -> Iterator[str]:
    """A seed that nobody else uses, so that the workers of this test can be told from all other processes."""
    seed = str(int.from_bytes(os.urandom(4)))
    yield seed
    for pid in workers(seed):
        os.kill(pid, signal.SIGKILL)


def workers(seed: str) -> list[int]:
    """The demo's workers with this seed that are still there."""
    listing = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True, check=True)
    lines = [line for line in listing.stdout.splitlines() if f"--seed={seed}" in line and "demo.worker" in line]
    return [int(line.split()[0]) for line in lines]


def covey_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COVEY, "demo", *arguments], capture_output=True, text=True, timeout=DEADLINE)


def test_two_ranks_learn_agree_and_leave_no_process(seed: str) -> None:
    done = covey_demo("--ranks", "2", "--steps", "100", "--seconds", "60", "--seed", seed, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    outcome = json.loads(done.stdout)
    assert outcome["ranks"] == 2
    assert outcome["identical"] is True
    assert outcome["team"]["steps"] == outcome["one_rank_same_steps"]["steps"] == 100
    assert outcome["one_rank_same_samples"]["steps"] == 200
    assert outcome["one_rank_same_samples"]["samples"] == outcome["team"]["samples"]
    assert outcome["team"]["held_out_loss"] < outcome["first_loss"] - 1
    assert outcome["lane"]
    assert len({rank["pid"] for rank in outcome["per_rank"]}) == 2
    assert len({rank["batch_loss"] for rank in outcome["per_rank"]}) == 2, "ranks must draw different batches"
    assert workers(seed) == []


def test_the_same_seed_gives_the_same_model_to_the_last_digit(seed: str) -> None:
    arguments = ("--ranks", "3", "--steps", "20", "--seconds", "60", "--seed", seed, "--json")
    one, again = (json.loads(covey_demo(*arguments).stdout) for _ in range(2))
    assert one["team"]["held_out_loss"] == again["team"]["held_out_loss"]
    assert one["writing"] == again["writing"]


def test_plain_output_is_lines_of_progress_and_a_summary_when_time_is_over(seed: str) -> None:
    done = covey_demo("--ranks", "2", "--steps", "100000", "--seconds", "1", "--seed", seed)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "held-out loss" in done.stdout
    assert "one rank, same steps" in done.stdout
    assert "parameters bit-identical on all ranks: yes" in done.stdout
    assert workers(seed) == []


def test_ctrl_c_ends_the_demo_with_130_and_leaves_no_process(seed: str) -> None:
    command = [*COVEY, "demo", "--ranks", "2", "--steps", "100000", "--seconds", "60", "--seed", seed, "--plain"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=UNBUFFERED,
        # A shell's background job ignores SIGINT, and so would everything that the tests start from there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "held-out loss" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 130, errors
        assert errors == ""
        assert workers(seed) == []
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE)


def train_and_kill(victim: int, seed: str) -> None:
    """Train with three ranks without end, and kill one of them once it is at work."""
    pids: dict[int, int] = {}
    with contextlib.closing(crew.reports(3, rounds=100_000, seconds=60, seed=int(seed))) as reports:
        for rank, report in reports:
            if isinstance(report, Joined):
                pids[rank] = report.pid
            elif isinstance(report, Round) and victim in pids:
                os.kill(pids.pop(victim), signal.SIGKILL)


def test_a_rank_that_is_killed_ends_the_run_with_an_error_that_names_it(seed: str) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 .*SIGKILL") as caught:
        train_and_kill(1, seed)
    assert caught.value.rank == 1
    assert workers(seed) == []
