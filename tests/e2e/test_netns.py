"""Two network namespaces as two hosts: what refuses to cross, what crosses, and by which lane."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.jobs import Job, finish, finish_all, new_job
from tests.support.waiting import DEADLINE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "4e" * 32
PORT = 29400  # free in a namespace that was just made
JOB = f"""
import json, sys
import numpy as np
import covey
import re

with covey.join(timeout={DEADLINE}) as group:
    x = np.arange(300_001, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    right = float(x[1]), float(x[-1])
    gathered = [list(map(int, part)) for part in group.all_gather(np.full(group.rank + 1, group.rank))]
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = group.send(np.arange(100_000) + group.rank, dst=after, async_op=True)
    message = group.recv(src=before)
    sent.wait()
    local = group.split(color=group.rank // 2)
    part = local.all_reduce(10 ** group.rank)
    report = dict(
        position=[group.rank, group.size, group.local_rank],
        sums=right,
        gathered=gathered,
        message=[int(message[0]), int(message[-1])],
        part=part,
        lanes=group.lanes(),
        local_lanes=local.lanes(),
    )
print(json.dumps(report))
"""


class Hosts:
    """Two namespaces joined by a cable; namespace i has address 10.213.7.(i + 1)."""

    def __init__(self) -> None:
        unique = os.getpid() % 100_000
        self.names = [f"covey-t{unique}-{i}" for i in (0, 1)]
        self.ends = [f"cv{unique}-{i}" for i in (0, 1)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def set_up(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for name, end, address in zip(self.names, self.ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")

    def tear_down(self) -> None:
        for name in self.names:  # its end of the cable goes with it
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", self.ends[0])  # in case it never left home

    def start(self, job: Job, rank: int, code: str = JOB, **env: object) -> subprocess.Popen[str]:
        """Start one of four ranks, two on each host."""
        host = rank // 2
        enter = ["ip", "netns", "exec", self.names[host], sys.executable]
        position = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
        master = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": PORT}
        return job.start(code, enter, **{**position, **master, **env})


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=DEADLINE)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command to make network namespaces with")
    hosts = Hosts()
    try:
        try:
            hosts.set_up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.tear_down()


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as job:
        yield job


def check(reports: list[Any], same_host: str, between_hosts: str = "tcp") -> None:
    assert [report["position"] for report in reports] == [[rank, 4, rank % 2] for rank in range(4)]
    for rank, report in enumerate(reports):
        assert report["sums"] == [10.0, 3_000_000.0]
        assert report["gathered"] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
        before = (rank - 1) % 4
        assert report["message"] == [before, before + 99_999]
        assert report["part"] == (11 if rank < 2 else 1100)
        kinds = {str(other): same_host if other // 2 == rank // 2 else between_hosts for other in range(4)}
        del kinds[str(rank)]
        assert report["lanes"] == kinds
        assert report["local_lanes"] == {str(1 - rank % 2): same_host}


def test_hosts_without_a_secret_do_not_talk_in_clear_text_unless_told_to(hosts: Hosts, job: Job) -> None:
    for ended in finish_all([hosts.start(job, rank) for rank in (0, 2)]):
        assert ended.error.startswith("covey.ConfigError")
        assert hosts.addresses[0] in ended.error
        assert "`covey init`" in ended.error
        assert "insecure=True, --insecure or COVEY_INSECURE=1 allows it" in ended.error
    assert job.left_behind() == []


def test_ranks_share_memory_on_a_host_and_use_tcp_between_hosts(hosts: Hosts, job: Job) -> None:
    ranks = [hosts.start(job, rank, COVEY_INSECURE=1) for rank in range(4)]
    check([ended.report for ended in finish_all(ranks)], "shm")
    assert job.left_behind() == []


def test_ranks_of_a_launcher_that_share_a_secret_use_secure_lanes_between_hosts(hosts: Hosts, job: Job) -> None:
    ranks = [hosts.start(job, rank, COVEY_SECRET=SECRET) for rank in range(4)]
    check([ended.report for ended in finish_all(ranks)], "shm", "secure")
    assert job.left_behind() == []


def test_clear_text_cannot_be_forced_on_ranks_that_share_a_secret(hosts: Hosts, job: Job) -> None:
    ranks = [hosts.start(job, rank, COVEY_LANES="tcp", COVEY_SECRET=SECRET) for rank in range(4)]
    found = re.compile(
        r"covey\.ConfigError: (?:rank (\d) gave up: ConfigError: )?"
        r"lanes='tcp' is not encrypted, and rank (\d) is on another host"
    )
    for rank, ended in enumerate(finish_all(ranks)):
        told = found.match(ended.error)
        assert told is not None, ended.error
        finder = rank if told[1] is None else int(told[1])  # a rank that comes late is told what another has found
        assert int(told[2]) == (2 if finder < 2 else 0)
    assert job.left_behind() == []


def test_a_rank_with_another_secret_is_an_authentication_error_there_and_missing_here(hosts: Hosts, job: Job) -> None:
    first = hosts.start(job, 0, JOB.replace(f"timeout={DEADLINE}", "timeout=6"), COVEY_SECRET=SECRET)
    other = hosts.start(job, 2, COVEY_SECRET="5f" * 32)
    refused = finish(other)
    assert refused.error.startswith("covey.AuthError")
    assert "did not accept this cluster's secret" in refused.error
    missed = finish(first)
    assert missed.error.startswith("covey.DeadlineError")
    assert "until the timeout of 6 s ended" in missed.error


@pytest.mark.thorough
def test_tcp_can_be_forced_on_a_host_too_and_rank_0_may_come_last(hosts: Hosts, job: Job) -> None:
    ranks = {rank: hosts.start(job, rank, COVEY_INSECURE=1, COVEY_LANES="tcp") for rank in (3, 2, 1)}
    wait_until(lambda: len(list(job.temp.glob("covey-*/*.sock"))) == 3)
    ranks[0] = hosts.start(job, 0, COVEY_INSECURE=1, COVEY_LANES="tcp")
    check([finish(ranks[rank]).report for rank in range(4)], "tcp")
    assert job.left_behind() == []


@pytest.mark.parametrize(
    "arguments",
    [
        "rank={rank}, size=4, address='10.213.7.1:29500'",
        "rank={rank}, peers=['10.213.7.1:29500', '10.213.7.1:29501', '10.213.7.2:29500', '10.213.7.2:29501']",
    ],
    ids=["address", "peers"],
)
@pytest.mark.parametrize("secured", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_ranks_that_a_program_places_meet_at_the_address_it_names(
    hosts: Hosts, job: Job, arguments: str, secured: bool
) -> None:
    env: dict[str, object] = {"COVEY_SECRET": SECRET} if secured else {"COVEY_INSECURE": 1}
    given = [arguments.format(rank=rank) for rank in range(4)]
    codes = [JOB.replace("covey.join(", f"covey.join({each}, ") for each in given]
    ranks = [hosts.start(job, rank, code, RANK=0, WORLD_SIZE=9, **env) for rank, code in enumerate(codes)]
    check([ended.report for ended in finish_all(ranks)], "shm", "secure" if secured else "tcp")
    assert job.left_behind() == []


def test_a_machine_finds_its_own_address_among_the_peers(hosts: Hosts, job: Job) -> None:
    code = """
import covey
with covey.join(peers=["10.213.7.1:29500", "10.213.7.2:29500"], timeout=500) as group:
    print([group.rank, group.size, group.local_rank, group.all_reduce(10 ** group.rank)])
"""
    ranks = [hosts.start(job, rank, code, COVEY_SECRET=SECRET) for rank in (2, 0)]
    assert [ended.report for ended in finish_all(ranks)] == [[1, 2, 0, 11], [0, 2, 0, 11]]


@pytest.mark.parametrize("lanes", ["shm", pytest.param("unix", marks=pytest.mark.thorough)])
def test_lanes_that_cannot_leave_a_host_are_refused_between_hosts(hosts: Hosts, job: Job, lanes: str) -> None:
    ranks = [hosts.start(job, rank, COVEY_INSECURE=1, COVEY_LANES=lanes) for rank in range(4)]
    for rank, ended in enumerate(finish_all(ranks)):
        other = 2 if rank < 2 else 0
        assert f"ConfigError: lanes='{lanes}' works on one host only, but rank {other} is on another" in ended.error
    assert job.left_behind() == []


def test_a_rank_on_another_host_that_does_not_come_is_named(hosts: Hosts, job: Job) -> None:
    code = """
import covey, json
try:
    covey.join(timeout=0.8)
except covey.DeadlineError as error:
    print(json.dumps([error.late, str(error)]))
"""
    ranks = [hosts.start(job, rank, code, COVEY_INSECURE=1) for rank in (0, 1, 2)]
    for ended in finish_all(ranks):
        late, text = ended.report
        assert 3 in late
        assert "same job id, address, or MASTER_ADDR and MASTER_PORT" in text
    assert job.left_behind() == []


def test_two_sizes_on_two_hosts_are_an_error_on_both(hosts: Hosts, job: Job) -> None:
    ranks = [hosts.start(job, 0, COVEY_INSECURE=1), hosts.start(job, 2, COVEY_INSECURE=1, WORLD_SIZE=3)]
    for ended in finish_all(ranks):
        assert "ConfigError" in ended.error
        assert "size is 3 on rank 2 and 4 on rank 0" in ended.error
    assert job.left_behind() == []


def test_a_host_that_vanishes_is_noticed_by_the_ranks_on_the_other(hosts: Hosts, job: Job) -> None:
    code = JOB.replace(
        "    x = np.arange",
        """
    print(json.dumps("here") + "\\n", end="", flush=True)
    if group.rank >= 2:
        sys.stdin.read()
    x = np.arange""",
        1,
    )
    ranks = [hosts.start(job, rank, code, COVEY_INSECURE=1) for rank in range(4)]
    for process in ranks:
        assert json.loads(pipes.stdout(process).readline()) == "here"
    for process in ranks[2:]:
        process.kill()
    for ended in finish_all(ranks[:2]):
        assert "PeerLostError: rank " in ended.error
        assert socket.gethostname() in ended.error
