"""Metrics and traces of real ranks: `covey run --http`, SIGUSR1, failures, `covey trace`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked
from tests.support.jobs import SOURCE
from tests.support.machines import wait_until_joined
from tests.support.ranks import covey, np, run_ranks
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime.metrics.flight import NOTE

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = """
import covey, numpy as np, sys
with covey.join() as group:
    for step in range(7):
        group.all_reduce(np.full(1000 + step, group.rank, np.float32))
    print("ready", flush=True)
    {then}
"""


class Run:
    """`covey run` on a program, with a home of its own."""

    def __init__(self, folder: Path, then: str, *options: str) -> None:
        self.folder = folder
        script = folder / "job.py"
        for made in (folder / "home", folder / "home" / "traces"):
            made.mkdir(mode=0o700, exist_ok=True)
        script.write_text(STEPS.format(then=then))
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
        self.env |= {"COVEY_HOME": str(folder / "home")}
        self.process = forked.Popen(
            [sys.executable, "-m", "covey", "run", "-n", "3", *options, str(script)],
            env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def await_ready(self, *others: str) -> None:
        """Return once all ranks are ready, and one has said each of `others`: lines of ranks come in any order."""
        assert self.process.stdout is not None
        wanted = ["ready"] * 3 + list(others)
        while wanted:
            line = self.process.stdout.readline()
            assert line, "it has ended"
            said = line.partition("] ")[2].rstrip("\n")
            assert said in ("ready", *others), line
            if said in wanted:
                wanted.remove(said)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.run(
            [sys.executable, "-m", "covey", *arguments],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip

    def files(self) -> list[Path]:
        return sorted((self.folder / "home" / "traces").glob("*.covey-trace"))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def start(then: str, *options: str) -> Run:
        runs.append(Run(tmp_path, then, *options))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate(timeout=DEADLINE)


def test_one_page_has_the_metrics_of_all_ranks(started: Any) -> None:
    run = started("group.barrier(); __import__('time').sleep(600)", "--http", "0")
    run.await_ready()
    assert run.process.stderr is not None
    url = re.fullmatch(
        r"covey: (http://127\.0\.0\.1:\d+) serves /healthz, /readyz and /metrics\n", run.process.stderr.readline()
    )
    assert url is not None
    page = urllib.request.urlopen(url[1] + "/metrics", timeout=DEADLINE).read().decode()
    for rank in range(3):
        assert f'covey_up{{rank="{rank}"}} 1.0' in page
        assert f'covey_operations_total{{op="all_reduce",rank="{rank}"}} 7.0' in page
        assert f'covey_members{{rank="{rank}"}} 3.0' in page
    assert json.loads(urllib.request.urlopen(url[1] + "/healthz", timeout=DEADLINE).read())["ok"]
    ready = json.loads(urllib.request.urlopen(url[1] + "/readyz", timeout=DEADLINE).read())
    assert ready == {"ok": True, "checks": {f"rank {rank}: joined": {"ok": True, "reason": ""} for rank in range(3)}}
    stacks = urllib.request.urlopen(url[1] + "/debug/stacks", timeout=DEADLINE).read().decode()
    assert all(f"rank {rank}:\n" in stacks for rank in range(3))
    assert stacks.count("job.py") == 3
    run.process.send_signal(signal.SIGTERM)
    run.process.communicate(timeout=DEADLINE)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url[1], timeout=DEADLINE)


def test_a_wrong_port_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path, "pass", "--http", "http")
    _, err = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 2
    assert "--http 'http' must be a port" in err


def test_a_signal_to_covey_run_writes_the_operations_of_all_ranks_and_trace_shows_them(started: Any) -> None:
    run = started(
        "sys.stdin.close()\n"
        "    if group.rank != 1: group.barrier()\n"
        "    while [late.rank for late in group.who_is_late()] != [1]: pass\n"
        "    print('they wait', flush=True)\n"
        "    __import__('time').sleep(600)"
    )
    run.await_ready("they wait")
    newest = run.command("trace")  # without a name, the run that goes on
    assert newest.stdout.startswith("23 operations of 3 ranks in "), newest.stderr
    run.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(run.files()) == 3)
    here = json.loads(run.command("status", "--json").stdout)
    assert here["cluster"] is None
    assert (run.process.pid, "job", 3) in [(each["pid"], each["name"], each["size"]) for each in here["local"]]
    asked = run.command("trace", str(run.process.pid), "--json")
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert (told["run"], told["ranks"], told["file"]) == ("job", 3, str(run.folder / "home/traces/job.trace.json"))
    assert Path(told["file"]).stat().st_mode & 0o077 == 0, "what is in covey's folder is private"
    assert [(each["name"], each["inside"], each["missing"]) for each in told["stuck"]] == [("barrier", [0, 2], [1])]
    made = run.folder / "home" / "traces" / "job.trace.json"
    assert made.exists()
    assert not (run.folder / "job.trace.json").exists()
    ended = run.command("trace", "--out", "it.json")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert re.match(r"23 operations of 3 ranks in ", lines[0])
    assert "operation 8 of group 'run', barrier: ranks 0 and 2 are in it, rank 1 is not" in lines
    assert told["operations"] == 23
    events = json.loads((run.folder / "it.json").read_text())["traceEvents"]
    for rank in range(3):
        shown = [each for each in events if each["pid"] == rank and each["name"] == "all_reduce"]
        assert [each["args"]["operation"] for each in shown] == list(range(1, 8))
        assert all(each["args"]["sent"] > 0 and rank not in each["args"]["peers"] for each in shown)


def test_a_signal_to_a_rank_writes_its_operations_and_the_rank_goes_on(started: Any) -> None:
    run = started(
        "import os, signal, time\n"
        "    if group.rank == 2: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    while group.rank == 2 and not os.listdir(os.environ['COVEY_HOME'] + '/traces'): time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
        "    print(group.all_reduce(1), flush=True)"
    )
    out, err = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 0, err
    assert out.count("] 3\n") == 3
    (path,) = run.files()
    assert "rank2" in path.name
    assert f"[2] the last operations are in {path}" in err
    assert "7 operations of 1 rank" in run.command("trace", str(path)).stdout


def test_a_program_that_handles_the_signal_keeps_it(started: Any) -> None:
    run = started(
        "import faulthandler, os, signal, time\n"
        "    if group.rank == 2: os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    while group.rank == 2 and not os.listdir(os.environ['COVEY_HOME'] + '/traces'): time.sleep(0.01)\n"
        "    group.barrier()"
    )
    run.process.communicate(timeout=DEADLINE)
    assert len(run.files()) == 1
    script = run.folder / "own.py"
    script.write_text(
        "import faulthandler, os, signal, covey\n"
        "faulthandler.register(signal.SIGUSR1, all_threads=False)\n"
        "with covey.join() as group:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    group.barrier()\n"
    )
    ended = run.command("run", "-n", "1", str(script))
    assert ended.returncode == 0, ended.stderr
    assert "most recent call first" in ended.stderr
    assert len(run.files()) == 1


def test_a_failure_leaves_a_file_of_each_survivor_and_the_error_names_it(started: Any) -> None:
    run = started(
        "import os\n"
        "    while group.rank == 1:\n"  # until the others are in their next operation
        "        if [late.rank for late in group.who_is_late()] == [1]: os._exit(3)\n"
        "    group.all_reduce(np.ones(9))"
    )
    _, err = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 3
    noted = dict(re.findall(rf"^\[(\d)\] {re.escape(NOTE)} (\S+)$", err, re.MULTILINE))
    assert sorted(noted) == ["0", "2"]
    assert sorted(noted.values()) == [str(path) for path in run.files()]
    shown = run.command("trace", *noted.values()).stdout
    assert "operation 8 of group 'run', all_reduce: ranks 0 and 2 are in it, rank 1 is not" in shown
    assert re.search(r"^rank 0: PeerLostError: rank 1 ", shown, re.MULTILINE)


def test_a_recovery_is_counted_by_the_ranks_that_go_on(started: Any, tmp_path: Path) -> None:
    run = started(
        "import os\n"
        "    if group.rank == 1: os._exit(3)\n"
        "    group.all_reduce(np.ones(9))\n"
        "    from covey.runtime.metrics.samples import samples\n"
        "    found = {(each.name, *dict(each.labels).values()): each.value for each in samples()}\n"
        "    names = 'elections_total', 'recovery_seconds_total', 'members', 'view'\n"
        "    found = found['covey_events_total', 'lost'], *(found['covey_' + name,] for name in names)\n"
        "    print('found', *found, flush=True)",
        *("--on-loss", "continue"),
    )
    out, err = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 0, err
    told = [line.split("found ")[1].split() for line in out.splitlines() if "found" in line]
    assert len(told) == 2, err
    for lost, elections, seconds, members, view in told:
        assert (float(lost), float(members), float(view)) == (1, 2, 1)
        assert float(elections) >= 1
        assert 0 < float(seconds) < DEADLINE
    assert run.files() == []  # the group has not failed


def test_operations_that_survive_losses_are_all_counted() -> None:
    def count() -> list[int]:
        with covey.join(on_loss="continue") as group:
            for step in range(30):
                group.all_reduce(np.full(4, group.rank + step, np.float32))
                group.barrier()
            found = group.metrics()
            return [each.calls for each in found.operations.values()] + [found.operations["all_reduce"].sent_bytes]

    assert run_ranks(2, count, lanes="shm") == [[30, 30, 30 * 16]] * 2


def test_closing_and_revoking_leave_no_file(started: Any) -> None:
    """The barrier comes first: a rank may revoke the group while others are in the operation before."""
    run = started(
        "try: group.barrier(); group.revoke(); group.barrier()\n"
        "    except covey.ClosedError: print('closed', flush=True)"
    )
    out, err = run.process.communicate(timeout=DEADLINE)
    assert out.count("closed") == 3, err
    assert run.files() == []


def test_a_run_of_a_cluster_can_be_traced_from_any_of_its_machines(lab: Any) -> None:
    machine = lab.machine("one", "lab")
    nodes = [machine.node("mine", size=2) for _ in range(2)]
    wait_until_joined(nodes)
    ended = machine.covey("trace", "mine", "--out", str(machine.home / "mine.json"))
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"\d+ operations? of 2 ranks in ", ended.stdout)
    asked = machine.covey("checkpoint", "mine", "--path", "/backup", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["state"] in ("requested", "pending")
    again = machine.covey("checkpoint", "mine", "--json")
    assert json.loads(again.stdout)["id"] == json.loads(asked.stdout)["id"]  # the programs have not ended it
    wrong = machine.covey("trace", "yours")
    assert wrong.returncode == 2
    assert "is in a run 'yours'; runs: 'mine'" in wrong.stderr


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "pass")
    run.process.communicate(timeout=DEADLINE)
    nothing = run.command("trace")
    assert nothing.returncode == 2
    assert "there are no files of ranks in" in nothing.stderr
    wrong = tmp_path / "job.py"
    assert f"{wrong} was not written by covey" in run.command("trace", str(wrong)).stderr
