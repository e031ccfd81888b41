"""Faults that a review found: each was a hang, a leak or a wrong number once."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from covey.base.errors import ClosedError, ConfigError, PeerLostError
from covey.testing import run_threads

if TYPE_CHECKING:
    from covey.runtime.group.group import Group

PATIENCE = 20.0


def test_groups_that_the_garbage_collector_frees_take_no_lock() -> None:
    def body(group: Group) -> int:
        for _ in range(30):
            child = group.split(0)
            assert child is not None
            other = 1 - child.rank
            child.send(np.array([child.rank]), other)
            assert child.recv(other) == other
            del child
        return group.all_reduce(1)

    thresholds = gc.get_threshold()
    gc.set_threshold(2, 1, 1)
    try:
        assert run_threads(2, body) == [2, 2]
    finally:
        gc.set_threshold(*thresholds)


def test_a_dropped_group_leaves_no_worker_thread() -> None:
    def body(group: Group) -> None:
        for _ in range(5):
            child = group.split(0)
            assert child is not None
            child.all_reduce(np.ones(3), async_op=True).wait(PATIENCE)
            del child
        gc.collect()
        deadline = time.monotonic() + PATIENCE
        while any("/" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)  # they end by themselves, a moment later
        group.barrier()
        assert not any("/" in thread.name for thread in threading.enumerate())

    run_threads(2, body)


def test_a_callback_that_raises_ends_neither_the_worker_nor_other_messages(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: Group) -> list[float]:
        def fail(_: Any) -> None:
            raise ZeroDivisionError

        first = group.barrier(async_op=True)
        first.add_done_callback(fail)
        second = group.all_reduce(np.ones(1), async_op=True)
        message = group.recv(1 - group.rank, async_op=True)
        message.add_done_callback(fail)
        group.send(np.array([5.0]), 1 - group.rank)
        return [float(second.wait(PATIENCE)[0]), float(message.wait(PATIENCE)[0])]

    assert run_threads(2, body) == [[2.0, 5.0]] * 2
    assert "callback" in caplog.text


def test_a_callback_may_wait_for_another_message_of_the_same_read() -> None:
    def body(group: Group) -> float | None:
        if group.rank == 0:
            group.barrier()
            for tag in (1, 2):
                group.send(np.array([float(tag)]), 1, tag)
            return None
        one, two = (group.recv(0, tag, async_op=True) for tag in (1, 2))
        seen: list[float] = []
        one.add_done_callback(lambda _: seen.append(float(two.wait(PATIENCE)[0])))
        group.barrier()
        one.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        return seen[0]

    assert run_threads(2, body)[1] == 2.0


def test_strided_arrays_are_read_when_the_operation_runs() -> None:
    def body(group: Group) -> list[float]:
        x = np.ones(8)[::2] if group.rank == 0 else np.ones(4)
        works = [group.all_reduce(x, async_op=True) for _ in range(2)]
        for work in works:
            work.wait(PATIENCE)
        return [float(value) for value in x]

    assert run_threads(2, body) == [[4.0] * 4] * 2


@pytest.mark.parametrize("closer", [0, 1])
def test_a_group_that_another_rank_has_closed_is_lost_at_once(closer: int) -> None:
    def body(group: Group) -> None:
        child = group.split(0)
        assert child is not None
        if group.rank == closer:
            child.close()
        group.barrier()
        if group.rank != closer:
            started = time.monotonic()
            with pytest.raises(PeerLostError):
                child.barrier(timeout=PATIENCE)
            assert time.monotonic() - started < 2
        group.barrier()

    run_threads(2, body)


def test_closing_the_run_ends_messages_of_split_groups() -> None:
    def body(group: Group) -> None:
        child = group.split(0)
        assert child is not None
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                child.recv(1 - child.rank, timeout=PATIENCE)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        group.barrier()
        group.close()
        thread.join(PATIENCE)
        assert isinstance(ended[0], ClosedError | PeerLostError)

    run_threads(2, body)


def test_arguments_that_are_not_whole_numbers_change_nothing() -> None:
    def body(group: Group) -> float:
        other = 1 - group.rank
        with pytest.raises(ConfigError, match=r"tag=1\.5"):
            group.send(np.ones(1), other, tag=1.5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="counts"):
            group.reduce_scatter(np.ones(4), counts=[2.5, 1.5])  # type: ignore[list-item]
        group.send(np.array([7.0]), np.int64(other), tag=np.int8(3))
        return float(group.recv(other, 3, timeout=float("inf"))[0])

    assert run_threads(2, body) == [7.0, 7.0]


def leave_after(group: Group, x: Any) -> None:
    with group:
        group.broadcast(x)
        sys.exit(0)


def test_leaving_by_sys_exit_zero_is_an_orderly_end() -> None:
    def body(group: Group) -> float | None:
        x = np.array([3.0 if group.rank == 0 else 0.0])
        if group.rank == 0:
            with pytest.raises(SystemExit):
                leave_after(group, x)
            return None
        time.sleep(0.3)  # slow, so that rank 0 is gone by now
        group.broadcast(x)
        return float(x[0])

    assert run_threads(2, body) == [None, 3.0]


def test_one_array_under_two_names_is_refused() -> None:
    def body(group: Group) -> None:
        x = np.ones(4)
        with pytest.raises(ConfigError, match="'a' and 'b' share memory"):
            group.sync_gradients({"a": x, "b": x[1:]})
        group.sync_gradients({"even": x[::2], "odd": x[1::2]}, op="sum")
        assert (x == 2).all()

    run_threads(2, body)
