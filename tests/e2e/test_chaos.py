"""`covey chaos` against real jobs that check their own numbers, and against jobs that have nothing to check."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked
from tests.support.jobs import SOURCE, finish, new_job

from covey.base.errors import ConfigError
from covey.lab.chaos.cutting import require_cutting
from covey.lab.chaos.processes import started_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.jobs import Job

FAULT = re.compile(r"covey: +\d+\.\d+ s  ([\w-]+): ")
EXACT = """
import os, time
import covey, numpy as np

pattern = np.arange(5000.0) % 251 + 1
state = {"sum": np.zeros(5000), "step": 0, "left": 10}
for group in covey.generations():
    try:
        group.restore(state)
        while state["left"] and not group.change_pending:
            scale = state["step"] % 7 + 1
            values = np.append((group.rank + 1) * scale * pattern, float(os.path.exists(os.environ["STOP"])))
            group.all_reduce(values)
            total = sum(rank + 1 for rank in group.contributors) * scale
            assert np.array_equal(values[:-1], total * pattern), (state["step"], group.contributors)
            state["sum"] += pattern
            state["step"] += 1
            state["left"] -= values[-1] > 0
            time.sleep(0.01)
    except covey.GroupChangedError:
        continue
    if not state["left"]:
        break
assert np.array_equal(state["sum"], state["step"] * pattern)
print("the sums are right", flush=True)
"""
"""Runs until the file STOP is there. Every step adds what every contributor gave, exactly, and nothing twice."""


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as job:
        yield job
        assert job.left_behind() == []


@pytest.fixture
def cutting() -> None:
    """What is needed to break connections of others."""
    try:
        require_cutting()
    except ConfigError as error:
        pytest.skip(str(error))


def chaos(job: Job, code: str, *options: str) -> subprocess.Popen[str]:
    """Start `code` under chaos."""
    before = [sys.executable, "-m", "covey", "chaos", *options, "--timeout", "500", "--"]
    return job.start(code, before, STOP=job.folder / "stop")


def hear_faults(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return the kinds of the next faults, when they have been announced; the guard against hangs ends the wait."""
    found: list[str] = []
    said = []
    assert process.stderr is not None
    while len(found) < count:
        line = process.stderr.readline()
        said.append(line)
        assert line, "".join(said)
        if match := FAULT.match(line):
            found.append(match[1])
    return found


