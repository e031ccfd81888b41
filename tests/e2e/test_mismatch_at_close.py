"""Ranks that only send cannot notice in the call that the others called something else: they learn it at `close`."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.jobs import Job, finish, new_job
from tests.support.sets import first
from tests.support.waiting import DEADLINE

import covey
from covey.proto import call_inquiries
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = 3


def call(group: covey.Group, name: str) -> None:
    x = np.arange(6, dtype=np.float32) + group.rank
    what, _, root = name.partition(" of ")
    match what:
        case "broadcast":
            group.broadcast(x, root=int(root))
        case "async broadcast":
            group.broadcast(x, root=int(root), async_op=True).wait(DEADLINE)
        case "scatter":
            group.scatter([x] * group.size, root=int(root))
        case "reduce":
            group.reduce(x, root=int(root))
        case "gather":
            group.gather(x, root=int(root))
        case "scatter_object":
            group.scatter_object(["x"] * group.size, root=int(root))
        case "barrier":
            group.barrier()
        case _:
            raise AssertionError(name)


CASES: dict[str, tuple[list[list[str]], set[int]]] = {
    # What each rank calls, and which ranks must know at `close` that the others called something else.
    "three roots": ([["broadcast of 0"], ["broadcast of 1"], ["broadcast of 2"]], {0, 1, 2}),
    "two kinds of roots": ([["broadcast of 0"], ["scatter of 1"], ["scatter_object of 2"]], {0, 1, 2}),
    "an asynchronous root": ([["async broadcast of 0"], ["scatter of 1"], ["scatter of 2"]], {0, 1, 2}),
    "a contributor": ([["broadcast of 0"], ["reduce of 0"], ["broadcast of 0"]], {0, 1, 2}),
    "a root alone": ([["barrier", "broadcast of 0"], ["barrier"], ["barrier"]], {0}),
    "a first call alone": ([["scatter of 0"], [], []], {0}),
    "a contributor alone": ([["barrier"], ["barrier"], ["barrier", "gather of 0"]], {2}),
    "an earlier call": ([["broadcast of 0"] * 2, ["scatter of 1", "broadcast of 1"], ["gather of 1"]], {0, 1, 2}),
    "the same": ([["broadcast of 0", "scatter of 1", "reduce of 2"]] * 3, set()),
    "the same, in step": ([["broadcast of 0", "barrier"]] * 3, set()),
    "nothing": ([[], [], []], set()),
}


def error_of(function: Callable[[], Any]) -> str:
    """Return the text of the MismatchError that a function raises, or nothing."""
    try:
        function()
    except covey.MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lanes", first(1, ["shm", "memory", "tcp", "secure"]))
def test_ranks_that_only_sent_learn_at_close_that_the_others_called_something_else(lanes: str) -> None:
    called = threading.Barrier(SIZE)

    def body(group: covey.Group) -> dict[str, str]:
        found = {}
        for name, (calls, _) in CASES.items():
            part = group.split(0)
            assert part is not None
            # A call returns at once, unless its lanes open so late that it hears of the others before it has sent.
            found[name] = next(filter(None, (error_of(partial(call, part, each)) for each in calls[group.rank])), "")
            called.wait(DEADLINE)
            found[name] = found[name] or error_of(part.close)
            assert error_of(part.close) == "", "it is told once"
            called.wait(DEADLINE)
        group.barrier()
        return found

    by_rank = run_threads(SIZE, body, lanes=lanes)
    for name, (_, knowing) in CASES.items():
        for rank, found in enumerate(by_rank):
            assert found[name] or rank not in knowing, (name, rank)
            assert not found[name] or knowing, (name, rank, found[name])
            if found[name]:
                assert f"rank {rank} called" in found[name] or "ranks " in found[name], found[name]
    assert (
        "rank 0 called broadcast(float32[6], root=0); ranks 1, 2 called nothing, and closed the group"
        in (by_rank[0]["a root alone"])
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_inquiries, "PARTING_PATIENCE", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_calls_late_keeps_no_other_from_closing_and_learns_of_it_itself() -> None:
    has_closed = threading.Event()

    def body(group: covey.Group) -> str:
        part = group.split(0)
        assert part is not None
        if group.rank == 0:
            part.broadcast(np.ones(3))
            found = error_of(part.close)
            has_closed.set()
        else:
            assert has_closed.wait(DEADLINE)
            found = error_of(lambda: part.scatter([np.ones(3)] * 2, root=1)) or error_of(part.close)
        group.barrier()
        return found

    first, second = run_threads(2, body)
    assert first == ""
    assert "rank 0 called broadcast(float64[3], root=0); rank 1 called scatter(root=1)" in second


def test_the_end_of_the_run_tells_of_groups_that_were_not_closed_and_of_no_error_that_is_told() -> None:
    called = threading.Barrier(2)

    def body(group: covey.Group) -> None:
        part = group.split(0)
        assert part is not None
        part.broadcast(np.ones(3), root=group.rank)
        with contextlib.suppress(ValueError), group.split(0) as failing:
            failing.broadcast(np.ones(3), root=group.rank)
            called.wait(DEADLINE)
            raise ValueError("it stays what it was")
        called.wait(DEADLINE)

    with pytest.raises(ExceptionGroup) as raised:
        run_threads(2, body)
    assert [type(error) for error in raised.value.exceptions] == [covey.MismatchError] * 2
    assert all("/" in str(error) for error in raised.value.exceptions), "the group that was split off"


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as job:
        yield job


AT_EXIT = """
import os
import numpy as np
import covey

group = covey.join(on_loss=os.environ["ON_LOSS"])
group.barrier()
if group.rank == 0 or os.environ["ROOTS"] == "all":
    group.broadcast(np.ones(3), root=group.rank)
print("returned", flush=True)
"""


@pytest.mark.parametrize("how", first(1, ["one raise", "all raise", "all continue"]))
def test_a_program_that_ends_after_such_a_call_fails_with_a_message(job: Job, how: str) -> None:
    """Operations of a group that survives losses end with a barrier, so there the call itself fails."""
    roots, on_loss = how.split()
    run = [sys.executable, "-m", "covey", "run", "-n", "2"]
    done = finish(job.start(AT_EXIT, run, ROOTS=roots, ON_LOSS=on_loss))
    assert done.code == 1, done
    theirs = "nothing, and closed the group" if roots == "one" else "broadcast(float64[3], root=1)"
    assert f"rank 0 called broadcast(float64[3], root=0); rank 1 called {theirs}" in done.err, done.err
    assert done.out.count("returned") == (2 if on_loss == "raise" else 0)
    assert re.search("rank [01] failed with exit code 1", done.err) or roots == "all", done.err  # both fail
