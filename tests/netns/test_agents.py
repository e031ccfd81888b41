"""Agents on machines of their own, on a network without multicast: nodes of a run find each other through them."""

from __future__ import annotations

import os
import secrets
import sys
from unittest.mock import patch

import pytest
from tests.support import pipes
from tests.support.jobs import SOURCE, finish
from tests.support.waiting import DEADLINE

from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import id_text, own_machine
from covey.testing.netns import Lan
from covey.wire.secret import ClusterSecret

TRAIN = """
import covey
with covey.join() as group:
    print("sum", group.all_reduce(10 ** group.rank), group.lanes(), flush=True)
"""


@pytest.mark.thorough
def test_one_seed_is_enough_to_start_a_run_on_all_machines() -> None:
    with Lan(hosts=3, kind="switch") as lan:
        lan.switch.allow_multicast(False)
        desk, north, south = lan.hosts
        key = secrets.token_bytes(32)
        machines: list[bytes] = []
        for host in lan.hosts:
            with patch.dict(os.environ, COVEY_HOME=str(host.home)):
                clusters.save(Cluster(ClusterSecret("home", key)))
                machines.append(own_machine())
        (desk.temp / "train.py").write_text(TRAIN)
        env = {"PYTHONPATH": str(SOURCE)}
        covey = [sys.executable, "-m", "covey"]
        for host, options in ((north, []), (south, ["--seeds", north.ip4])):
            agent = host.popen([*covey, "up", "--allow", "all", *options], env=env)
            assert "is up" in pipes.stdout(agent).readline(), pipes.stderr(agent).read()
        ids = ",".join(map(id_text, machines[1:]))
        there = ["sh", "-c", f"cd {desk.temp} && exec {sys.executable} -m covey run --on {ids} --yes train.py"]
        terminal = desk.popen(there, env=env | {"COVEY_SEEDS": north.ip4})
        ended = finish(terminal, DEADLINE)
        assert ended.code == 0, ended.err
        assert sorted(line.partition("] ")[2] for line in ended.out.splitlines()) == [
            "sum 11 {0: 'secure'}",
            "sum 11 {1: 'secure'}",
        ], ended
