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
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import RankFailedError
from covey.lab.demo import processes
from covey.lab.demo.reports import JoinedReport, KilledReport, RoundReport, StartedReport
from covey.lab.demo.worker import DEMO_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COVEY = [sys.executable, "-m", "covey"]
UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def seed() -> Iterator[str]:
    """A seed that no other test uses, so that the workers of this test can be told from all other processes."""
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
    return forked.run([*COVEY, "demo", *arguments], capture_output=True, text=True, timeout=DEADLINE)


def test_a_node_is_killed_the_others_go_on_and_it_comes_back_and_nothing_is_left_behind(
    seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_REPORTS", str(tmp_path / "reports"))
    done = covey_demo("--ranks", "3", "--steps", "80", "--seconds", "1000", "--seed", seed, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert {each["rank"] for each in reports} == {0, 1, 2}
    assert {"loss", "samples"} == reports[-1]["values"].keys()
    assert done.stderr == ""
    outcome = json.loads(done.stdout)
    assert all(outcome["checks"].values())
    assert len(outcome["checks"]) == 4
    (loss,), (back,) = outcome["losses"], outcome["returns"]
    assert loss["nodes"] == [1]
    assert loss["went_on"] == [0, 2]
    assert list(loss["phases"]) == ["detect", "freeze", "agree", "reconnect", "redo"]
    assert loss["milliseconds"] > 0
    assert list(loss["phases"].values()) == sorted(loss["phases"].values())
    assert (back["node"], back["rank"], back["donors"]) == (1, 2, [0, 1])
    assert back["bytes"] > 3 * outcome["gradient_bytes"] - 1000, "parameters and both means of the optimizer"
    team, alone = outcome["team"], outcome["undisturbed"]
    assert team["steps"] == alone["steps"] == 80
    away = back["step"] - loss["step"] + (loss["during"] == "step")
    assert alone["samples"] == 80 * 3 * DEMO_BATCH
    assert alone["samples"] - team["samples"] == away * DEMO_BATCH
    assert team["held_out_loss"] == pytest.approx(alone["held_out_loss"], abs=outcome["tolerance"])
    assert team["held_out_loss"] < outcome["first_loss"] - 1.5
    assert outcome["identical"] is True
    assert outcome["lane"]
    assert len({rank["pid"] for rank in outcome["per_rank"]}) == 3
    assert workers(seed) == []


@pytest.mark.thorough
def test_undisturbed_nodes_end_where_one_does_and_the_same_seed_gives_the_same_model(seed: str) -> None:
    arguments = ("--ranks", "3", "--steps", "20", "--seconds", "1000", "--seed", seed, "--no-loss", "--json")
    one, again = (json.loads(covey_demo(*arguments).stdout) for _ in range(2))
    assert one["losses"] == one["returns"] == []
    assert one["difference"] < one["tolerance"] == 0.001
    assert one["team"]["samples"] == one["undisturbed"]["samples"] == 20 * 3 * DEMO_BATCH
    assert len({rank["batch_loss"] for rank in one["per_rank"]}) == 3, "nodes must draw different batches"
    assert one["digest"] == again["digest"] != ""
    assert one["writing"] == again["writing"]


def test_plain_output_tells_the_story_even_if_time_is_over_before_the_node_is_back(seed: str) -> None:
    done = covey_demo("--ranks", "2", "--steps", "100000", "--seconds", "0.5", "--seed", seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    begin, lost = ["2 nodes read Alice", "is killed: SIGKILL"], ["1 continues without node 1: the "]
    back = ["node 1 is started again", "node 1 is back as rank 1, with "]
    end = [
        "one node alone now takes the batches of all",
        "parameters bit-identical on all nodes: yes",
        "node 1 was lost and came back: yes",
    ]
    for words in (begin + lost + end, begin + back + end):  # on a busy machine it is started before the other goes on
        places = [done.stdout.find(part) for part in words]
        assert -1 not in places, done.stdout
        assert places == sorted(places)
    assert workers(seed) == []


def test_ctrl_c_ends_the_demo_with_130_and_leaves_no_process(seed: str) -> None:
    command = [*COVEY, "demo", "--ranks", "2", "--steps", "100000", "--seconds", "1000", "--seed", seed, "--plain"]
    process = forked.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=UNBUFFERED,
        preexec_fn=forked.interruptible,
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


@pytest.mark.thorough
def test_a_rank_that_is_killed_by_hand_is_brought_back_and_taken_in(seed: str) -> None:
    pids: dict[int, int] = {}
    to_kill, killed = {0, 2}, set()
    entered: dict[int, JoinedReport] = {}
    plan = processes.DemoRun(nodes=3, lots=3, rounds=100_000, seconds=1000.0, seed=int(seed))
    with contextlib.closing(processes.reports(plan)) as reports:
        for node, report in reports:
            match report:
                case StartedReport():
                    pids[node] = report.pid
                case RoundReport() if len(pids) == 3 and to_kill:
                    for victim in sorted(to_kill):
                        os.kill(pids[victim], signal.SIGKILL)
                    to_kill.clear()
                case KilledReport():
                    killed.add((node, report.signal))
                case JoinedReport() if report.generation:
                    entered[node] = report
                    if len({joined.generation for joined in entered.values()}) == 1 and len(entered) == 3:
                        break
    assert killed == {(0, "SIGKILL"), (2, "SIGKILL")}
    assert entered[1].rank == 0, "the only one that was left"
    assert {joined.rank for joined in entered.values()} == {0, 1, 2}
    assert {joined.step for joined in entered.values()} == {entered[1].step}
    assert {joined.held_out for joined in entered.values()} == {entered[1].held_out}
    assert workers(seed) == []


def train_alone_and_kill(seed: str) -> None:
    """Train with one node without end, and kill it once it is at work."""
    pid = 0
    plan = processes.DemoRun(nodes=1, lots=1, rounds=100_000, seconds=1000.0, seed=int(seed))
    with contextlib.closing(processes.reports(plan)) as reports:
        for _, report in reports:
            if isinstance(report, StartedReport):
                pid = report.pid
            elif isinstance(report, JoinedReport):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_the_last_node_that_is_killed_ends_the_run_with_an_error_that_names_it(seed: str) -> None:
    with pytest.raises(RankFailedError, match=r"node 0 .*SIGKILL") as caught:
        train_alone_and_kill(seed)
    assert caught.value.rank == 0
    assert workers(seed) == []
