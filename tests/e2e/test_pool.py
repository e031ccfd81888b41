"""Processes whose memory for payloads is used up: what they ask for comes, the rest waits, and no call hangs."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Ranks, await_go, say
from tests.support.waiting import DEADLINE

import covey
from covey.runtime.pool import pool
from covey.testing import run_threads

POOL_BYTES = 1 << 20
LARGE = 75_000
"""Elements of arguments: 300 kB as float32."""
VICTIM = 1
AT_A_TIME = 12
"""Calls of a rank to each other rank."""


def call_all(victim: int, rounds: int, pool_bytes: int, large: int, at_a_time: int) -> Any:
    """Call all other ranks, whose functions call further ones, while the program holds more than the pool may have."""
    from collections import Counter

    from covey.runtime.pool import pool

    with covey.join() as group:
        node, lock = group.node, threading.Lock()
        running, most = Counter[str](), Counter[str]()
        others = [rank for rank in range(group.size) if rank != group.rank]

        def counted(name: str, begin: bool) -> None:
            with lock:
                running[name] += 1 if begin else -1
                most[name] = max(most[name], running[name])

        def add(x: np.ndarray) -> float:
            counted("add", begin=True)
            try:
                return float(x.sum())
            finally:
                counted("add", begin=False)

        def pass_on(x: np.ndarray, rank: int) -> float:
            counted("pass_on", begin=True)
            try:
                return float(node.call(rank, "add_passed", x + 1))
            finally:
                counted("pass_on", begin=False)

        def add_passed(x: np.ndarray) -> float:
            counted("add_passed", begin=True)
            try:
                return float(x.sum())
            finally:
                counted("add_passed", begin=False)

        def back(x: np.ndarray) -> np.ndarray:
            return x[::-1]

        for function in (add, pass_on, add_passed, back):
            node.register(function.__name__, function)
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        held = group.sendrecv(np.full(pool_bytes, float(group.rank)), after, before)
        group.barrier()
        wrong: list[str] = []

        def a_round(number: int) -> Counter[str]:
            made: list[tuple[int, float, Any]] = []
            ended = Counter[str]()
            for turn in range(at_a_time):
                for rank in others:
                    x = np.full(large, float(group.rank + rank + turn + number), np.float32)
                    third = next(each for each in range(group.size) if each not in (rank, group.rank))
                    if turn % 2:
                        made.append((rank, float((x + 1).sum()), node.call_async(rank, "pass_on", x, third)))
                    else:
                        made.append((rank, float(x.sum()), node.call_async(rank, "add", x)))
            for rank, expected, work in made:
                try:
                    if (got := work.wait()) != expected:
                        wrong.append(f"rank {rank} returned {got}, not {expected}")
                    ended["right"] += 1
                except covey.PeerLostError:
                    ended["lost"] += 1
                except covey.RemoteCallError as error:  # a function lost the rank that it called
                    if "PeerLostError" not in str(error):
                        wrong.append(str(error))
                    ended["lost"] += 1
            return ended

        for number in range(rounds):
            if a_round(number)["lost"]:
                wrong.append("a call lost its rank before one was killed")
            x = np.arange(large, dtype=np.float32) + group.rank + number
            if not np.array_equal(group.sendrecv(x, after, before), x + before - group.rank):
                wrong.append(f"a message of round {number}")
            if not np.array_equal(node.call(after, "back", x[::2]), x[::2][::-1]):
                wrong.append(f"a result of round {number}")
        used_up = dict(most)
        say("half", most=used_up, waits=pool.waits)
        if group.rank == victim:
            while True:
                a_round(0)
        ended = Counter[str]()
        while victim in group.live:
            ended += a_round(0)
        ended += a_round(0)
        del held
        say("over", wrong=wrong, right=ended["right"], lost=ended["lost"], most=dict(most))
        await_go()
        deadline = time.monotonic() + DEADLINE
        while pool.used_bytes or pool.reserved_bytes:
            assert time.monotonic() < deadline, (pool.used_bytes, pool.reserved_bytes)
            time.sleep(0.01)
        say("free", kept=pool.idle_bytes, most=pool.most_bytes)
        await_go()
    return None


@pytest.mark.parametrize(
    ("lanes", "rounds"),
    [("unix", 2), *(pytest.param(each, 60, marks=pytest.mark.thorough) for each in ("unix", "secure"))],
)
def test_calls_all_to_all_end_though_the_memory_is_used_up_also_when_a_rank_is_killed(lanes: str, rounds: int) -> None:
    env = {"COVEY_ON_LOSS": "continue", "COVEY_POOL_BYTES": str(POOL_BYTES)}
    with Ranks(4, call_all, VICTIM, rounds, POOL_BYTES, LARGE, AT_A_TIME, lanes=lanes, env=env) as ranks:
        for told in ranks.hear("half", range(4)):
            assert told["waits"] > 10
            assert set(told["most"].values()) == {1}, "at each depth one call has memory: the program has all the rest"
        ranks.kill(VICTIM)
        for told in ranks.hear("over", (0, 2, 3)):
            assert told["wrong"] == []
            assert told["lost"] > 0
            assert told["right"] > AT_A_TIME
        for rank in (0, 2, 3):
            ranks.go(rank)
        for told in ranks.hear("free", (0, 2, 3)):
            assert told["kept"] <= told["most"] * 5 // 4
        for rank in (0, 2, 3):
            ranks.go(rank)


def test_answers_do_not_wait_behind_arguments_for_which_there_is_no_memory() -> None:
    large, made = 3 * 50_000, 60
    settings = {"pool_bytes": 1, "credit_bytes": 2 << 20}

    def body(group: covey.Group) -> list[float]:
        node, other = group.node, 1 - group.rank
        group.barrier()

        @node.rpc
        def ask_back(*parts: np.ndarray, number: int) -> float:
            return sum(float(part.sum()) for part in parts) + float(node.call(other, "answer", number).sum())

        @node.rpc
        def answer(number: int) -> np.ndarray:
            return np.full(60_000, number % 200, np.uint8)

        group.barrier()
        arguments = [np.full(50_000, 1 + group.rank + part, np.uint8) for part in range(3)]
        works = [node.call_async(other, "ask_back", *arguments, number=number) for number in range(made)]
        results = [work.wait() for work in works]
        group.barrier()
        return results

    assert made * large > 2 * settings["credit_bytes"]
    for rank, results in enumerate(run_threads(2, body, lanes="unix", settings=settings, timeout=DEADLINE)):
        sent = 50_000.0 * sum(1 + rank + part for part in range(3))
        assert results == [sent + 60_000 * number for number in range(made)]


def test_a_fork_has_the_arrays_of_its_parent_and_a_pool_of_its_own() -> None:
    array = pool.take(100_000)
    array[:] = 7
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            taken.set()
            release.wait(DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(DEADLINE)
    child = os.fork()
    if child == 0:
        used = pool.used_bytes
        other = pool.take(100_000)
        other[:] = 8
        is_right = bool((array == 7).all()) and pool.used_bytes > used
        array[:] = 9
        del other
        os._exit(0 if is_right and pool.used_bytes == used else 1)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 7).all()
