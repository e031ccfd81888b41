"""Ranks that die, stop, raise or leave: every other rank hears of it at once, by name, and nothing hangs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import LANES, Lived, Ranks, attempt, await_go, run_ranks, say
from tests.support.seeds import seeds
from tests.support.sets import only
from tests.support.waiting import DEADLINE

import covey
from covey.runtime import loop as control
from covey.runtime.group.internals import engine_of
from covey.testing import run_threads

VICTIM = 1
SURVIVORS = (0, 2)
NOTICE_SECONDS = 1.0
"""How soon every other rank must know that one is gone."""
BY_ITS_END = {"COVEY_HOST_SILENCE": "1000", "COVEY_PROCESS_SILENCE": "1000"}
"""Settings of ranks that hear of another's end by what it leaves, or not at all: no test waits until silence tells."""
over_shm = pytest.mark.parametrize("lanes", only(["shm"], LANES))
over_secure = pytest.mark.parametrize("lanes", only(["secure"], LANES))
"""Tests take turns with lanes: `make test` has each of these with deaths, stops, ends and what is left behind."""
OPERATIONS = {
    "all_reduce": "all_reduce(float32[1048577]",
    "all_gather": "all_gather(float32)",
    "broadcast from the victim": "broadcast(float32[1048577], root=1)",
    "broadcast to the victim": "broadcast(float32[1048577], root=0)",
    "reduce_scatter": "reduce_scatter(float32[1048577], op=sum)",
    "async all_reduce": "all_reduce(float32[1048577]",
    "barrier": "barrier()",
    "all_gather_object": "all_gather_object()",
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
                    case "all_gather_object":
                        group.all_gather_object({"rank": group.rank})
                    case "recv from the victim":
                        group.recv(src=victim, tag=3)
                    case "recv from anyone":
                        group.recv()
                    case "send to the victim":
                        group.send(mine, dst=victim)
                rounds[name] += 1

        def observe(name: str, group: covey.Group) -> None:
            first = attempt(lambda: loop(name, group))
            reports[name] = first, attempt(group.barrier), attempt(lambda: group.send(x[:1], dst=victim))

        groups = {name: group.split(0) for name in names}
        rounds = dict.fromkeys(names, 0)
        reports: dict[str, Any] = {}
        threads = [threading.Thread(target=observe, args=pair, daemon=True) for pair in groups.items()]
        for thread in threads:
            thread.start()
        moving = [name for name in names if name in ("all_reduce", "all_gather", "reduce_scatter", "async all_reduce")]
        while min((rounds[name] for name in moving), default=1) < 1:
            time.sleep(0.001)
        say("working")
        for thread in threads:
            thread.join()
        return {"idle": (attempt(group.barrier), attempt(group.barrier)), **reports}


@over_secure
def test_every_rank_hears_of_a_killed_rank_in_every_operation(lanes: str) -> None:
    with Ranks(3, work_side_by_side, list(OPERATIONS), VICTIM, lanes=lanes, env=BY_ITS_END) as ranks:
        ranks.hear("working")
        ranks.kill(VICTIM)
        for rank, report in zip(SURVIVORS, ranks.results(SURVIVORS), strict=True):
            for name, expected in {**OPERATIONS, "idle": "barrier()"}.items():
                first, *later = report[name]
                assert first["error"] == "PeerLostError", (rank, name, first)
                assert first["rank"] == VICTIM
                assert first["host"] == os.uname().nodename
                assert first["operation"].startswith(expected), (rank, name)
                assert first["sequence"] >= (0 if expected == "point-to-point" else 1)
                assert f"rank {VICTIM} " in first["text"]
                assert str(ranks.pid(VICTIM)) in first["text"]
                for further in later:
                    assert (further["error"], further["rank"]) == ("PeerLostError", VICTIM), (rank, name)


def wait_in_a_barrier(victim: int) -> Any:
    """Wait for a rank that never comes; tell how that ends, and when this process ran."""
    with covey.join() as group:
        group.barrier()
        lived = Lived()
        say("working")
        if group.rank == victim:
            threading.Event().wait()
        return attempt(group.barrier), lived.moments


@over_shm
def test_a_killed_rank_is_named_within_a_second(lanes: str) -> None:
    with Ranks(3, wait_in_a_barrier, VICTIM, lanes=lanes) as ranks:
        ranks.hear("working")
        ranks.kill(VICTIM)
        ranks.await_exit([VICTIM], code=-signal.SIGKILL)
        gone_at = time.monotonic()
        for error, moments in ranks.results(SURVIVORS):
            assert (error["error"], error["rank"]) == ("PeerLostError", VICTIM), error
            assert Lived.between(moments, gone_at, max(gone_at, error["at"])) < NOTICE_SECONDS


def leave_children_and_work(victim: int) -> Any:
    """Loop over all_reduce with lanes of every sort open; the victim has children that outlive it."""
    with covey.join() as group:
        x = np.arange(1 << 18, dtype=np.float32) + group.rank
        group.all_reduce(x)
        group.all_to_all([x] * group.size)
        group.split(0).barrier()
        for peer in range(group.size):
            if peer != group.rank:
                group.send(x[:10], dst=peer)
        for peer in range(group.size):
            if peer != group.rank:
                group.recv(src=peer)
        children = []
        if group.rank == victim:
            children.append(subprocess.Popen(["sleep", "1000"]).pid)
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
            process.start()
            assert process.pid is not None
            children.append(process.pid)
            forked = os.fork()
            if not forked:
                time.sleep(1000)
                os._exit(0)
            children.append(forked)
        say("working", children=children)

        def loop() -> None:
            while True:
                group.all_reduce(x)

        return attempt(loop)


@over_secure
def test_living_children_of_a_killed_rank_do_not_hide_its_death(lanes: str) -> None:
    with Ranks(3, leave_children_and_work, VICTIM, lanes=lanes, env=BY_ITS_END) as ranks:
        children = ranks.hear("working")[VICTIM]["children"]
        ranks.kill(VICTIM)
        for report in ranks.results(SURVIVORS):
            assert (report["error"], report["rank"]) == ("PeerLostError", VICTIM), report
        assert len(children) == 3
        for child in children:
            os.kill(child, 0)  # raises if it is gone


def join_and_add() -> list[float]:
    say("joining")
    with covey.join() as group:
        return group.all_reduce(np.arange(3.0) * (group.rank + 1)).tolist()


@over_secure
def test_a_rank_killed_while_others_wait_to_join_may_come_again(lanes: str) -> None:
    with Ranks(3, join_and_add, lanes=lanes, start=(0, 1)) as ranks:
        ranks.hear("joining")
        while not (ranks.folder / "1.sock").exists():
            assert ranks.errors(1) == ""
        ranks.kill(1)
        ranks.await_exit([1], code=-signal.SIGKILL)
        ranks.begin(1)
        ranks.begin(2)
        assert ranks.results() == [[0.0, 6.0, 12.0]] * 3


def wait_for_the_stopped(victim: int, timeout: float) -> Any:
    """Wait for a rank that stops: in mid-transfer, in an operation it never enters, for a message."""
    os.environ.pop("COVEY_KEEPER", None)  # a keeper would tell of the stop before the deadline
    warned = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "s in barrier()" in record.getMessage():
                warned.set()

    logging.getLogger().addHandler(Listener())
    with covey.join(settings={"warn_after": 0.6}) as group:
        groups = {name: group.split(0) for name in ("transfer", "barrier", "recv", "first recv", "ring", "warned")}
        x = np.arange(1 << 20, dtype=np.float32) + group.rank

        def transfer() -> None:
            while True:
                groups["transfer"].all_reduce(x, timeout=timeout)
                rounds.append(time.monotonic())

        waits = {
            "barrier": lambda: groups["barrier"].barrier(timeout=timeout),
            "ring": lambda: groups["ring"].all_reduce(x.copy(), timeout=timeout, algorithm="ring"),
            "recv": lambda: groups["recv"].recv(src=victim, timeout=timeout),
            "first recv": lambda: groups["first recv"].recv(src=victim, timeout=timeout),
        }
        if group.rank == victim:
            for peer in range(group.size):
                groups["recv"].send(x[:5], dst=peer)
        else:
            groups["recv"].recv(src=victim)
        reports: dict[str, Any] = {}
        rounds: list[Any] = []

        def observe(name: str) -> None:
            began = time.monotonic()
            reports[name] = attempt(waits.get(name, transfer))
            reports[name]["took"] = reports[name]["at"] - (rounds[-1] if name == "transfer" else began)

        threads = [threading.Thread(target=observe, args=(name,)) for name in ("transfer", *waits)]
        threads[0].start()
        while not rounds:
            time.sleep(0.001)
        say("working")
        await_go()
        threading.Thread(target=lambda: attempt(groups["warned"].barrier), daemon=True).start()
        assert warned.wait(DEADLINE)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        return {**reports, "after": attempt(groups["barrier"].barrier)}


@over_shm
def test_a_stopped_rank_is_named_at_the_deadline_on_all_others(lanes: str) -> None:
    victim, others = 2, (0, 1, 3)
    with Ranks(4, wait_for_the_stopped, victim, 1.0, lanes=lanes, env=BY_ITS_END) as ranks:
        ranks.hear("working")
        ranks.signal(victim, signal.SIGSTOP)
        for rank in others:
            ranks.go(rank)
        reports = ranks.results(others)
        for name in ("transfer", "barrier", "ring", "recv", "first recv"):  # others may hear from the first to give up
            assert max(report[name]["took"] for report in reports) >= 1.0, name
        for rank, report in zip(others, reports, strict=True):
            for name in ("transfer", "barrier", "ring", "recv", "first recv"):
                assert report[name]["error"] == "DeadlineError", (rank, name, report[name])
                assert report[name]["late"] == [victim], (rank, name, report[name])
                assert f"rank {victim}" in report[name]["text"]
            assert (report["after"]["error"], report["after"]["cause"]) == ("ClosedError", "DeadlineError")
            warning = [line for line in ranks.errors(rank).splitlines() if "s in barrier()" in line]
            assert warning, ranks.errors(rank)
            assert f": rank {victim} (" in warning[0]
            assert str(ranks.pid(victim)) in warning[0]


def end_early(how: str, leaver: int) -> Any:
    """Block in an operation until the leaver ends in its own way; the leaver tells what it saw itself."""
    if how.endswith("without with"):
        group = covey.join()
        group.barrier()
        say("ready")
        if group.rank == leaver:
            await_go()
            if how.startswith("exception"):
                raise ValueError("cannot divide the cake\nof all")
            sys.exit(5)
        return attempt(lambda: group.all_reduce(np.ones(9))), attempt(group.barrier)
    try:
        with covey.join() as group:
            group.barrier()
            say("ready")
            if group.rank != leaver:
                if how == "Ctrl-C" and group.rank == group.size - 1:
                    await_go()  # the leaver and the others wait for this rank
                wait = (lambda: group.recv(src=leaver)) if how == "Ctrl-C in recv" else group.barrier
                return attempt(wait), attempt(group.barrier)
            await_go()
            match how:
                case "exception":
                    raise ValueError("cannot divide the cake")
                case "sys.exit":
                    sys.exit(5)
                case "early end":
                    return None
            say("blocking")
            if how == "Ctrl-C in recv":
                group.recv(src=0)
            group.barrier()
    except BaseException as error:
        say("ended", error=type(error).__name__)
        raise


@pytest.mark.parametrize(
    ("how", "lanes", "code", "reason"),
    [
        ("exception", "unix", 1, r"rank 1 \(.*\) failed with ValueError: cannot divide the cake \("),
        ("exception without with", "tcp", 1, r"rank 1 \(.*\) failed with ValueError: cannot divide the cake \("),
        ("sys.exit", "shm", 5, r"rank 1 \(.*\) failed with exit code 5 \("),
        # Its goodbye may come so late that only the end of its lanes is known.
        ("sys.exit without with", "tcp", 5, r"rank 1 \(.*\) (has left|left the group|closed the group)"),
        ("early end", "shm", 0, r"rank 1 \(.*\) (has left|left the group|closed the group)"),
        ("early end", "tcp", 0, r"rank 1 \(.*\) (has left|left the group|closed the group)"),
    ],
)
def test_others_learn_why_a_rank_ended_early(how: str, lanes: str, code: int, reason: str) -> None:
    with Ranks(3, end_early, how, VICTIM, lanes=lanes) as ranks:
        ranks.hear("ready")
        ranks.go(VICTIM)
        for first, further in ranks.results(SURVIVORS):
            assert (first["error"], first.get("rank")) == ("PeerLostError", VICTIM), first
            assert re.search(reason, first["text"])
            assert (further["error"], further["rank"]) == ("PeerLostError", VICTIM)
        ranks.await_exit([VICTIM], code=code)
        ranks.await_exit(SURVIVORS)


@pytest.mark.parametrize(
    ("how", "lanes"),
    [("Ctrl-C", "shm"), ("Ctrl-C in recv", "secure")]
    + [
        pytest.param(how, lanes, marks=pytest.mark.thorough)
        for how in ("Ctrl-C", "Ctrl-C in recv")
        for lanes in LANES
        if (how, lanes) not in (("Ctrl-C", "shm"), ("Ctrl-C in recv", "secure"))
    ],
)
def test_ctrl_c_ends_a_blocked_operation_there_and_everywhere(how: str, lanes: str) -> None:
    with Ranks(3, end_early, how, VICTIM, lanes=lanes, env=BY_ITS_END) as ranks:
        ranks.hear("ready")
        ranks.go(VICTIM)
        ranks.hear("blocking", [VICTIM])
        ranks.signal(VICTIM, signal.SIGINT)
        [ended] = ranks.hear("ended", [VICTIM])
        assert ended["error"] == "KeyboardInterrupt"
        if how == "Ctrl-C":  # else it does not wait for this, and may have ended
            ranks.go(SURVIVORS[-1])
        for first, further in ranks.results(SURVIVORS):
            assert (first["error"], first.get("rank")) == ("PeerLostError", VICTIM), first
            assert "KeyboardInterrupt" in first["text"]
            assert (further["error"], further["rank"]) == ("PeerLostError", VICTIM)
        ranks.await_exit([VICTIM], code=-signal.SIGINT)


def finish_and_exit_at_once(rounds: int) -> Any:
    """Come to the last operation at very different times, and leave right after it."""
    with covey.join() as group:
        x = np.arange(300_000, dtype=np.float32) * (group.rank + 1)
        for _ in range(rounds):
            group.all_reduce(x)
        if group.rank == 0:
            group.broadcast(x, root=0)
            group.send(x[:1000], dst=2, tag=1)
            group.send(x[:7], dst=1, tag=2)
            return float(x[1])
        threading.Event().wait(0.1 * group.rank)  # a slow reader: the others have left when it reads
        y = np.empty_like(x)
        group.broadcast(y, root=0)
        message = group.recv(src=0, tag=1 if group.rank == 2 else 2)
        expected = np.arange(300_000, dtype=np.float32) * (6 if rounds else 1)
        assert (y == expected).all()
        assert (message == expected[: len(message)]).all()
        return float(message[1])


@over_shm
def test_ranks_that_end_at_different_times_disturb_no_other(lanes: str) -> None:
    for rounds in (0, 1):
        with Ranks(3, finish_and_exit_at_once, rounds, lanes=lanes) as ranks:
            results = ranks.results()
            ranks.await_exit()
            assert len(set(results)) == 1
            assert results[0] == (1.0, 6.0)[rounds]


@pytest.mark.parametrize("lanes", only(["memory", "tcp"], ["memory", *LANES]))
def test_groups_end_right_after_their_last_operation(lanes: str) -> None:
    def work(group: covey.Group, number: int) -> float:
        x = np.arange(5.0) + group.rank
        match number % 4:
            case 0:
                return float(group.broadcast(x, root=number % 3)[1] - number % 3)
            case 1:
                return float(group.all_reduce(x)[1] - 5)
            case 2:
                group.barrier()
            case 3:
                if group.rank == 0:
                    group.send(x, dst=1)
                    group.send(x, dst=2)
                else:
                    return float(group.recv(src=0)[1])
        return 1.0

    for number in seeds(8):
        assert run_threads(3, work, number, lanes=lanes, timeout=DEADLINE) == [1.0] * 3, f"number {number}"


def test_a_lane_that_opens_as_its_group_is_closed_keeps_the_control_loop_from_nothing() -> None:
    moments: list[tuple[float, float]] = []
    lived = Lived()

    def work(group: covey.Group) -> int:
        pair = group.split(color=0)
        if group.rank == 1:
            group.barrier()
            pair.send(np.arange(5), dst=0)
            group.barrier()
            return 4
        engine = engine_of(pair)
        arrived = engine.reports.lane_arrived

        def hear_of_it(*args: Any) -> None:
            began = time.monotonic()
            arrived(*args)
            moments.append((began, time.monotonic()))

        held: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        engine.reports.lane_arrived = lambda *args: held.put(args)  # type: ignore[method-assign,assignment]
        group.barrier()
        message = pair.recv(src=1)
        pair.close()
        control.soon(hear_of_it, *held.get(timeout=DEADLINE))
        group.barrier()
        return int(message[4])

    assert run_threads(2, work, lanes="unix", timeout=DEADLINE) == [4, 4]
    assert moments
    assert max(Lived.between(lived.moments, *pair) for pair in moments) < 0.5


def test_groups_that_were_closed_while_the_control_loop_was_busy_leave_it_whole() -> None:
    def work(group: covey.Group) -> float:
        total = group.all_reduce(np.ones(3)).sum()
        group.barrier()
        if group.rank == 0:
            control.soon(time.sleep, 3.0)  # closing does not wait for so long
        return float(total)

    for _ in range(2):
        assert run_threads(3, work, timeout=DEADLINE) == [9.0] * 3


def count_what_is_left() -> Any:
    """Use everything a group has, close it, and tell what remains in this process."""

    def left() -> dict[str, Any]:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
            "mappings": Path("/proc/self/maps").read_text().count("memfd:covey"),
        }

    def use(group: covey.Group) -> None:
        x = np.arange(1 << 18, dtype=np.float32)
        group.all_reduce(x)
        group.all_reduce(x, async_op=True).wait()
        group.all_to_all([x] * group.size)
        group.send(x, dst=(group.rank + 1) % group.size, async_op=True)
        group.recv(src=(group.rank - 1) % group.size)
        group.barrier()

    folder, before = os.environ["COVEY_MEET"], left()
    with covey.join() as group:
        use(group)
        group.barrier()
        one = left()
        for _ in range(5):
            with group.split(0) as subgroup:
                use(subgroup)
        group.barrier()
        until = time.monotonic() + DEADLINE
        while len(os.listdir("/proc/self/fd")) > one["descriptors"] and time.monotonic() < until:
            time.sleep(0.01)  # a lane that another rank opened as this one closed the group is just being closed
        many = left()
    rendezvous = [name for name in os.listdir(folder) if name.startswith(os.environ["COVEY_RANK"])]
    return {"before": before, "one": one, "many": many, "after": left(), "rendezvous": rendezvous}


