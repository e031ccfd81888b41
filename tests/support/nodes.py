"""Programs that join a run and report what they found there, on hosts of a test network."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import pipes
from tests.support.jobs import finish
from tests.support.waiting import DEADLINE, wait_until

from covey.net.keys.identity import NodeIdentity

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from covey.testing.netns import Host

SOURCE = Path(__file__).parents[2] / "src"
ELEMENTS = 100_003
PORT = 47700
"""The first that a node listens at."""
JOB = f"""
import json, sys, time
import numpy as np
import covey

host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
print(json.dumps("ready"), flush=True)
with covey.join(run, **options) as group:
    first = group.all_reduce(10 ** group.rank)
    report = dict(first=first, first_at=time.monotonic(), host=host, rank=group.rank, size=group.size)
    x = np.arange({ELEMENTS}, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    report |= dict(sums=[float(x[1]), float(x[-1])], hosts=group.all_gather_object(host), lanes=group.lanes())
    report |= dict(local_rank=group.local_rank)
print(json.dumps(report))
"""


@dataclass
class Node:
    """One process that joins a run."""

    host: Host
    process: subprocess.Popen[str]
    started_at: float = field(default_factory=time.monotonic)

    def wait_until_joining(self) -> None:
        """Return when the program is about to join."""
        line = pipes.stdout(self.process).readline()
        assert line == '"ready"\n', pipes.stderr(self.process).read()

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit code, output and errors."""
        ended = finish(self.process, DEADLINE)
        return ended.code, ended.out, ended.err


@dataclass
class Cluster:
    """A secret that nodes share, and how they are started: with nothing else, unless a test says so."""

    name: str = ""
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def start(
        self, host: Host, run: str = "my-run", *, code: str = JOB, env: dict[str, str] | None = None, **options: Any
    ) -> Node:
        """Start a program on a host that calls `covey.join(run, **options)`."""
        settings = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": self.secret}
        if self.name:
            settings["COVEY_CLUSTER"] = self.name
        argv = [sys.executable, "-c", code, str(host.index), run, json.dumps(options)]
        return Node(host, host.popen(argv, env=settings | (env or {})))


def wait_until_listening(host: Host) -> None:
    """Return when the first node of a host can be reached."""

    def is_reached() -> bool:
        with host.socket() as probe:
            probe.settimeout(DEADLINE)
            return probe.connect_ex((host.ip4, PORT)) == 0

    wait_until(is_reached)


def check_run(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Wait until nodes end; assert that they made one run, numbered by node id, with right sums over secure lanes.

    Returns their reports by rank. For one node a host: ranks of one host would be adjacent.
    """
    reports = check_members(nodes)
    ids = {node.host.index: node_id(node.host) for node in nodes}
    assert reports[0]["hosts"] == sorted(ids, key=ids.__getitem__)
    for rank, report in enumerate(reports):
        assert report["lanes"] == {str(other): "secure" for other in range(len(nodes)) if other != rank}
        assert report["local_rank"] == 0
    return reports


def check_members(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Wait until nodes end; assert that all are in one run, agree on their ranks, and got the right sums."""
    ends = [node.end() for node in nodes]
    story = "\n".join(f"host{node.host.index}: {end}" for node, end in zip(nodes, ends, strict=True))
    assert all(code == 0 for code, _, _ in ends), story
    reports = sorted((json.loads(out.splitlines()[-1]) for _, out, _ in ends), key=lambda report: report["rank"])
    size = len(nodes)
    assert [report["rank"] for report in reports] == list(range(size)), story
    factor = size * (size + 1) / 2
    for report in reports:
        assert report["size"] == size
        assert report["hosts"] == [other["host"] for other in reports]
        assert report["first"] == int("1" * size)
        assert report["sums"] == [factor, factor * (ELEMENTS - 1)]
    return reports


def seconds_to_first_result(node: Node, reports: Sequence[dict[str, Any]]) -> float:
    """Return how long after the start of `node` the last of all had the result of the first all_reduce."""
    return float(max(report["first_at"] for report in reports)) - node.started_at


def node_id(host: Host) -> bytes:
    """Return the identity that the one process on a host had."""
    with NodeIdentity.acquire(host.home / "identities") as identity:
        return identity.id
