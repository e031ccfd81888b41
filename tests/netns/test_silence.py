"""A machine that falls silent is noticed; one that is only busy is not taken for dead."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.support import pipes
from tests.support.nodes import Cluster

from covey.testing.netns import Lan

WORK = """
import json, sys, time
import numpy as np
import covey

with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    x = np.ones(1000)
    group.all_reduce(x)
    print(json.dumps("going"), flush=True)
    try:
        while True:
            x[:] = group.rank
            group.all_reduce(x)
            assert (x == 1.0).all()
            time.sleep(0.05)
    except covey.PeerLostError as error:
        print(json.dumps([group.rank, error.rank, str(error)]), flush=True)
"""

BUSY = """
import ctypes, json, sys, time
import numpy as np
import covey

with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    x = np.ones(1000)
    group.all_reduce(x)
    if group.rank == 1:
        ctypes.PyDLL(None).sleep(8)  # and keeps the interpreter's lock: nothing else of this process runs
    start = time.monotonic()
    group.all_reduce(x)
    print(json.dumps([group.rank, float(x[0]), time.monotonic() - start]))
"""


@pytest.mark.parametrize("is_launched", [False, True], ids=["agreed", "launched"])
def test_a_pulled_cable_is_noticed_on_both_sides_in_five_seconds(is_launched: bool) -> None:
    with Lan(hosts=2, kind="switch") as lan:
        cluster = Cluster()
        settings = [
            {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": lan.hosts[0].ip4}
            for rank in range(2)
        ]
        code = WORK.replace("sys.argv[2], **json.loads(sys.argv[3])", "") if is_launched else WORK
        options: dict[str, Any] = {} if is_launched else {"size": 2}
        nodes = [
            cluster.start(host, code=code, env=env if is_launched else {}, **options)
            for host, env in zip(lan.hosts, settings, strict=True)
        ]
        for node in nodes:
            assert json.loads(pipes.stdout(node.process).readline()) == "going", pipes.stderr(node.process).read()
        lan.switch.cut("host1")
        start = time.monotonic()
        outcomes = [pipes.stdout(node.process).readline() for node in nodes]
        assert time.monotonic() - start < 6
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        for rank, lost, text in map(json.loads, outcomes):
            assert lost == 1 - rank
            assert f"rank {lost} " in text


def test_a_process_that_keeps_the_interpreters_lock_for_8_seconds_is_not_dead() -> None:
    with Lan(hosts=2, kind="switch") as lan:
        cluster = Cluster()
        ends = [node.end() for node in [cluster.start(host, code=BUSY, size=2) for host in lan.hosts]]
        assert [code for code, _, _ in ends] == [0, 0], ends
        reports = sorted(json.loads(out) for _, out, _ in ends)
        assert [(rank, total) for rank, total, _ in reports] == [(0, 4.0), (1, 4.0)]
        assert reports[0][2] > 6
