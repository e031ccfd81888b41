"""Calls between processes: under launchers and in a cluster, through losses and generations, beside a full network."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.jobs import finish, finish_all, new_job
from tests.support.ranks import Ranks, attempt, await_go, run_ranks, say
from tests.support.survivors import CoveyRun
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.lab.call_stress import CallStress, run

VICTIM = 1
BY_ITS_END = {"COVEY_HOST_SILENCE": "1000", "COVEY_PROCESS_SILENCE": "1000"}
"""Settings of callers that hear of the end of a process by what it leaves, or not at all."""

PROGRAM = """
import json, os
import numpy as np
import covey
from covey.runtime.joining.node import node_of

with covey.join({arguments}) as group:
    node = group.node

    @node.rpc
    def where(x: np.ndarray, by: float) -> dict:
        return {{"rank": group.rank, "sum": float(x.sum() * by), "caller": node.caller().rank}}

    group.barrier()
    x = np.arange(100_000.0)
    told = [node.call(rank, "where", x, by=rank + 1) for rank in range(group.size)]
    card, names = node_of(group).card, []
    for rank, (name, id) in enumerate(group.all_gather_object([card.name, card.id])):
        names += [node.call(each, "where", x[:2], 1)["rank"] == rank for each in (name, id) if {by_name}]
    report = {{"rank": group.rank, "told": told, "lanes": sorted(set(group.lanes().values())), "names": names}}
    group.barrier()
    os.write(1, json.dumps(report).encode() + b"\\n")
