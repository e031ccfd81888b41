"""`--limit`: what a machine sends is capped, whatever moves it, and results and small calls do not suffer."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import pytest
from tests.support import forked
from tests.support.ranks import Ranks, attempt
from tests.support.waiting import DEADLINE

import covey

LIMIT = "32M"
PER_RANK = 32e6 / 8 / 2
"""Bytes a second: two ranks of one machine share the limit."""
FREE_BYTES = 10 * 65536
"""What TCP sends on loopback before it knows a round trip, and the kernel spaces nothing out."""


def move(count: int) -> dict[str, Any]:
    with covey.join() as group:
        node = group.node

        @node.rpc
        def echo(x: np.ndarray) -> np.ndarray:
            return x + 1

        group.barrier()
        mine = np.arange(count, dtype=np.float32) * (group.rank + 1)
        began = time.monotonic()
        total = group.all_reduce(mine.copy())
        taken = {"sum": time.monotonic() - began}
        is_right = bool((total == np.arange(count, dtype=np.float32) * 3).all())
        group.barrier()
        began = time.monotonic()
        if group.rank == 0:
            group.send(mine, 1)
        else:
            is_right &= bool((group.recv(0, out=np.empty_like(mine)) == mine / 2).all())
        taken["message"] = time.monotonic() - began
        group.barrier()
        began = time.monotonic()
        if group.rank == 0:
            is_right &= bool((node.call(1, "echo", mine) == mine + 1).all())
        taken["call"] = time.monotonic() - began
        group.barrier()
        return {"right": is_right, "taken": taken, "lanes": sorted(set(group.lanes().values()))}


@pytest.mark.parametrize(
    ("lanes", "native"),
    [
        ("tcp", "1"),
        ("secure", "0"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("tcp", "0"), ("secure", "1"))),
    ],
)
def test_sums_messages_and_calls_take_at_least_as_long_as_the_limit_says(lanes: str, native: str) -> None:
    count = 500_000
    with Ranks(2, move, count, lanes=lanes, env={"COVEY_LIMIT": LIMIT, "COVEY_NATIVE": native}) as ranks:
        reports = ranks.results()
        ranks.await_exit()
    least = (4 * count - FREE_BYTES) / PER_RANK * 0.75  # of the limit, what was saved for a quarter of a second
    for report in reports:
        assert report["right"]
        assert report["lanes"] == [lanes]
        assert report["taken"]["sum"] > least, report
    for what in ("message", "call"):
        assert max(report["taken"][what] for report in reports) > least, reports


def send_to_the_limited(count: int, limit: str) -> dict[str, Any]:
    is_limited = os.environ["COVEY_RANK"] == "1"
    with covey.join(limit=limit if is_limited else None) as group:
        group.barrier()
        began, mine, is_right = time.monotonic(), np.arange(count, dtype=np.float32), True
        if is_limited:
            is_right = bool((group.recv(0, out=np.empty_like(mine)) == mine).all())
        else:
            group.send(mine, 1)
        taken = time.monotonic() - began
        group.barrier()
        return {"right": is_right, "taken": taken}


@pytest.mark.parametrize("lanes", ["tcp", "secure"])
def test_peers_send_no_faster_to_a_machine_than_its_limit_says(lanes: str) -> None:
    count = 1_500_000
    with Ranks(2, send_to_the_limited, count, LIMIT, lanes=lanes) as ranks:
        reports = ranks.results()
        ranks.await_exit()
    assert all(report["right"] for report in reports)
    # What was on its way before the sender heard of its share is made up for, in part after this message.
    assert max(report["taken"] for report in reports) > (4 * count - 2 * FREE_BYTES) / PER_RANK * 0.75, reports


def test_lanes_that_leave_no_machine_have_no_limit() -> None:
    with Ranks(2, move, 2_000_000, lanes="unix", env={"COVEY_LIMIT": "1M"}) as ranks:
        reports = ranks.results()  # 8 MB would take longer than the deadline
        ranks.await_exit()
    assert all(report["right"] for report in reports)


def call_meanwhile() -> dict[str, Any]:
    with covey.join() as group:
        node = group.node

        @node.rpc
        def double(x: int) -> int:
            return 2 * x

        group.barrier()
        node.call(1 - group.rank, "double", 1)  # opens the connection
        work = group.all_reduce(np.full(3_000_000, group.rank + 1.0, np.float32), async_op=True)  # at least 4 s
        answers = [node.call(1 - group.rank, "double", x) for x in range(20)]
        is_over = work.done()
        total = work.wait()
        group.barrier()
        return {"answers": answers, "over": is_over, "right": bool((total == 3).all())}


def test_small_calls_do_not_wait_for_tensors_that_fill_the_limit() -> None:
    with Ranks(2, call_meanwhile, lanes="tcp", env={"COVEY_LIMIT": LIMIT}) as ranks:
        reports = ranks.results()
        ranks.await_exit()
    assert reports == [{"answers": [2 * x for x in range(20)], "over": False, "right": True}] * 2


@pytest.mark.parametrize("wrong", ["20", "20Mbps", "1k"])
def test_a_limit_that_is_none_is_refused_before_anything_starts(wrong: str) -> None:
    command = [sys.executable, "-m", "covey", "run", "-n", "2", "--limit", wrong, "-m", "this"]
    ended = forked.run(command, capture_output=True, text=True, timeout=DEADLINE, env={**os.environ})
    assert ended.returncode != 0
    assert f"--limit={wrong!r}" in ended.stderr.replace("\n", " ")


def join_once() -> dict[str, Any]:
    return attempt(lambda: covey.join().close())


def test_a_limit_that_quic_would_not_keep_is_refused() -> None:
    pytest.importorskip("qh3")
    with Ranks(2, join_once, lanes="quic", env={"COVEY_LIMIT": LIMIT}) as ranks:
        for report in ranks.results():
            assert report["error"] == "ConfigError"
            assert "not with lanes='quic'" in report["text"]