def running_with(mark: Path) -> list[int]:
    """Return the processes whose command line names a file under `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if os.fsencode(mark) in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.usefixtures("cutting")
def test_a_job_survives_every_kind_of_fault_with_the_right_numbers(job: Job) -> None:
    process = chaos(job, EXACT, "-n", "3", "--seed", "123", "--every", "0.8", "--count", "7", "--json")
    assert hear_faults(process, 7) == ["pause", "kill", "cut", "join", "slow", "stop", "leave"]
    (job.folder / "stop").touch()
    ended = finish(process)
    report: dict[str, Any] = ended.report["runs"][0]
    assert (report["code"], report["survives"], report["unexplained_losses"]) == (0, True, 0)
    faults = {fault["kind"]: fault for fault in report["faults"]}
    assert not any(fault["bad"] for fault in faults.values())
    assert all(fault["done"] for fault in faults.values())
    assert faults["pause"]["outcome"] == faults["slow"]["outcome"] == "no rank was lost"
    assert 0 < faults["cut"]["recovered_ms"] < 2000
    assert 0 < faults["kill"]["recovered_ms"] < 2000
    assert 400 < faults["stop"]["recovered_ms"] < 2500  # half a second of it is waiting whether it goes on
    assert faults["join"]["recovered_ms"] > 0
    assert faults["leave"]["outcome"].startswith("left in good order")
    hows = sorted(end["how"] for end in report["processes"])
    assert hows in (["finished", "finished", "left", "lost"], ["finished", "left", "lost", "stray"])
    assert ended.err.count("the sums are right") >= hows.count("finished")  # a rank that left may have said so, too
    assert running_with(job.folder) == []


@pytest.mark.usefixtures("cutting")
def test_cut_tcp_connections_lose_no_rank(job: Job) -> None:
    options = ("-n", "2", "--seed", "5", "--faults", "cut", "--every", "0.3", "--count", "3", "--lanes", "tcp")
    process = chaos(job, EXACT, *options)
    assert hear_faults(process, 3) == ["cut"] * 3
    (job.folder / "stop").touch()
    ended = finish(process)
    assert ended.code == 0, ended.err
    assert ended.out.count("the sums are right") == 2
    assert "faults: 3 cut; seed 5" in ended.out
    assert "processes: 2 finished" in ended.out


def test_a_job_that_does_not_survive_losses_fails_and_is_told_what_to_do(job: Job) -> None:
    code = "import covey\nwith covey.join() as group:\n    while True: group.barrier()"
    options = ("-n", "3", "--seed", "1", "--faults", "kill", "--every", "0.2", "--count", "1")
    ended = finish(chaos(job, code, *options))
    assert ended.code in (1, 128 + signal.SIGKILL), ended.err  # the others may be stopped before they fail themselves
    assert ended.out.count("killed rank") == 1
    assert 'the job does not survive losses: join with on_loss="continue"' in ended.out
    assert f"the job ended with exit code {ended.code}" in ended.out


def test_ctrl_c_ends_the_job_and_still_reports(job: Job) -> None:
    process = chaos(job, EXACT, "-n", "2", "--seed", "5", "--faults", "slow", "--every", "0.2", "--json")
    assert hear_faults(process, 1) == ["slow"]
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130, ended.err
    assert json.loads(ended.out)["runs"][0]["faults"][0]["kind"] == "slow"
    assert running_with(job.folder) == []


def checked(job: Job, *words: str, **env: str) -> subprocess.Popen[str]:
    """Start checked runs, in folders of the test's own."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
    clean |= {"PYTHONPATH": str(SOURCE), "TMPDIR": str(job.temp), "XDG_RUNTIME_DIR": str(job.temp)} | env
    process = forked.Popen(
        [sys.executable, "-m", "covey", "chaos", *words],
        env=clean,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    job.processes.append(process)
    return process


@pytest.mark.parametrize(
    ("faults", "count"), [("kill", 1), pytest.param("kill,stop,order", 3, marks=pytest.mark.thorough)]
)
def test_every_operation_of_a_checked_run_is_right(job: Job, faults: str, count: int) -> None:
    options = ("-n", "3", "--seed", "7", "--faults", faults, "--count", str(count), "--every", "0.5", "--json")
    ended = finish(checked(job, "--check", *options))
    assert ended.code == 0, ended.err
    (run,) = ended.report["runs"]
    assert (run["code"], run["problems"], run["terms"]["seed"], run["folder"]) == (0, [], 7, "")
    assert run["figures"]["operations"] > 30
    assert run["figures"]["results"] > run["figures"]["operations"]
    assert run["figures"]["processes"] > 3
    assert re.search(r"^covey: +\d+\.\d\d s  3 processes are at work$", ended.err, re.MULTILINE), ended.err
    kills = [fault for fault in run["faults"] if fault["kind"] == "kill"]
    assert kills
    assert all(fault["what"].startswith("killed h0.") for fault in kills)
    assert faults != "kill" or kills[0]["recovered_ms"] > 0
    assert started_for(str(job.folder)) == []


SABOTAGE = """
import sys
if any("workload" in word for word in sys.orig_argv):
    from covey.runtime.group.group import Group

    right = Group.all_reduce

    def all_reduce(self, x, *args, **options):
        result = right(self, x, *args, **options)
        if self.sequence == 20 and self.rank == 1 and not options.get("async_op"):
            x.reshape(-1)[-1] += 1
        return result

    Group.all_reduce = all_reduce
"""


@pytest.mark.thorough
def test_a_wrong_number_in_one_operation_of_one_rank_is_found(job: Job) -> None:
    (job.folder / "sitecustomize.py").write_text(SABOTAGE)
    path = f"{job.folder}{os.pathsep}{SOURCE}"
    options = ("-n", "3", "--seed", "1", "--count", "0", "--faults", "kill")
    found = ""
    for seed in range(1, 6):  # operation 20 may be another one
        ended = finish(checked(job, "--check", *options[:3], str(seed), *options[4:], PYTHONPATH=path))
        if ended.code == 1:
            found = ended.out
            break
    assert "WRONG RESULT on h0." in found
    folder = re.search(r"records of the processes: (\S+)\n", found)
    assert folder is not None
    again = finish(checked(job, "--records", folder[1]))
    assert again.code == 1
    assert again.out.startswith("FAILED: ")
    shutil.rmtree(folder[1])


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`")
def test_a_checked_run_across_hosts_survives_a_host_that_is_cut_off(job: Job) -> None:
    options = ("--hosts", "3", "-n", "1", "--seed", "3", "--faults", "isolate", "--count", "1", "--json")
    process = checked(job, "--check", *options)
    ended = finish(process)
    assert ended.code == 0, ended.err
    (run,) = ended.report["runs"]
    assert run["code"] == 0
    assert [fault["what"].startswith("packets are lost between hosts") for fault in run["faults"]] == [True]
    assert any("healed" in line for line in run["log"])
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"covey-chaos-{process.pid}-")]


def test_ctrl_c_ends_a_checked_run_and_leaves_nothing(job: Job) -> None:
    process = checked(job, "--check", "-n", "2", "--seed", "1")
    assert process.stderr is not None
    while "processes are at work" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130
    assert started_for(str(job.folder)) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "name a script or program after --, or use --check"),
        (("--check", "train.py"), "--check and --records take no command"),
        (("--hosts", "3", "train.py"), "--hosts and --runs go with --check"),
        (("--check", "--faults", "plague"), "knows no 'plague' on one machine"),
        (("--check", "--timeout", "9"), "--restarts, --timeout and --on-loss go with a command"),
        (("--faults", "order", "train.py"), "knows no 'order' for a command"),
    ],
)
def test_what_does_not_go_together_is_refused(job: Job, words: tuple[str, ...], complaint: str) -> None:
    ended = finish(checked(job, *words))
    assert ended.code == 2
    assert complaint in ended.err


def test_a_command_that_joins_no_group_is_left_alone(job: Job) -> None:
    ended = finish(chaos(job, "print('hello')", "-n", "2", "--seed", "1"))
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()[:2]) == ["[0] hello", "[1] hello"]
    assert "the job never joined a group, so nothing was done to it" in ended.out
