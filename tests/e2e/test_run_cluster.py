"""`covey run` in a cluster: nodes of one run find each other, however and wherever they were started."""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.machines import Lab, end, new_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machines import Machine

REPORT = """
import json, os
from pathlib import Path
import covey
with covey.join() as group:
    report = dict(rank=group.rank, size=group.size, run=group.name, local_rank=group.local_rank)
    report |= dict(sum=group.all_reduce(10 ** group.rank), env=dict(os.environ))
    report |= dict(started_with=Path("/proc/self/environ").read_text().rstrip(chr(0)))
print(json.dumps(report))
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        (made.folder / "job.py").write_text(REPORT)
        yield made


HOST = re.escape(socket.gethostname().partition(".")[0])
LABEL = rf"(?:(\d+)|{HOST}(?:/\d+| (\d+))?)"
"""What stands before a line: the rank in a local run; else the machine, and the rank once its keeper knows it."""


def reports(out: str) -> dict[int, Any]:
    """Return what the processes of one keeper reported, by their ranks."""
    lines = [re.fullmatch(rf"\[{LABEL}\] (\{{.*\}})", line) for line in out.splitlines()]
    found = [(line[1] or line[2], json.loads(line[3])) for line in lines if line is not None]
    assert all(label in (None, str(report["rank"])) for label, report in found), out
    return {report["rank"]: report for _, report in found}


def ended_well(keeper: Any) -> dict[int, Any]:
    code, out, err = end(keeper)
    assert code == 0, err
    return reports(out)


def run(machine: Machine, *words: str, **env: str) -> Any:
    return machine.start("-m", "covey", "run", *words, **env)


both_starts = pytest.mark.parametrize(
    "warm", ["0", pytest.param("1", marks=pytest.mark.thorough)], ids=["cold", "warm"]
)
"""Processes with interpreters of their own, and forks of one that has imported covey."""


@both_starts
def test_processes_started_on_two_machines_become_one_run(lab, warm: str) -> None:
    key = secrets.token_bytes(32)
    one, two = (lab.machine(name, "lab", key) for name in ("one", "two"))
    keepers = [
        run(one, "mine", "--size", "3", "-n", "2", "job.py", COVEY_WARM_START=warm),
        run(two, "mine", "--size", "3", "job.py"),
    ]
    here, there = map(ended_well, keepers)
    assert (len(here), len(there)) == (2, 1)
    reports = [*here.values(), *there.values()]
    assert sorted(report["rank"] for report in reports) == [0, 1, 2]
    assert {(report["size"], report["run"], report["sum"]) for report in reports} == {(3, "mine", 111)}
    for report in reports:
        assert not report["env"].keys() & {"COVEY_RANK", "COVEY_MEET", "COVEY_TOKEN_FD"}
        assert (report["env"]["RANK"], report["env"]["WORLD_SIZE"]) == (str(report["rank"]), "3")
        assert report["env"]["COVEY_RUN_PROGRAM"] == "job.py"
    assert lab.left_behind() == []


def test_two_runs_with_the_names_of_their_scripts_do_not_meet(lab) -> None:
    machine = lab.machine("one", "lab")
    (lab.folder / "other.py").write_text(REPORT)
    keepers = [run(machine, "--min", "2", "-n", "2", name) for name in ("job.py", "other.py")]
    for keeper, name in zip(keepers, ("job", "other"), strict=True):
        places = ended_well(keeper)
        assert {report["run"] for report in places.values()} == {name}
        assert sorted(report["rank"] for report in places.values()) == [0, 1]
        assert sorted(report["local_rank"] for report in places.values()) == [0, 1]


@both_starts
def test_a_secret_of_the_environment_is_not_in_that_of_the_processes(lab, warm: str) -> None:
    machine, secret = lab.machine(), secrets.token_hex(32)
    env = {"COVEY_SECRET": secret, "COVEY_WARM_START": warm}
    keeper = run(machine, "mine", "--size", "2", "-n", "2", "--lanes", "secure", "job.py", **env)
    places = ended_well(keeper)
    assert sorted(report["rank"] for report in places.values()) == [0, 1]
    for report in places.values():
        assert secret not in json.dumps(report)
        assert (report["env"]["COVEY_CLUSTER"], report["env"]["COVEY_LANES"]) == ("default", "secure")


def test_a_machine_in_no_cluster_is_told_the_ways_out(lab) -> None:
    machine = lab.machine()
    for words in (["job.py"], ["mine", "-n", "2", "job.py"]):
        ended = machine.covey("run", *words)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert re.search(r"in no cluster: run `covey init` .* `covey enroll` .*\. `covey run -n K`", ended.stderr)
    assert reports(machine.covey("run", "-n", "1", "job.py").stdout)[0]["size"] == 1


def test_a_program_that_fails_after_joining_stops_those_beside_it_and_gives_its_code(lab) -> None:
    (lab.folder / "fails.py").write_text(
        "import signal, sys, covey\n"
        "group = covey.join()\n"
        "group.barrier()\n"
        "sys.exit(7) if group.rank == 1 else signal.pause()\n"
    )
    keeper = run(lab.machine("one", "lab"), "--size", "2", "-n", "2", "fails.py")
    code, _, err = end(keeper)
    assert code == 7
    assert re.search(rf"^covey: \[{HOST}(/[01]| 1)\] failed with exit code 7; stopping the others$", err, re.MULTILINE)


FOLLOWED = """
import os, signal, sys, time
from pathlib import Path
import covey
signal.alarm(500)
for group in covey.generations(on_loss="continue", patience=5):
    while not group.change_pending:
        print(f"rank {group.rank} of {group.size}\\n", end="")
        if Path("leave").exists() and group.size == 2 and group.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if Path("enough").exists() and group.size == 1:
            break
        group.barrier()
        time.sleep(0.02)
    else:
        continue
    break
