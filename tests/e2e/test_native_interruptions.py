"""Whatever interrupts an operation of the compiled executor ends it as fast as Python's, and crashes nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.compiled import needs_native
from tests.support.ranks import Ranks, attempt, await_go, say

import covey

pytestmark = [needs_native]

on_both = pytest.mark.parametrize(
    ("lanes", "executor"),
    [
        *(("shm", "native"), ("secure", "python")),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in (("shm", "python"), ("secure", "native"))),
    ],
)


def ranks(size: int, function: Any, *args: Any, executor: str, lanes: str) -> Ranks:
    return Ranks(size, function, *args, lanes=lanes, env={"COVEY_NATIVE": "0" if executor == "python" else "1"})


def wait_or_work(how: str) -> Any:
    """Rank 1 is interrupted while it waits for rank 0, or while both are in the middle of large operations."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = covey.join()
    group.barrier()
    x = np.ones(1 << 24 if how == "working" else 5, np.float32)
    say("ready", is_native=group._engine.is_native)
    if how == "waiting":
        if group.rank == 0:
            await_go()
            os._exit(0)

        def block() -> None:
            say("blocking")
            group.all_reduce(x)

        return attempt(block)

    def work() -> None:
        while True:
            group.all_reduce(x, "max")
            say("blocking")

    ended = attempt(work)
    if group.rank == 0:
        os._exit(0)
    return ended


@on_both
@pytest.mark.parametrize("how", ["waiting", "working"])
def test_ctrl_c_ends_an_operation_that_waits_or_works(how: str, lanes: str, executor: str) -> None:
    with ranks(2, wait_or_work, how, executor=executor, lanes=lanes) as processes:
        for said in processes.hear("ready"):
            assert said["is_native"] == (executor == "native")
        processes.hear("blocking", [1])
        time.sleep(0.3)  # it is in the operation by now, as a rule
        processes.signal(1, signal.SIGINT)
        [ended] = processes.results([1])
        assert ended["error"] == "KeyboardInterrupt"


def wait_for_the_other(how: str) -> Any:
    """Rank 1 waits for rank 0 until its deadline, or until another of its threads closes the group."""
    group = covey.join()
    group.barrier()
    say("ready")
    if group.rank == 0:
        await_go()
        os._exit(0)
    if how == "deadline":
        began = time.monotonic()
        ended = attempt(lambda: group.all_reduce(np.ones(5), timeout=1.0))
        return ended["error"], ended["at"] - began >= 1.0

    def close() -> None:
        time.sleep(0.5)  # the operation has begun by now, as a rule
        group.close()

    threading.Thread(target=close, daemon=True).start()
    ended = attempt(lambda: group.all_reduce(np.ones(1 << 20)))
    return ended["error"], True


@on_both
@pytest.mark.parametrize(("how", "error"), [("deadline", "DeadlineError"), ("close", "ClosedError")])
def test_a_deadline_and_another_thread_end_a_wait(how: str, error: str, lanes: str, executor: str) -> None:
    with ranks(2, wait_for_the_other, how, executor=executor, lanes=lanes) as processes:
        processes.hear("ready")
        assert processes.results([1]) == [[error, True]]


def fork_while_working(rounds: int) -> Any:
    """The main thread forks while a worker is inside of an operation; the children end in different ways."""
    with covey.join() as group:
        results = []
        for number in range(rounds):
            x = np.full(1 << 21, number + group.rank + 1.0, np.float32)
            work = group.all_reduce(x, async_op=True)
            children = []
            for ending in range(3):
                child = os.fork()
                if not child:
                    signal.alarm(500)
                    if ending == 0:
                        os._exit(0)
                    if ending == 1:
                        sys.exit(0)  # in good order, with the copy of a group that a thread was using
                    refused = attempt(lambda: group.all_reduce(np.ones(3)))
                    os._exit(0 if refused["error"] == "ClosedError" else 1)
                children.append(child)
            results.append(float(work.wait()[-1]))
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            assert codes == [0, 0, 0], codes
        return results


@on_both
def test_children_that_are_forked_in_the_middle_of_an_operation_disturb_nothing(lanes: str, executor: str) -> None:
    with ranks(2, fork_while_working, 3, executor=executor, lanes=lanes) as processes:
        assert processes.results() == [[2.0 * number + 3.0 for number in range(3)]] * 2
        processes.await_exit()


def exit_while_working(how: str) -> Any:
    """Rank 1 ends its interpreter while a thread of it waits in an operation that never ends."""
    group = covey.join()
    group.barrier()
    say("ready")
    if group.rank == 0:
        await_go()
        os._exit(0)
    x = np.ones(1 << 20)
    if how == "worker":
        group.all_reduce(x, async_op=True)
    elif how == "daemon":
        threading.Thread(target=lambda: attempt(lambda: group.all_reduce(x)), daemon=True).start()
    else:  # dropped: nothing refers to the group and its operation any more
        group.all_reduce(x, async_op=True)
        del group
    time.sleep(0.5)
    return None


@on_both
@pytest.mark.parametrize("how", ["worker", "daemon", "dropped"])
def test_an_interpreter_ends_in_good_order_while_an_operation_runs(how: str, lanes: str, executor: str) -> None:
    with ranks(2, exit_while_working, how, executor=executor, lanes=lanes) as processes:
        processes.hear("ready")
        processes.results([1])
        processes.await_exit([1])
        assert "Fatal" not in processes.errors(1)
        assert "Traceback" not in processes.errors(1)
