"""Groups and forked processes: the child cannot use the group, and does not disturb the parent's."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import LANES, Lived, attempt, run_ranks
from tests.support.sets import only

import covey


def fork_in_the_middle() -> Any:
    """Fork with all sorts of lanes open, use the group in the child in every way, and go on in the parent."""

    def in_child(use: Any) -> Any:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(500)
            report = use()
            os.write(writer, json.dumps(report).encode())
            sys.exit(7)  # in good order: what runs at exit must not say goodbye in the parent's name
        os.close(writer)
        with open(reader, "rb") as pipe:
            report = json.loads(pipe.read() or b"null")
        return report, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def use_everything() -> list[Any]:
        began, lived = time.monotonic(), Lived()
        uses = (
            lambda: group.all_reduce(x),
            lambda: group.barrier(),
            lambda: group.all_reduce(x, async_op=True),
            lambda: group.send(x, dst=1 - group.rank),
            lambda: group.recv(),
            lambda: group.split(0),
            lambda: pair.barrier(),
            lambda: pair.recv(),
        )
        reports = [attempt(use)["error"] for use in uses]
        text = attempt(group.barrier)["text"]
        pair.close()
        group.close()
        group.close()
        return [reports, text, Lived.between(lived.moments, began, time.monotonic())]

    with covey.join() as group:
        x = np.arange(5.0) + group.rank
        pair = group.split(0)
        work = pair.all_reduce(x.copy(), async_op=True)
        group.send(x, dst=1 - group.rank)
        group.recv(src=1 - group.rank)
        group.all_reduce(x.copy())
        work.wait()
        reports = [in_child(use_everything), in_child(lambda: "nothing used")]
        pending = group.all_reduce(np.ones(1000), async_op=True)
        reports.append(in_child(lambda: attempt(lambda: group.all_reduce(x))["error"]))
        pending.wait()
        with multiprocessing.get_context("fork").Pool(2) as pool:
            squares = pool.map(abs, [-1, -2, -3])
            total = group.all_reduce(x.copy()).tolist()
            squares += pool.map(abs, [-4])
        for _ in range(20):  # children that come and go while operations run
            child = os.fork()
            if not child:
                os._exit(0)
            pair.all_reduce(x.copy())
            os.waitpid(child, 0)
        group.send(x, dst=1 - group.rank)
        return reports, squares, total, group.recv(src=1 - group.rank).tolist()


@pytest.mark.parametrize("lanes", only(["shm"], LANES))
def test_a_forked_child_cannot_use_the_group_and_does_not_disturb_it(lanes: str) -> None:
    for rank, (reports, squares, total, message) in enumerate(run_ranks(2, fork_in_the_middle, lanes=lanes)):
        (used, untouched, while_pending) = reports
        (errors, text, seconds), code = used
        assert errors == ["ClosedError"] * 8
        assert "forked" in text
        assert seconds < 1.0
        assert code == 7
        assert untouched == ["nothing used", 7]
        assert while_pending == ["ClosedError", 7]
        assert squares == [1, 2, 3, 4]
        assert total == [1.0, 3.0, 5.0, 7.0, 9.0]
        assert message == (np.arange(5.0) + 1 - rank).tolist()


def compute_in_a_pool() -> Any:
    """A data loader's pattern: a pool made before the group, one made after, both at work between operations."""
    before = multiprocessing.get_context("fork").Pool(1)
    with before, covey.join() as group, multiprocessing.get_context("fork").Pool(2) as after:
        total = 0.0
        for step in range(5):
            batch = after.starmap_async(pow, [(group.rank, 2)])
            group.barrier()
            total += group.all_reduce(float(batch.get(timeout=500)[0] + before.apply(pow, (step, 2))))
        return total


def test_pools_of_forked_workers_work_beside_a_group() -> None:
    assert run_ranks(3, compute_in_a_pool, lanes="shm") == [5 * (0 + 1 + 4) + 3 * (0 + 1 + 4 + 9 + 16)] * 3


def watch_descriptors() -> Any:
    """Tell which descriptors a forked child still has that its parent got from joining."""

    def descriptors() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/fd")}

    before = descriptors()
    with covey.join() as group:
        group.all_reduce(np.ones(5))
        group.split(0).barrier()
        group.send(np.ones(3), dst=1 - group.rank)
        group.recv()
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            kept = []
            for descriptor in descriptors() - before - {reader, writer}:
                with contextlib.suppress(OSError):  # the one that listed the folder
                    kept.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.write(writer, json.dumps([name for name in kept if name.startswith("socket:")]).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            kept = json.loads(pipe.read())
        os.waitpid(child, 0)
        group.barrier()
        return kept, threading.active_count()


@pytest.mark.parametrize("lanes", only(["secure"], LANES))
def test_a_forked_child_keeps_none_of_the_sockets(lanes: str) -> None:
    for kept, _ in run_ranks(2, watch_descriptors, lanes=lanes):
        assert len(kept) <= 2, kept  # the event loop's own pair, which leads nowhere
