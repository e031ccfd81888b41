"""Runs of a cluster on one host, with real processes: their nodes, order and lanes, and what each node is told.

Nodes find each other by the files of this host and by multicast on loopback: nothing leaves this machine.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.jobs import Ended, Job, finish, finish_all, new_job
from tests.support.sets import first
from tests.support.waiting import DEADLINE, wait_until

from covey.base.native import native
from covey.base.version import __version__
from covey.net.lanes import shm

if TYPE_CHECKING:
    from collections.abc import Iterator

ON_ONE_HOST = "unix" if shm.obstacle_here(is_native=native().module is not None) else "shm"
JOIN = """
import json, os, sys
import numpy as np
import covey
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of

def say(what):
    print(json.dumps(what), flush=True)

say("joining")
with covey.join(**json.loads(os.environ.pop("TEST_JOIN"))) as group:
"""
WORK = """
    x = np.arange(50_001, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    node = node_of(group)
    report = dict(
        position=[group.rank, group.local_rank, group.size], sums=[float(x[1]), float(x[-1])], lanes=group.lanes(),
        pid=os.getpid(), pids=group.all_gather_object(os.getpid()), ids=group.all_gather_object(node.card.id.hex()),
        id=node.card.id.hex(), name=node.card.name, secret="COVEY_SECRET" in os.environ,
    )
"""
HOLD = """
    say(report)
    sys.stdin.readline()
"""
END = """
say(report)
"""
LATER_RELEASE = """
import msgspec
from covey.base import version
version.__version__ = "9.9.9"
from covey.wire import messages
plainly = messages.encode

def with_a_new_field(message):
    if not isinstance(message, msgspec.Struct):
        return plainly(message)
    return plainly([*msgspec.msgpack.decode(plainly(message)), "new in 9.9.9"])

messages.encode = with_a_new_field
"""
"""In front of a program: its covey is of a later release, whose control messages all have one more field."""


class Cluster:
    """A secret, and how programs that know it are started."""

    def __init__(self, job: Job) -> None:
        self.job, self.secret = job, secrets.token_hex(32)

    def start(self, code: str = JOIN + WORK + END, *, env: dict[str, Any] | None = None, **join: Any) -> Any:
        """Start a program that calls `covey.join(**join)`, by default for the run `run-a`."""
        settings = {
            "COVEY_SECRET": self.secret,
            "COVEY_INTERFACES": "lo",
            "COVEY_RUN_PROGRAM": "train.py",
            "TEST_JOIN": json.dumps({"run": "run-a", "timeout": DEADLINE} | join),
        }
        return self.job.start(code, **(settings | (env or {})))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with new_job() as job:
        yield Cluster(job)


def heard(process: subprocess.Popen[str]) -> Any:
    """Wait for the next thing that a program says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, finish(process).err
    return json.loads(line)


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def check(reports: list[Any], lanes: str = ON_ONE_HOST) -> None:
    """Assert that these made one run, in the order of their ids, that all of them know."""
    size = len(reports)
    reports = sorted(reports, key=lambda report: report["position"])
    assert [report["position"] for report in reports] == [[rank, rank, size] for rank in range(size)]
    ids, pids = [[report[key] for report in reports] for key in ("id", "pid")]
    assert ids == sorted(ids)
    factor = size * (size + 1) / 2
    for rank, report in enumerate(reports):
        assert report["ids"] == ids
        assert report["pids"] == pids
        assert report["sums"] == [factor, factor * 50_000]
        assert report["lanes"] == {str(other): lanes for other in range(size) if other != rank}
        assert report["secret"] is False  # not for programs that this one starts


def reports_of(ended: list[Ended]) -> list[Any]:
    return [each.report for each in ended]


@pytest.mark.parametrize("seed", first(1, [1, 2, 0, 3, 4, 5]))
def test_nodes_that_start_in_any_order_with_pauses_agree_on_one_run(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    size, lanes = 2 + seed % 3, "secure" if seed % 2 else "auto"
    limits: dict[str, Any] = {"size": size} if rng.random() < 0.5 else {"min_size": size, "max_size": size}
    processes = []
    for _ in range(size):
        processes.append(cluster.start(**limits, lanes=lanes))
        if rng.random() < 0.5:
            assert heard(processes[-1]) == "joining"  # a pause: it looks around for a while before the next one starts
    check(reports_of(finish_all(processes)), "secure" if lanes == "secure" else ON_ONE_HOST)
    wait_until(lambda: cluster.job.left_behind() == [])


def test_nodes_that_come_within_the_settle_window_are_let_in_though_fewer_would_do(cluster: Cluster) -> None:
    wait = """
from covey.proto.joining import Joining
Joining.__init__.__kwdefaults__["settle"] = 12.0  # a node that stands still for a while comes within it all the same
say("joining")
sys.stdin.readline()
"""
    code = JOIN.replace('say("joining")\n', wait) + WORK + END
    assert wait in code
    processes = [cluster.start(code, min_size=2) for _ in range(3)]
    for process in processes:
        assert heard(process) == "joining"
    for process in processes:
        let_go(process)
    check(reports_of(finish_all(processes)))


@pytest.mark.thorough
def test_nodes_of_two_releases_that_speak_the_same_protocol_are_in_one_run(cluster: Cluster) -> None:
    code = JOIN + WORK + "    report['versions'] = [each.version for each in group.node.members]\n" + END
    processes = [cluster.start(code, size=3, lanes="secure") for _ in range(2)]
    cluster.job.popen = subprocess.Popen  # a fork has imported this release already
    processes.append(cluster.start(LATER_RELEASE + code, size=3, lanes="secure"))
    reports = reports_of(finish_all(processes))
    check(reports, "secure")
    for report in reports:
        assert sorted(report["versions"]) == sorted(["9.9.9", __version__, __version__])
        assert report["versions"] == reports[0]["versions"]


def test_two_runs_side_by_side_do_not_mix(cluster: Cluster) -> None:
    processes = {run: [cluster.start(run=run, size=2) for _ in range(2)] for run in ("run-a", "run-b")}
    for pair in processes.values():
        check(reports_of(finish_all(pair)))


def test_two_clusters_side_by_side_do_not_mix(cluster: Cluster) -> None:
    other = Cluster(cluster.job)
    pairs = [[each.start(size=2) for _ in range(2)] for each in (cluster, other)]
    for pair in pairs:
        check(reports_of(finish_all(pair)))


def test_a_latecomer_is_told_that_the_run_is_going_on_and_with_which_nodes(cluster: Cluster) -> None:
    members = [cluster.start(JOIN + WORK + HOLD, size=2) for _ in range(2)]
    reports = []
    for process in members:
        assert heard(process) == "joining"
        reports.append(heard(process))
    late = cluster.start(size=2)
    going_on = pipes.read_until(late.stderr, "the run is already running with ").rpartition(" running with ")[2]
    assert set(going_on.partition(";")[0].split(", ")) == {report["name"] for report in reports}
    late.send_signal(signal.SIGINT)
    assert finish(late).code == -signal.SIGINT
    for process in members:
        let_go(process)
    assert [ended.code for ended in finish_all(members)] == [0, 0]


def test_the_deadline_names_the_nodes_that_are_here_when_too_few_came(cluster: Cluster) -> None:
    processes = [cluster.start(size=3, timeout=12) for _ in range(2)]  # enough to meet, though one stands still
    errors = [ended.error for ended in finish_all(processes)]
    names = set()
    for error in errors:
        assert error.startswith("covey.DeadlineError: no run 'run-a' in cluster 'default' within the timeout of ")
        names |= set(error.partition("here: ")[2].partition(";")[0].partition(". ")[0].split(", "))
    assert len(names) == 2
    assert "2 of 3 nodes" in errors[0] + errors[1]  # the first one to give up leaves the other alone
    wait_until(lambda: cluster.job.left_behind() == [])


@pytest.mark.parametrize(
    ("what", "one", "other"),
    [
        ("runs", {"env": {"COVEY_RUN_PROGRAM": "evaluate.py"}}, {"env": {"COVEY_RUN_PROGRAM": "train.py"}}),
        ("size", {"size": 2}, {"size": 3}),
    ],
)
def test_nodes_that_want_different_things_refuse_each_other_and_say_why(
    cluster: Cluster, what: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    waits = cluster.start(**({"size": 2} | other))
    assert heard(waits) == "joining"
    both = [waits, cluster.start(**({"size": 2} | one))]
    told = [pipes.read_until(process.stderr, "problems: ") for process in both]
    for text in told:
        assert what in text.partition("problems: ")[2], text
    if what == "runs":
        assert "evaluate.py" in told[0]
        assert "train.py" in told[1]
    for process in both:
        process.send_signal(signal.SIGINT)
        assert finish(process).code == -signal.SIGINT


def test_the_death_of_a_member_is_noticed_by_the_others_at_once(cluster: Cluster) -> None:
    code = (
        JOIN
        + WORK
        + """
    say(report)
    try:
        while True:
            group.all_reduce(np.ones(1000))
    except covey.PeerLostError as error:
        say([error.rank, str(error)])
"""
    )
    env = {"COVEY_HOST_SILENCE": 1000, "COVEY_PROCESS_SILENCE": 1000}  # by what its end leaves, or not at all
    processes = [cluster.start(code, size=3, lanes="secure", env=env) for _ in range(3)]
    positions = {}
    for process in processes:
        assert heard(process) == "joining"
        positions[process] = heard(process)["position"][0]
    victim = next(process for process, rank in positions.items() if rank == 1)
    victim.send_signal(signal.SIGKILL)
    for process in processes:
        if process is not victim:
            rank, text = heard(process)
            assert rank == 1
            assert "rank 1" in text
            assert finish(process).code == 0


def test_ctrl_c_while_waiting_for_the_others_ends_the_program_and_leaves_nothing(cluster: Cluster) -> None:
    process = cluster.start(size=2)
    assert heard(process) == "joining"
    wait_until(lambda: bool(list(cluster.job.temp.glob("covey-*/*/*.node"))))
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == -signal.SIGINT
    assert ended.err.count("  File ") == 1  # the line that joins
    assert ended.err.splitlines()[-1] == "KeyboardInterrupt: interrupted while waiting for run 'run-a'"
    wait_until(lambda: cluster.job.left_behind() == [])


def test_joining_again_returns_the_open_group_and_other_settings_are_refused(cluster: Cluster) -> None:
    code = (
        JOIN.replace('os.environ.pop("TEST_JOIN")', 'os.environ["TEST_JOIN"]')
        + WORK
        + """
    options = json.loads(os.environ["TEST_JOIN"])
    report["again"] = covey.join(**options) is group
    try:
        covey.join(**options | {"run": "another"})
    except covey.ConfigError as error:
        report["other"] = str(error)
"""
        + END
    )
    reports = reports_of(finish_all([cluster.start(code, size=2) for _ in range(2)]))
    check(reports)
    for report in reports:
        assert report["again"] is True
        assert "a group is open with other settings" in report["other"]


def test_a_run_can_be_joined_anew_after_its_group_was_closed(cluster: Cluster) -> None:
    code = JOIN.replace('os.environ.pop("TEST_JOIN")', 'os.environ["TEST_JOIN"]') + WORK + """
first = report
with covey.join(**json.loads(os.environ["TEST_JOIN"])) as group:
""" + WORK + "say([first, report])\n"  # fmt: skip
    pairs = reports_of(finish_all([cluster.start(code, size=2) for _ in range(2)]))
    for time_around in range(2):
        check([pair[time_around] for pair in pairs])


def test_another_secret_is_an_authentication_error_for_a_node_that_knows_a_seed(cluster: Cluster) -> None:
    member = cluster.start(size=2)
    assert heard(member) == "joining"
    notes: list[Any] = []

    def listens() -> bool:
        notes[:] = cluster.job.temp.glob("covey-*/*/*.node")
        return bool(notes)

    wait_until(listens)
    port = json.loads(notes[0].read_text())["port"]
    stranger = finish(cluster.start(size=2, env={"COVEY_SECRET": "77" * 32}, seeds=[f"127.0.0.1:{port}"]))
    assert stranger.error.startswith(f"covey.AuthError: 127.0.0.1:{port} closed the connection at the door")
    assert "the secret of cluster 'default' differs there" in stranger.error
    check(reports_of(finish_all([member, cluster.start(size=2)])))  # nothing happened to the member


def test_a_run_of_one_needs_no_cluster(cluster: Cluster) -> None:
    code = "import covey\nwith covey.join('solo', size=1) as group: print(group.all_reduce(7), group.size)"
    ended = finish(cluster.job.start(code))
    assert (ended.code, ended.out.split()) == (0, ["7", "1"])


def test_a_machine_that_is_in_no_cluster_is_told_how_to_get_into_one(cluster: Cluster) -> None:
    ended = finish(cluster.job.start("import covey; covey.join('run-a')"))
    assert ended.error.startswith("covey.ConfigError: this machine is in no cluster: run `covey init` here")
    assert not os.path.exists(cluster.job.home / "identities")