"""


def test_lines_begin_with_the_machine_and_the_rank_once_that_is_known_and_follow_it(lab: Lab) -> None:
    """A process that leaves makes the ranks of the others smaller."""
    (lab.folder / "follow.py").write_text(FOLLOWED)
    machine = lab.machine("one", "lab")
    keeper = run(machine, "followed", "--min", "1", "-n", "2", "follow.py")
    heard: list[str] = []

    def hear_until(line: str) -> None:
        while not heard or not re.fullmatch(line, heard[-1]):
            heard.append(keeper.stdout.readline().rstrip())
            assert heard[-1], keeper.stderr.read()

    for rank in (0, 1):
        hear_until(rf"\[{HOST} {rank}\] rank {rank} of 2")
    (lab.folder / "leave").touch()
    hear_until(rf"\[{HOST} 0\] rank 0 of 1")
    (lab.folder / "enough").touch()
    assert end(keeper)[0] == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_run_that_waits_for_others(lab, signum) -> None:
    (lab.folder / "waits.py").write_text("import covey\nprint('joining', flush=True)\ncovey.join()\n")
    keeper = run(lab.machine("one", "lab"), "lonely", "--min", "5", "-n", "2", "waits.py")
    lines = sorted(keeper.stdout.readline() for _ in range(2))
    assert all(re.fullmatch(rf"\[{HOST}/{number}\] joining\n", line) for number, line in enumerate(lines)), lines
    keeper.send_signal(signum)
    assert end(keeper)[0] == 128 + signum


def test_a_node_that_waits_in_vain_is_told_which_nodes_are_here_and_for_how_long(lab) -> None:
    keeper = run(lab.machine("one", "lab"), "lonely", "--min", "3", "--wait", "0.7", "job.py")
    code, _, err = end(keeper)
    assert code == 1
    assert re.search(
        r"no run 'lonely' in cluster 'lab' within the timeout of 0\.\d+ s: .* of 3 nodes so far; here: \S+-\w{4}", err
    )


def test_torch_finds_its_variables_on_this_machine_and_in_a_cluster(lab) -> None:
    machine = lab.machine("one", "lab")
    for words in (["-n", "3"], ["-n", "3", "--size", "3"]):
        places = ended_well(run(machine, *words, "--torch-env", "job.py"))
        assert sorted(report["rank"] for report in places.values()) == [0, 1, 2]
        for report in places.values():
            env = report["env"]
            assert (env["RANK"], env["LOCAL_RANK"]) == (str(report["rank"]), str(report["local_rank"]))
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("3", "3", "127.0.0.1")
        (port,) = {int(report["env"]["MASTER_PORT"]) for report in places.values()}
        assert 1024 <= port < 1 << 16


LEAVE_AND_FAIL = """
import os, signal, sys, time
import covey
word = "again" if "COVEY_RESTART" in os.environ else sys.argv[1]
were_three = False
for group in covey.generations(on_loss="continue", patience=5):
    words, pids = zip(*group.all_gather_object((word, os.getpid())))
    if "again" in words:
        break
    if group.size == 3:
        were_three, leaving = True, pids[words.index("one")]
    if group.size == 3 and word == "one" and group.rank == words.index("one"):
        os.kill(os.getpid(), signal.SIGTERM)
    while not group.change_pending and not (were_three and group.size == 2 and word == "one"):
        group.barrier()
        time.sleep(0.02)
    if were_three and group.size == 2 and word == "one":
        while os.path.exists(f"/proc/{leaving}"):  # until the keeper has seen the other process end well
            time.sleep(0.01)
        os._exit(3)
"""


def test_a_process_that_fails_after_another_one_of_its_keeper_has_left_is_started_again(lab: Lab) -> None:
    """The run goes on elsewhere: that a process of this keeper has left does not end it."""
    (lab.folder / "leave.py").write_text(LEAVE_AND_FAIL)
    key = secrets.token_bytes(32)
    one, two = (lab.machine(name, "lab", key) for name in ("one", "two"))
    keepers = [
        run(one, "leaving", "-n", "2", "--min", "1", "--restarts", "1", "leave.py", "one"),
        run(two, "leaving", "-n", "1", "--min", "1", "--restarts", "1", "leave.py", "two"),
    ]
    (code, _, err), (other, _, said) = map(end, keepers)
    assert "failed with exit code 3; starting it again (1 of 1)" in err, err
    assert (code, other) == (0, 0), err + said
