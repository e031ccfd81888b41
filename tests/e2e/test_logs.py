"""`covey logs` and `covey history`: what a machine keeps of the runs that were started on it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys

from tests.support import forked, pipes
from tests.support.jobs import SOURCE, Job, finish, new_job
from tests.support.machines import new_lab
from tests.support.waiting import wait_until

RUN = (sys.executable, "-m", "covey", "run")
TALKS = """
import sys, time
from pathlib import Path
import covey
import numpy as np

with covey.join() as group:
    for step in range(3):
        print("rank", group.rank, "at step", step)
        group.report(step=step, loss=1 / (step + 1))
        group.barrier()
    print("rank", group.rank, "complains", file=sys.stderr)
    group.barrier()
    if group.rank == 0:
        print("at work", flush=True)
    is_over = np.zeros(1)
    while not is_over[0]:
        is_over[0] = Path(__file__).with_suffix(".go").exists()
        group.all_reduce(is_over)
        time.sleep(0.02)
    if group.rank == 2:
        sys.exit({code})
"""


def covey(job: Job, *words: str) -> str:
    """Return what a command prints to standard output."""
    ended = finish(command(job, *words))
    assert ended.code == 0, ended.err
    return ended.out


def command(job: Job, *words: str) -> subprocess.Popen[str]:
    """Start a command of covey, as the user of the job."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
    own = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(job.temp), "XDG_RUNTIME_DIR": str(job.temp)}
    process = job.popen(
        [sys.executable, "-m", "covey", *words],
        env=clean | own | {"COVEY_HOME": str(job.home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    job.processes.append(process)
    return process


def began(job: Job, code: int = 0) -> subprocess.Popen[str]:
    """Start four ranks, and return when all of them have said what they say."""
    run = job.start(TALKS.format(code=code), [*RUN, "-n", "4"])
    for line in pipes.stdout(run):
        if "at work" in line:
            return run
    raise AssertionError(finish(run).err)


def let_go(job: Job) -> None:
    """Let all programs end."""
    for number in range(len(job.processes)):
        (job.folder / f"job{number}.go").touch()


def test_the_output_of_each_rank_is_there_while_the_run_goes_on_and_afterwards() -> None:
    with new_job() as job:
        run = began(job)
        shown = [json.loads(line) for line in covey(job, "logs", "job0", "--json").splitlines()]
        steps = [line for line in shown if "at step" in line["text"]]
        assert sorted((line["rank"], line["text"]) for line in steps) == [
            (rank, f"rank {rank} at step {step}") for rank in range(4) for step in range(3)
        ]
        assert [line["at"] for line in shown] == sorted(line["at"] for line in shown)
        assert {line["rank"] for line in shown if line["stream"] == "stderr"} == {0, 1, 2, 3}
        one = covey(job, "logs", "job0", "--rank", "3", "--grep", "step [12]$")
        assert one.splitlines() == ["[3] rank 3 at step 1", "[3] rank 3 at step 2"]
        assert json.loads(covey(job, "history", "--json"))[0]["state"] == "running"

        follower = command(job, "logs", "job0", "-f")
        assert any("at work" in line for line in pipes.stdout(follower))
        let_go(job)
        assert finish(run).code == 0
        assert finish(follower).code == 0, "it ends with the run"
        assert "at step" in covey(job, "logs", "job0")
        (row,) = json.loads(covey(job, "history", "--json"))
        assert (row["run"], row["state"], row["code"], row["ranks"]) == ("job0", "ended", 0, 4)
        assert row["ended"] > row["began"]
        assert "succeeded" in covey(job, "history")
        assert row["report"] | {"at": 0} == {"rank": 0, "step": 2, "at": 0, "values": {"loss": 1 / 3}}
        about = covey(job, "history", "job0")
        assert "last report   step 2, loss 0.3333" in about
        assert "output        covey logs " in about


def test_the_history_says_which_rank_failed_and_what_was_killed() -> None:
    with new_job() as job:
        run = began(job, code=7)
        let_go(job)
        assert finish(run).code == 7
        lost = began(job)
        name = f"job{job.processes.index(lost)}"
        os.kill(lost.pid, signal.SIGKILL)
        lost.wait()
        wait_until(lambda: "ended unexpectedly" in covey(job, "history"))
        rows = {row["run"]: row for row in json.loads(covey(job, "history", "--json"))}
        assert (rows["job0"]["code"], rows["job0"]["reason"]) == (7, "rank 2 failed with exit code 7")
        assert (rows[name]["state"], rows[name]["code"]) == ("ended unexpectedly", None)
        assert "rank 1 at step 2" in covey(job, "logs", name), "what it had said is there"


def test_output_that_must_not_be_kept_is_not() -> None:
    with new_job() as job:
        run = job.start("print('a secret')", [*RUN, "-n", "2", "--solo"], COVEY_KEEP_OUTPUT=0)
        assert finish(run).code == 0
        assert json.loads(covey(job, "history", "--json"))[0]["run"] == "job0"
        kept = [path for path in job.home.rglob("*") if path.is_file() and b"a secret" in path.read_bytes()]
        assert kept == []


def test_a_run_without_a_folder_for_its_output_goes_on() -> None:
    with new_job() as job:
        job.home.write_text("no folder")
        ended = finish(job.start("print('done')", [*RUN, "-n", "2", "--solo"]))
        assert ended.code == 0
        assert "nothing is kept of this run" in ended.err
        assert ended.out.count("done") == 2


PLAIN = """
import os, subprocess, sys
import covey

print("before", flush=True)
with covey.join() as group:
    print("rank", group.rank, "works", flush=True)
    os.write(2, b"past Python\\n")
    subprocess.run(["echo", "of a child"])
    if len(sys.argv) > 1:
        print("last words", flush=True)
        os.kill(os.getpid(), 9)
raise RuntimeError("a fault")
"""


def test_what_plain_python_prints_is_kept_if_one_asks_for_it() -> None:
    with new_job() as job:
        script = job.folder / "plain.py"
        script.write_text(PLAIN)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
        env = clean | {"PYTHONPATH": str(SOURCE), "COVEY_HOME": str(job.home)}
        for words, keep in (((), "1"), (("killed",), "1"), ((), "")):
            kept = {"COVEY_KEEP_OUTPUT": keep} if keep else {}
            argv = [sys.executable, str(script), *words]
            run = forked.run if words or not keep else subprocess.run  # only a whole interpreter ends in order
            ended = run(argv, env=env | kept, capture_output=True, text=True, check=False)
            assert ended.stdout.split()[:6] == ["before", "rank", "0", "works", "of", "a"] or words, ended
            assert ended.stderr.startswith("past Python\n"), ended
            assert ("RuntimeError: a fault" in ended.stderr) == (not words)
        rows = json.loads(covey(job, "history", "--json"))
        assert [(row["run"], row["state"]) for row in rows] == [("plain", "ended unexpectedly"), ("plain", "ended")]
        shown = [json.loads(line) for line in covey(job, "logs", rows[1]["id"], "--json").splitlines()]
        texts = [line["text"] for line in shown]
        assert "before" not in texts, "it is kept from the join on"
        assert {"rank 0 works", "past Python", "of a child", "RuntimeError: a fault"} <= set(texts)
        assert shown[texts.index("rank 0 works")]["rank"] == 0
        assert "last words" in covey(job, "logs", rows[0]["id"])


SPEAKS = """
import os, sys, time
from pathlib import Path
import covey
import numpy as np

with covey.join() as group:
    print("this is", sys.argv[1], flush=True)
    group.barrier()
    print("all are here", flush=True)
    is_over = np.zeros(1)
    while not is_over[0]:
        is_over[0] = Path("enough").exists()
        group.all_reduce(is_over)
        print("at work", flush=True)  # what comes later keeps no reader waiting
        time.sleep(0.02)
"""


def test_other_machines_tell_what_is_printed_there_only_if_they_share_it() -> None:
    key = secrets.token_bytes(32)
    with new_lab() as lab:
        (lab.folder / "speaks.py").write_text(SPEAKS)
        north, south, attic = lab.owned("home", key, "north", "south", "attic")
        shares = {north: [], south: ["--share-output"], attic: []}
        started = [
            machine.start("-m", "covey", "run", "--size", "3", *options, "speaks.py", machine.home.name)
            for machine, options in shares.items()
        ]
        for each in started:
            assert any("all are here" in line for line in pipes.stdout(each))
        shown = north.covey("logs", "speaks", "--all", "--json")
        texts = [json.loads(line)["text"] for line in shown.stdout.splitlines()]
        assert {text for text in texts if text.startswith("this is")} == {"this is north", "this is south"}
        assert texts.count("all are here") == 2
        assert shown.stderr.count("keeps its output to itself") == 1
        (lab.folder / "enough").touch()
        for each in started:
            assert finish(each).code == 0
