"""What is urgent does not wait for bulk that fills a slow line."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import pytest
from tests.support import pipes
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

PREFIX = "covey-first"
QUEUE_SECONDS = 0.1
LINE = "1gbit/40mbit"
"""What the second host sends and receives: the queue is on the way, and not in the sender."""
PROGRAM = """
import json, sys, time
import numpy as np
import covey
options = json.loads(sys.argv[1])
count, bulk, urgent = options.pop("count"), options.pop("bulk"), options.pop("urgent")

def perform(is_over):
    # What is urgent, once. Whether it was the last time.
    if urgent == "call":
        assert group.node.call(1, "double", 21) == 42
    elif urgent == "sum":
        return first.all_reduce(np.array([int(is_over), 1])).tolist()[0] > 0
    elif group.rank == 0:
        group.send(np.array([is_over]), 1, 5, priority="critical")
        return bool(group.recv(1, 6)[0])
    else:
        is_over = group.recv(0, 5)
        group.send(is_over, 0, 6, priority="critical")
    return bool(is_over)

def timed(is_over=False):
    began = time.perf_counter()
    perform(is_over)
    return time.perf_counter() - began

with covey.join(**options) as group:
    @group.node.rpc
    def double(x: int) -> int:
        return 2 * x

    mine = (np.arange(count) % 251).astype(np.float32)
    first = group.split(0, priority="critical")
    group.barrier()
    idle = [timed() for _ in range(300)] if group.rank == 0 or urgent != "call" else []
    group.barrier()
    began, ended, beside = time.perf_counter(), [], []
    if bulk == "broadcast":
        x = mine if group.rank == 0 else np.zeros_like(mine)
        work = group.broadcast(x, 0, async_op=True)
    elif group.rank == 0:
        work = group.send(mine, 1, async_op=True)
    else:
        work = group.recv(0, out=np.empty_like(mine), async_op=True)
    work.add_done_callback(lambda _: ended.append(time.perf_counter() - began))
    while group.rank == 0 and not work.done():
        beside.append([time.perf_counter() - began, timed()])
        time.sleep(0.005)
    if group.rank == 0:
        timed(is_over=True)
    while group.rank == 1 and urgent != "call" and not perform(False):
        pass
    is_right = group.rank == 0 or bool((work.wait() == mine).all())
    work.wait()
    group.barrier()
print(json.dumps({"idle": idle, "beside": beside, "took": ended[0], "right": is_right}))
"""


def run(lan: Lan, count: int, bulk: str, urgent: str = "call") -> list[dict[str, Any]]:
    place = {"size": 2, "address": f"{lan.hosts[0].ip4}:47900", "secret": "0" * 64}
    place |= {"count": count, "bulk": bulk, "urgent": urgent}
    processes = [
        host.popen([sys.executable, "-c", PROGRAM, json.dumps({"rank": rank, **place})])
        for rank, host in enumerate(lan.hosts)
    ]
    said = pipes.reports(processes, DEADLINE)
    assert all(each["right"] for each in said)
    return said


@pytest.mark.parametrize(
    ("urgent", "bulk"),
    [
        ("message", "message"),
        ("sum", "broadcast"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("call", "message"), ("call", "broadcast"))),
    ],
)
def test_what_is_urgent_does_not_wait_in_the_queue_that_a_transfer_fills(urgent: str, bulk: str) -> None:
    with Lan(hosts=2, prefix=PREFIX) as lan:
        lan.shape(lan.hosts[1], LINE, queue=f"{1000 * QUEUE_SECONDS:g}ms")
        said = run(lan, 3_000_000, bulk, urgent)[0]
    beside = [taken for at, taken in said["beside"] if at > 0.6]  # the queue is full once before it is seen
    assert len(beside) > 5
    # A queue that stays full would cost all of them 0.1 s each.
    assert statistics.median(beside) < 0.5 * QUEUE_SECONDS, sorted(beside)


@pytest.mark.thorough
@pytest.mark.alone
def test_99_of_100_small_calls_beside_a_transfer_take_8_ms_more_than_alone_at_most() -> None:
    with Lan(hosts=2, prefix=PREFIX) as lan:
        lan.shape(lan.hosts[1], LINE, queue=f"{1000 * QUEUE_SECONDS:g}ms")
        said = run(lan, 10_000_000, "message")[0]
    beside, idle = [taken for at, taken in said["beside"] if at > 0.6], said["idle"]
    slow, slow_alone = (sorted(times)[int(0.99 * len(times))] for times in (beside, idle))
    assert slow < 0.008 + slow_alone
    assert said["took"] < 1.15 * 4e7 * 8 / 40e6  # headers take 5 %