"""


def check_program(reports: list[Any], size: int) -> None:
    total = float(np.arange(100_000.0).sum())
    assert sorted(report["rank"] for report in reports) == list(range(size))
    for report in reports:
        wanted = [{"rank": rank, "sum": total * (rank + 1), "caller": report["rank"]} for rank in range(size)]
        assert report["told"] == wanted


@pytest.mark.thorough
def test_ranks_of_torchrun_call_each_other() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with new_job() as job:
        ended = finish(job.start(PROGRAM.format(arguments="", by_name=False), torchrun, OMP_NUM_THREADS=1))
    assert ended.code == 0, ended.err
    check_program([json.loads(line) for line in ended.out.splitlines()], 2)


@pytest.mark.parametrize(
    "lanes", ["auto", *(pytest.param(lane, marks=pytest.mark.thorough) for lane in ("secure", "quic"))]
)
def test_nodes_of_a_cluster_call_each_other(lanes: str) -> None:
    with new_job() as job:
        settings = {"COVEY_SECRET": secrets.token_hex(32), "COVEY_INTERFACES": "lo", "COVEY_LANES": lanes}
        settings["COVEY_RUN_PROGRAM"] = "calls.py"
        code = PROGRAM.format(arguments=f"'run-a', size=3, timeout={DEADLINE}", by_name=True)
        reports = [each.report for each in finish_all([job.start(code, **settings) for _ in range(3)])]
    check_program(reports, 3)
    assert all(report["names"] == [True] * 6 for report in reports), "by name and by id"
    if lanes != "auto":
        assert all(report["lanes"] == [lanes] for report in reports)


def call_a_victim(victim: int) -> Any:
    """Call the victim until it is lost, then the other rank; tell the errors."""
    with covey.join() as group:
        node, began = group.node, threading.Event()

        def wait() -> None:
            caller = node.caller()
            began.set()
            while not caller.is_cancelled:
                time.sleep(0.005)

        node.register("wait", wait)
        node.register("large", lambda x: float(x.sum()))
        group.barrier()
        if group.rank == victim:
            say("ready")
            await_go()
            return None
        works = [node.call_async(victim, "wait") for _ in range(3)]
        works += [node.call_async(victim, "large", np.ones(2 << 20)) for _ in range(4)]
        say("calling")
        waiting = attempt(works[0].wait)
        errors = {type(error).__name__ for work in works if (error := work.exception()) is not None}
        later = attempt(lambda: node.call(victim, "wait"))
        other = next(rank for rank in range(group.size) if rank not in (victim, group.rank))
        sums = node.call(other, "large", np.ones(1 << 20))
        say("over", waiting=waiting, errors=sorted(errors), later=later, sums=sums)
        await_go()
        return None


@pytest.mark.parametrize(("lanes", "on_loss"), [("unix", "raise"), ("secure", "continue")])
def test_calls_to_a_killed_process_raise_soon_and_calls_to_others_go_on(lanes: str, on_loss: str) -> None:
    with Ranks(3, call_a_victim, VICTIM, lanes=lanes, env={"COVEY_ON_LOSS": on_loss} | BY_ITS_END) as ranks:
        ranks.hear("calling", (0, 2))
        ranks.kill(VICTIM)
        for told in ranks.hear("over", (0, 2)):
            waiting = told["waiting"]
            assert waiting["error"] == "PeerLostError", waiting
            assert waiting["rank"] == VICTIM
            assert f"rank {VICTIM}" in waiting["text"]
            assert told["errors"] == ["PeerLostError"]
            assert told["later"]["error"] == "PeerLostError"
            assert told["sums"] == 1 << 20


def pass_handles_around(victim: int, seed: int) -> Any:
    """Export objects, pass handles to others at random, use and drop them; a rank is killed meanwhile.

    Tell what was wrong: a handle that is of no use, unless the lost rank owned the object or had passed the handle on.
    """
    import random

    from covey.runtime.joining.node import node_of

    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def add(self, amount: int) -> int:
            self.value += amount
            return self.value

    with covey.join() as group:
        node, chance = group.node, random.Random(1000 * seed + group.rank)
        lock, wrong, done = threading.Lock(), [], {"used": 0, "passed": 0}
        exports = {number: node.export(Counter()) for number in range(3)}
        held: list[tuple[int, Any, list[int]]] = [(group.rank, handle, []) for handle in exports.values()]

        @node.rpc
        def give(owner: int, handle: Any, givers: list[int]) -> None:
            if owner != group.rank:  # the object itself is passed here
                with lock:
                    held.append((owner, handle, [*givers, node.caller().rank]))

        def step() -> None:
            with lock:
                if not held:
                    return
                owner, handle, givers = held[chance.randrange(len(held))]
                is_dropped = len(held) > 20 and owner != group.rank
                if is_dropped:
                    held.remove((owner, handle, givers))
            if is_dropped:
                return
            try:
                if chance.random() < 0.5:
                    peers = [rank for rank in group.live if rank != group.rank]
                    node.call(chance.choice(peers), "give", owner, handle, givers)
                    done["passed"] += 1
                else:
                    handle.add(1)
                    done["used"] += 1
            except covey.PeerLostError as error:
                if error.rank != victim:
                    wrong.append(repr(error))
            except covey.CallRefusedError as error:
                if victim not in givers:
                    wrong.append(f"{owner} by {givers}: {error}")

        group.barrier()
        say("ready")
        for _ in range(60):
            step()
        say("half")
        if group.rank == victim:
            while True:
                step()
        while victim in group.live:
            step()
        for _ in range(60):
            step()
        say("over", wrong=wrong, **done)
        await_go()
        with lock:
            held.clear()
        exports.clear()
        parts = node_of(group)
        assert parts is not None
        assert parts.calls is not None
        exported, until = parts.calls.service().exported, time.monotonic() + DEADLINE
        while len(exported) and time.monotonic() < until:
            time.sleep(0.01)
        say("free", left=len(exported))
        await_go()
    return None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_handles_are_passed_around_while_a_rank_is_killed_and_every_object_is_freed(seed: int) -> None:
    with Ranks(4, pass_handles_around, VICTIM, seed, lanes="unix", env={"COVEY_ON_LOSS": "continue"}) as ranks:
        ranks.hear("half", range(4))
        ranks.kill(VICTIM)
        for told in ranks.hear("over", (0, 2, 3)):
            assert told["wrong"] == []
            assert told["used"] > 10
            assert told["passed"] > 10
        for rank in (0, 2, 3):
            ranks.go(rank)
        assert [told["left"] for told in ranks.hear("free", (0, 2, 3))] == [0, 0, 0]
        for rank in (0, 2, 3):
            ranks.go(rank)


def through_generations() -> Any:
    """Register once, and call the other rank in every generation, until the test ends."""
    served, is_registered = 0, False
    for group in covey.generations(min_size=2):
        if not is_registered:
            is_registered = True

            @group.node.rpc
            def serve(x: int) -> int:
                nonlocal served
                served += 1
                return x + served

        with contextlib.suppress(covey.GroupChangedError):  # this process was excluded, and joins the next generation
            while not group.change_pending:
                group.barrier()  # before it, the other process may not have registered its function
                results = group.node.broadcast_call("serve", 1000, return_exceptions=True)
                good = [result for result in results.values() if isinstance(result, int)]
                say("called", generation=group.generation, restart=os.environ.get("COVEY_RESTART", "0"), good=len(good))
                time.sleep(0.01)
    return served


def test_calls_work_in_every_generation_with_functions_that_were_registered_once() -> None:
    with CoveyRun("-n", "2", "--restarts", "2", function=through_generations, args=()) as run:

        def await_calls(slot: int, restart: str, after: int) -> int:
            deadline = time.monotonic() + DEADLINE
            while True:
                for said in run.said("called", slot):
                    if said["generation"] > after and said["restart"] == restart and said["good"] == 1:
                        return int(said["generation"])
                assert time.monotonic() < deadline, run.story("no calls")
                time.sleep(0.01)

        first = max(await_calls(slot, "0", -1) for slot in (0, 1))
        os.kill(int(run.said("begun", 1)[-1]["pid"]), 9)
        assert await_calls(0, "0", first) > first
        second = await_calls(1, "1", first)
        assert second > first
        os.kill(pid := int(run.said("begun", 1)[-1]["pid"]), signal.SIGSTOP)
        try:
            wait_until(lambda: bool(run.said("called", 0)) and run.said("called", 0)[-1]["good"] == 0)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await_calls(0, "0", second) > second, "it was excluded, came back, and serves calls"
        assert await_calls(1, "1", second) > second


def call_beside_a_transfer(wanted: int, megabytes: int) -> Any:
    """Send large payloads one after the other; return how many it took until so many small calls overtook them."""
    with covey.join() as group:
        node = group.node
        node.register("small", lambda x: x + 1)
        node.register("swallow", lambda x: x.nbytes)
        big = np.ones(megabytes << 20, np.uint8)
        group.barrier()
        payloads = overtook = 0
        while group.rank == 0 and overtook < wanted:
            work = node.call_async(1, "swallow", big)
            payloads += 1
            while not work.done():
                assert node.call(1, "small", overtook) == overtook + 1
                overtook += not work.done()
            assert work.wait() == big.nbytes
        group.barrier()
        return payloads


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", ["secure", "tcp"])
def test_small_calls_overtake_large_payloads_to_the_same_node(lanes: str) -> None:
    """If they stood in line behind a payload, each payload would be overtaken once at most."""
    assert run_ranks(2, call_beside_a_transfer, 40, 128, lanes=lanes)[0] <= 8


def stress_calls(options: dict[str, Any]) -> dict[str, int]:
    """Take part in a stress of calls."""
    from covey.lab.call_stress import CallStress, take_part

    with covey.join() as group:
        return take_part(group, CallStress(**options))


def check_stress(reports: list[dict[str, int]], calls: int) -> None:
    assert len(reports) == 3
    for report in reports:
        number = calls * 2 // 3
        assert report["answered"] + report["cancelled"] == number
        assert number // 40 <= report["cancelled"] <= number // 4


@pytest.mark.thorough
def test_many_concurrent_calls_of_all_sizes_end_right_and_leave_no_memory_behind() -> None:
    options = {"nodes": 3, "calls": 150, "total_bytes": 15 << 20, "largest_bytes": 4 << 20, "rounds": 2, "seed": 1}
    check_stress(run_ranks(3, stress_calls, options, lanes="secure"), 150)


@pytest.mark.thorough
def test_hundreds_of_concurrent_calls_of_all_sizes_end_right_and_leave_no_memory_behind() -> None:
    """As `make stress` does with ten thousand."""
    stress = CallStress(nodes=3, calls=600, total_bytes=60 << 20, largest_bytes=4 << 20, rounds=2, seed=1)
    check_stress(run(stress), 600)


def fork_while_calling() -> Any:
    """Fork while a call is under way; tell what child and parent get."""
    with covey.join() as group:
        node, may_answer = group.node, threading.Event()
        node.register("answer", may_answer.set)

        @node.rpc
        def later(x: int) -> int:
            assert may_answer.wait(DEADLINE)
            return x

        group.barrier()
        told = None
        if group.rank == 0:
            work = node.call_async(1, "later", 5)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                outcomes = [attempt(work.wait), attempt(lambda: node.call(1, "later", 6))]
                os.write(writer, json.dumps([each["error"] for each in outcomes]).encode())
                os._exit(0)
            os.close(writer)
            os.waitpid(pid, 0)
            node.call(1, "answer")
            told = {"child": json.loads(os.read(reader, 1000)), "parent": [work.wait(), node.call(1, "later", 7)]}
            os.close(reader)
        group.barrier()
        return told


def test_a_forked_process_cannot_call_and_its_parent_can() -> None:
    told = run_ranks(2, fork_while_calling, lanes="unix")[0]
    assert told == {"child": ["ClosedError", "ClosedError"], "parent": [5, 7]}


def call_within_limits() -> Any:
    """Send too much, and count how many functions run at the same time."""
    with covey.join() as group:
        node, lock, running, most = group.node, threading.Lock(), 0, 0
        two = threading.Barrier(2, timeout=DEADLINE)

        @node.rpc
        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            two.wait()
            with lock:
                running -= 1

        node.register("size", lambda x: len(x))
        group.barrier()
        other = 1 - group.rank
        outcomes = [attempt(lambda size=size: node.call(other, "size", bytes(size))) for size in (90_000, 110_000)]  # type: ignore[misc]
        for each in [node.call_async(other, "work") for _ in range(10)]:
            each.wait()
        group.barrier()
        return [most, outcomes[0]["result"], outcomes[1]["error"], outcomes[1]["text"]]


def test_variables_set_the_limits_of_calls() -> None:
    env = {"COVEY_CALL_BYTES": "100000", "COVEY_CALL_HANDLERS": "3"}  # no peer has all of them: one alone has two
    with Ranks(2, call_within_limits, lanes="unix", env=env) as ranks:
        for most, size, error, text in ranks.results():
            assert (most, size, error) == (2, 90_000, "CallRefusedError")
            assert "a call may carry 100000" in text
