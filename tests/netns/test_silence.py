"""A machine that falls silent is noticed; one that is only busy is not taken for dead."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.nodes import Cluster

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
import ctypes, json, os, sys
import numpy as np
import covey

with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    x = np.ones(1000)
    group.all_reduce(x)
    print(json.dumps(group.rank), flush=True)
    if group.rank == 1:
        gate = os.open(os.environ["GATE"], os.O_RDWR)
        ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)  # and keeps the interpreter's lock
    group.all_reduce(x)
    print(json.dumps([group.rank, float(x[0])]))
"""


@pytest.mark.parametrize("is_launched", [False, True], ids=["agreed", "launched"])
def test_a_pulled_cable_is_noticed_on_both_sides_in_five_seconds(
    is_launched: bool, promised: Callable[[float], float]
) -> None:
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
        assert time.monotonic() - start < promised(6.0)
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        for rank, lost, text in map(json.loads, outcomes):
            assert lost == 1 - rank
            assert f"rank {lost} " in text


def test_a_process_that_keeps_the_interpreters_lock_for_8_seconds_is_not_dead(tmp_path: Path) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    with Lan(hosts=2, kind="switch") as lan:
        cluster = Cluster()
        nodes = [cluster.start(host, code=BUSY, env={"GATE": str(gate)}, size=2) for host in lan.hosts]
        assert sorted(pipes.stdout(node.process).readline() for node in nodes) == ["0\n", "1\n"]
        time.sleep(8)  # more than the silence after which a machine is taken for dead
        with gate.open("r+b", buffering=0) as opened:
            opened.write(b"x")
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert sorted(json.loads(out) for _, out, _ in ends) == [[0, 4.0], [1, 4.0]]
