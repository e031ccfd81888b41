"""Ranks that die, stop, raise or leave: everyone else hears of it at once, by name, and nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.e2e.ranks import LANES, Ranks, attempt, multiprocessing, run_ranks, say

import covey

pytestmark = pytest.mark.slow

VICTIM = 1
SURVIVORS = (0, 2)
NOTICE_SECONDS = 1.0
"""How soon every other rank must know that one is gone."""
OPERATIONS = {
    "all_reduce": "all_reduce(float32[1048577], op=sum, weighted=False)",
    "all_gather": "all_gather(float32)",
    "broadcast from the victim": "broadcast(float32[1048577], root=1)",
    "broadcast to the victim": "broadcast(float32[1048577], root=0)",
    "reduce_scatter": "reduce_scatter(float32[1048577], op=sum)",
    "async all_reduce": "all_reduce(float32[1048577], op=sum, weighted=False)",
    "barrier": "barrier()",
    "gather_object": "gather_object(root=0)",
    "recv from the victim": "point-to-point",
    "recv from anyone": "point-to-point",
    "send to the victim": "point-to-point",
}
"""What ranks do when the victim dies, and how errors call it."""


def work_side_by_side(names: list[str], victim: int) -> dict[str, Any]:
    """Do every operation of `names` for ever, each in a group and a thread of its own."""
    with covey.join() as group:
        x = np.arange(1048577, dtype=np.float32) + group.rank

        def loop(name: str, group: covey.Group) -> None:
            mine, is_victim = x.copy(), group.rank == victim
            while True:
                match name:
                    case "all_reduce":
                        group.all_reduce(mine)
                    case "async all_reduce":
                        group.all_reduce(mine, async_op=True).wait()
                    case "all_gather":
                        group.all_gather(mine)
                    case "reduce_scatter":
                        group.reduce_scatter(mine)
                    case "broadcast from the victim":
                        group.broadcast(mine, root=victim)
                    case "broadcast to the victim":
                        group.broadcast(mine, root=0)
                    case _ if is_victim:  # never comes
                        threading.Event().wait()
                    case "barrier":
                        group.barrier()
                    case "gather_object":
                        group.gather_object({"rank": group.rank})
                        group.barrier()
                    case "recv from the victim":
                        group.recv(src=victim, tag=3)
                    case "recv from anyone":
                        group.recv()
                    case "send to the victim":
                        group.send(mine, dst=victim)
                rounds[name] += 1

        def watch(name: str, group: covey.Group) -> None:
            first = attempt(lambda: loop(name, group))
            reports[name] = first, attempt(group.barrier), attempt(lambda: group.send(x[:1], dst=victim))

        groups = {name: group.split(0) for name in names}
        rounds, reports = dict.fromkeys(names, 0), {}
        threads = [threading.Thread(target=watch, args=pair, daemon=True) for pair in groups.items()]
        for thread in threads:
            thread.start()
        moving = [name for name in names if name in ("all_reduce", "all_gather", "reduce_scatter", "async all_reduce")]
        while min((rounds[name] for name in moving), default=1) < 1:
            time.sleep(0.001)
        say("working")
        for thread in threads:
            thread.join()
        return {"idle": (attempt(group.barrier), attempt(group.barrier)), **reports}


@pytest.mark.parametrize("lanes", LANES)
def test_everyone_hears_of_a_killed_rank_in_every_operation(lanes: str) -> None:
    with Ranks(3, work_side_by_side, list(OPERATIONS), VICTIM, lanes=lanes) as ranks:
        ranks.hear("working")
        killed_at = ranks.kill(VICTIM)
        for rank, report in zip(SURVIVORS, ranks.results(SURVIVORS), strict=True):
            for name, expected in {**OPERATIONS, "idle": "barrier()"}.items():
                first, *later = report[name]
                assert first["error"] == "PeerLostError", (rank, name, first)
                assert first["rank"] == VICTIM
                assert first["host"] == os.uname().nodename
                assert first["operation"] == expected, (rank, name)
                assert first["sequence"] >= (0 if expected == "point-to-point" else 1)
                assert f"rank {VICTIM} " in first["text"]
                assert str(ranks.pid(VICTIM)) in first["text"]
                if name != "idle":  # which is asked last
                    assert first["at"] - killed_at < NOTICE_SECONDS, (rank, name)
                for further in later:
                    assert (further["error"], further["cause"]) == ("ClosedError", "PeerLostError"), (rank, name)