@over_secure
def test_a_closed_group_leaves_nothing_behind(lanes: str) -> None:
    with Ranks(3, count_what_is_left, lanes=lanes) as ranks:
        for report in ranks.results():
            before, one, many, after = (report[when] for when in ("before", "one", "many", "after"))
            assert many["descriptors"] <= one["descriptors"], report
            assert many["mappings"] <= one["mappings"], report
            assert after["threads"] == ["MainThread", "covey-control"]
            assert after["children"] == []
            assert after["mappings"] == 0
            assert after["descriptors"] <= before["descriptors"] + 2  # the event loop's three, less the token's pipe
            assert report["rendezvous"] == []


def split_many_times(count: int) -> Any:
    import resource

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with covey.join() as group:
        small, large = np.arange(1 << 10, dtype=np.float32), np.arange(1 << 18, dtype=np.float32)
        group.all_reduce(small.copy())
        group.barrier()
        before = resident_bytes()
        groups = [group.split(0, key=(number * group.rank) % 4) for number in range(count)]
        for number, subgroup in enumerate(groups):
            for x in (small, large):
                total = subgroup.all_reduce(x + number)
                assert (total == 4 * (x + number)).all()
        growth, descriptors = resident_bytes() - before, len(os.listdir("/proc/self/fd"))
        group.barrier()
        before_idling = resource.getrusage(resource.RUSAGE_SELF)
        threading.Event().wait(2.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_seconds = after.ru_utime + after.ru_stime - before_idling.ru_utime - before_idling.ru_stime
        return growth, descriptors, after.ru_nvcsw - before_idling.ru_nvcsw, cpu_seconds


@pytest.mark.parametrize(("count", "most"), [(16, 80 << 20), pytest.param(64, 200 << 20, marks=pytest.mark.thorough)])
def test_many_split_groups_cost_little_and_idle_for_free(count: int, most: int) -> None:
    for growth, descriptors, wakeups, cpu_seconds in run_ranks(4, split_many_times, count, lanes="shm"):
        assert growth < most
        assert descriptors < 16 * count
        assert wakeups < 100  # in two seconds, however fast the machine is: no thread polls for each group
        assert cpu_seconds < 0.2
