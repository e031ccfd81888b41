"""Ranks that call different things: all of them get a MismatchError that says what each one called."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.ranks import LANES, Ranks, attempt, await_go, run_ranks
from tests.support.sets import first, only

import covey
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 3
AT_ONCE = 16
"""Disagreements that one set of ranks goes through side by side, each in a group of its own."""
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "scan"),
    *("exscan", "barrier", "broadcast_object", "all_gather_object", "gather_object", "scatter_object", "split"),
    "sync_gradients",
)
DETAILS = (
    ("all_reduce", "all_reduce of 7"),
    ("all_reduce", "all_reduce of 2x3"),
    ("all_reduce", "all_reduce of float64"),
    ("all_reduce", "all_reduce of int32"),
    ("all_reduce", "all_reduce of a number"),
    ("all_reduce", "max"),
    ("all_reduce", "weighted mean"),
    ("all_reduce by ring", "all_reduce by doubling"),
    ("all_gather", "all_gather of float64"),
    ("all_gather", "all_gather into out"),
    ("all_gather into out", "all_gather into out of 7"),
    ("all_to_all", "all_to_all into out"),
    ("all_to_all into out", "all_to_all into out of 7"),
    ("broadcast", "broadcast from 1"),
    ("broadcast from 2", "broadcast from 1"),
    ("reduce", "reduce to 1"),
    ("gather", "gather to 1"),
    ("scatter", "scatter from 1"),
    ("gather_object", "gather_object to 1"),
    ("reduce_scatter", "reduce_scatter by counts"),
    ("scan", "scan of products"),
    ("large all_reduce", "large broadcast"),
    ("large all_reduce", "large all_gather"),
)


def disagree(cases: list[list[list[str]]], group: covey.Group | None = None) -> list[Any]:
    """Go through the cases side by side. A case tells what each rank calls, in order; then every rank calls barrier.

    Returns, for each case, the first error and the one after it.
    """

    def call(group: covey.Group, name: str) -> None:
        rank, size = group.rank, group.size
        x = np.arange(6, dtype=np.float32) + rank
        match name:
            case "all_reduce":
                group.all_reduce(x)
            case "all_reduce of 7":
                group.all_reduce(np.ones(7, np.float32))
            case "all_reduce of 2x3":
                group.all_reduce(x.reshape(2, 3))
            case "all_reduce of float64":
                group.all_reduce(x.astype(np.float64))
            case "all_reduce of int32":
                group.all_reduce(x.astype(np.int32))
            case "all_reduce of a number":
                group.all_reduce(1.5)
            case "max":
                group.all_reduce(x, op="max")
            case "weighted mean":
                group.all_reduce(x, op="mean", weight=1 + rank)
            case "all_reduce by ring":
                group.all_reduce(x, algorithm="ring")
            case "all_reduce by doubling":
                group.all_reduce(x, algorithm="doubling")
            case "reduce" | "reduce to 1":
                group.reduce(x, root=int(name.endswith("1")))
            case "broadcast" | "broadcast from 1" | "broadcast from 2":
                group.broadcast(x, root=int(name[-1]) if name[-1].isdigit() else 0)
            case "all_gather":
                group.all_gather(x)
            case "all_gather of float64":
                group.all_gather(x.astype(np.float64))
            case "all_gather into out":
                group.all_gather(x, out=np.empty((size, 6), np.float32))
            case "all_gather into out of 7":
                group.all_gather(np.arange(7, dtype=np.float32), out=np.empty((size, 7), np.float32))
            case "gather" | "gather to 1":
                group.gather(x, root=int(name.endswith("1")))
            case "scatter" | "scatter from 1":
                group.scatter([x] * size, root=int(name.endswith("1")))
            case "reduce_scatter":
                group.reduce_scatter(x)
            case "reduce_scatter by counts":
                group.reduce_scatter(x, counts=[1, 2, 3])
            case "all_to_all":
                group.all_to_all([x[: rank + 1]] * size)
            case "all_to_all into out" | "all_to_all into out of 7":
                rows = np.ones((size, 7 if name.endswith("7") else 6), np.float32)
                group.all_to_all(rows, out=np.empty_like(rows))
            case "scan":
                group.scan(x)
            case "scan of products":
                group.scan(x, op="prod")
            case "exscan":
                group.exscan(x)
            case "barrier":
                group.barrier()
            case "broadcast_object":
                group.broadcast_object({"rank": rank})
            case "all_gather_object":
                group.all_gather_object({"rank": rank})
            case "gather_object" | "gather_object to 1":
                group.gather_object({"rank": rank}, root=int(name.endswith("1")))
            case "scatter_object":
                group.scatter_object([{"rank": rank}] * size)
            case "split":
                group.split(rank % 2)
            case "sync_gradients":
                group.sync_gradients({"w": x})
            case "large all_reduce":
                group.all_reduce(np.arange(1 << 20, dtype=np.float32) + rank)
            case "large broadcast":
                group.broadcast(np.arange(1 << 20, dtype=np.float32) + rank)
            case "large all_gather":
                group.all_gather(np.arange(1 << 20, dtype=np.float32) + rank)
            case _:
                raise AssertionError(name)

    def go_through(index: int, group: covey.Group) -> None:
        def sequence() -> None:
            for name in cases[index][group.rank]:
                call(group, name)
            while True:  # a rank that returned hears of it at its next call
                group.barrier()

        group.barrier()  # so that all begin at the same time, whatever else the machine does
        results[index] = {**attempt(sequence), "after": attempt(group.barrier)}

    with covey.join() if group is None else contextlib.nullcontext(group) as group:
        groups = [group.split(0) for _ in cases]
        results: list[Any] = [None] * len(cases)
        threads = [threading.Thread(target=go_through, args=pair) for pair in enumerate(groups)]
        group.barrier()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for subgroup in groups:
            subgroup.close()
        return results


def odd_one_out(pair: tuple[str, str], odd: int) -> list[list[str]]:
    return [[pair[rank == odd]] for rank in range(SIZE)]


def check(cases: list[list[list[str]]], by_rank: list[list[Any]]) -> None:
    for index, case in enumerate(cases):
        for rank, results in enumerate(by_rank):
            result = results[index]
            assert result["error"] == "MismatchError", (rank, case, result)
            assert (result["after"]["error"], result["after"]["cause"]) == ("ClosedError", "MismatchError"), (
                rank,
                case,
            )
            told = [
                (int(number), what)
                for ranks, what in re.findall(r"ranks? ([\d, ]+) called (\w+)", result["text"])
                for number in ranks.split(", ")
            ]
            at = int(re.findall(r"as operation (\d+)", result["text"])[0])
            assert dict(told) == {r: operation(calls, at) for r, calls in enumerate(case)}, (rank, case, result)


def operation(calls: list[str], at: int) -> str:
    """Return what errors call operation number `at` of a rank that goes through `calls` after a first barrier."""
    name = calls[at - 2] if at < len(calls) + 2 else "barrier"
    return next((word for word in name.split() if word in OPERATIONS), "all_reduce")


def batches(cases: list[list[list[str]]]) -> Iterator[list[list[list[str]]]]:
    for start in range(0, len(cases), AT_ONCE):
        yield cases[start : start + AT_ONCE]


@pytest.mark.parametrize("odd", first(1, range(SIZE)))
def test_every_two_different_operations_are_told_apart(odd: int) -> None:
    pairs = list(itertools.combinations(OPERATIONS, 2))[odd::SIZE]
    for cases in batches([odd_one_out(pair, odd) for pair in pairs]):
        check(cases, run_threads(SIZE, lambda group, cases=cases: disagree(cases, group)))


@pytest.mark.parametrize("shift", first(1, range(SIZE)))
def test_equal_operations_with_different_arguments_are_told_apart(shift: int) -> None:
    odd_ones = [odd_one_out(pair, (place + shift) % SIZE) for place, pair in enumerate(DETAILS)]
    for cases in batches(odd_ones):
        check(cases, run_threads(SIZE, lambda group, cases=cases: disagree(cases, group)))


CONFUSIONS = [
    odd_one_out(("all_reduce", "barrier"), 1),
    odd_one_out(("broadcast", "broadcast from 1"), 0),  # 0 and 1 wait for each other, and no bytes meet
    odd_one_out(("large all_reduce", "large broadcast"), 2),
    odd_one_out(("all_gather", "sync_gradients"), 0),
    [["all_reduce", "all_reduce", "scan"], ["all_reduce", "scan"], ["all_reduce", "scan"]],  # one call too many
    [["barrier", "all_reduce"], ["barrier", "all_reduce"], ["all_reduce"]],  # one call too few
    [["broadcast", "all_reduce"], ["broadcast from 1", "all_reduce"], ["broadcast", "all_reduce"]],
    [["broadcast"] * 3 + ["scan"], ["broadcast", "all_gather"], ["broadcast"] * 3],  # 0 is long gone ahead
]


@pytest.mark.parametrize("lanes", only(["secure"], LANES))
def test_confused_processes_are_told_what_each_of_them_called(lanes: str) -> None:
    check(CONFUSIONS, run_ranks(SIZE, disagree, CONFUSIONS, lanes=lanes))


def await_each_other() -> Any:
    with covey.join() as group:
        return attempt(lambda: group.broadcast(np.ones(4), root=1 - group.rank))


@pytest.mark.parametrize("lanes", only(["unix"], LANES))
def test_two_ranks_that_await_each_others_first_broadcast_are_told(lanes: str) -> None:
    for report in run_ranks(2, await_each_other, lanes=lanes):
        assert report["error"] == "MismatchError", report
        assert (
            "rank 0 called broadcast(float64[4], root=1); rank 1 called broadcast(float64[4], root=0)" in report["text"]
        )


# Ranks that are gone by the time the others notice

GONE = [
    # What rank 0 calls before it goes, and what the others call.
    (["broadcast"], ["all_reduce"]),
    (["broadcast"], ["broadcast from 1", "barrier"]),
    (["broadcast"], ["barrier"]),
    (["broadcast"] * 3, ["broadcast", "all_gather"]),
    (["broadcast_object"], ["all_gather_object"]),
    (["scatter"], ["scan"]),
    (["barrier", "broadcast"], ["barrier", "large all_reduce"]),
]
SAME = (["broadcast"], ["broadcast", "all_reduce"])


def go_before_they_notice(cases: list[list[list[str]]], how: str) -> Any:
    """Rank 0 only sends, in a group for each case, and goes at once; the others call something else meanwhile."""

    import atexit

    def call(group: covey.Group, name: str) -> None:
        rank, size = group.rank, group.size
        x = np.arange(6, dtype=np.float32) + rank
        match name:
            case "all_reduce":
                group.all_reduce(x)
            case "large all_reduce":
                group.all_reduce(np.arange(1 << 20, dtype=np.float32) + rank)
            case "broadcast" | "broadcast from 1":
                group.broadcast(x, root=int(name.endswith("1")))
            case "all_gather":
                group.all_gather(x)
            case "broadcast_object":
                group.broadcast_object({"rank": rank})
            case "all_gather_object":
                group.all_gather_object({"rank": rank})
            case "scatter":
                group.scatter([x] * size)
            case "scan":
                group.scan(x)
            case "barrier":
                group.barrier()

    def sequence(group: covey.Group, names: list[str]) -> None:
        for name in names:
            call(group, name)
        while True:
            group.barrier()

    def go_through(index: int, group: covey.Group) -> None:
        first = attempt(lambda: sequence(group, cases[index][1]))
        results[index] = {**first, "after": attempt(group.barrier)}

    groups: list[covey.Group] = []
    atexit.register(groups.clear)  # after the run is closed, and with it these groups
    whole = covey.join()
    groups += [whole.split(0) for _ in cases]
    results: list[Any] = [None] * len(cases)
    for group in groups:
        group.barrier()
    whole.barrier()
    if whole.rank:
        whole.send(np.ones(1), dst=0)  # out of the barrier
        threads = [threading.Thread(target=go_through, args=pair) for pair in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
    for _ in range(whole.size - 1):
        whole.recv()
    for group, (mine, _) in zip(groups, cases, strict=True):
        for name in mine:
            call(group, name)
    if how == "is killed":
        os.kill(os.getpid(), 9)
    if how == "fails":
        with contextlib.ExitStack() as stack:
            for group in groups:
                stack.enter_context(group)
            raise ValueError("no cake")
    if how == "closes":
        for group in groups:
            group.close()
    if how in ("closes", "stays"):
        await_go()
    return None


def run_and_go(size: int, cases: list[Any], how: str, lanes: str) -> list[tuple[Any, Any]]:
    """Return the cases, each with what came of it for a rank other than 0."""
    with Ranks(size, go_before_they_notice, cases, how, lanes=lanes) as ranks:
        results = ranks.results(range(1, size))
    return [pair for by_case in results for pair in zip(cases, by_case, strict=True)]


@pytest.mark.parametrize("lanes", only(["shm"], LANES))
def test_ranks_that_call_something_else_are_told_so_though_the_sender_has_exited(lanes: str) -> None:
    for case, report in run_and_go(3, GONE, "exits", lanes):
        assert report["error"] == "MismatchError", (case, report)
        assert re.search(r"rank 0 called (broadcast|broadcast_object|scatter)\(", report["text"]), (case, report)
        assert (report["after"]["error"], report["after"]["cause"]) == ("ClosedError", "MismatchError"), (case, report)


@pytest.mark.parametrize("size", [5, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("how", first(2, ["exits", "stays", "fails", "closes"]))
def test_a_mismatch_comes_before_a_loss_however_the_sender_goes(how: str, size: int) -> None:
    for case, report in run_and_go(size, GONE[:2], how, "unix"):
        assert report["error"] == "MismatchError", (case, report)
        # The others wait half a second for its own words; else its header has to do.
        assert re.search(r"rank 0 called broadcast\(float32(\[6\], root=0|, \.\.\.)\)", report["text"]), (case, report)


@pytest.mark.parametrize("lanes", only(["shm", "tcp"], LANES))
def test_bytes_of_a_killed_rank_prove_what_it_called(lanes: str) -> None:
    """Nothing is left of it but what lies in the lanes."""
    for case, report in run_and_go(3, [*GONE[:3], SAME], "is killed", lanes):
        if case == SAME:
            assert (report["error"], report["rank"]) == ("PeerLostError", 0), report
        else:
            assert report["error"] == "MismatchError", (case, report)
            assert "rank 0 called broadcast(float32" in report["text"], (case, report)


def differ_and_go_on(roots: list[int]) -> Any:
    """In groups that go on without lost ranks: rank 0 only sends, and is not let go before all have agreed."""

    def call(group: covey.Group, root: int) -> Any:
        x = np.arange(6, dtype=np.float32) + group.rank
        if group.rank == 0:
            return group.broadcast(x, root=0).tolist()
        return group.all_reduce(x).tolist() if root < 0 else group.broadcast(x, root=root).tolist()

    def differ(group: covey.Group, root: int) -> Any:
        with group:
            group.barrier()
            first = attempt(lambda: call(group, root))
            return {**first, "after": attempt(group.barrier)}

    with covey.join(on_loss="continue") as whole:
        return [differ(whole.split(0), root) for root in roots]


@pytest.mark.parametrize("lanes", only(["secure"], LANES))
def test_where_operations_are_all_or_nothing_all_ranks_hear_of_a_mismatch(lanes: str) -> None:
    """Of another operation, and of another root."""
    for reports in run_ranks(3, differ_and_go_on, [-1, 1], lanes=lanes):
        for report in reports:
            assert report["error"] == "MismatchError", report
            assert "rank 0 called broadcast(float32[6], root=0)" in report["text"]
            assert (report["after"]["error"], report["after"]["cause"]) == ("ClosedError", "MismatchError")


@pytest.mark.thorough
@pytest.mark.alone
def test_a_mismatch_is_told_within_a_second() -> None:
    for how in ("exits", "is killed"):
        with Ranks(3, time_to_notice, how, lanes="tcp") as ranks:
            for report in ranks.results([1, 2]):
                assert report["error"] == "MismatchError", report
                assert report["took"] < 1.0, report


def time_to_notice(how: str) -> Any:
    group = covey.join()
    group.barrier()
    if group.rank == 0:
        group.broadcast(np.arange(6.0))
        if how == "is killed":
            os.kill(os.getpid(), 9)
        return None
    began = time.monotonic()
    report = attempt(lambda: group.all_reduce(np.arange(6.0)))
    return {**report, "took": report["at"] - began}
