"""Operations keep their order, however ranks are paced, however works are awaited, whatever other groups do."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import in_part, pairs
from tests.support.values import LANES, all_values, combined, same, values
from tests.support.waiting import DEADLINE

from covey import BusyError, ClosedError, ConfigError, CoveyError, DeadlineError, MismatchError
from covey.runtime.collectives.call_log import make_call
from covey.runtime.group.internals import engine_of
from covey.testing.threads import run_threads
from covey.wire.header import TransferHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey import Group

on_lanes_in_turn = in_part("lanes", LANES)


def _turn(group: Group, number: int, *, async_op: bool = False) -> tuple[Any, Callable[[Any], None]]:
    """Start operation `number` of a fixed program; return its result or work, and what checks it."""
    me, size = group.rank, group.size
    count = (number * 37) % 301
    arrays = all_values(size, count, np.int64, number)
    match number % 6:
        case 0:
            return group.all_reduce(arrays[me].copy(), async_op=async_op), lambda got: same(
                got, combined("sum", arrays)
            )
        case 1:
            root = number % size
            return group.broadcast(arrays[me].copy(), root, async_op=async_op), lambda got: same(got, arrays[root])
        case 2:

            def check(got: Any) -> None:
                for rank, block in enumerate(got):
                    same(block, arrays[rank])

            return group.all_gather(arrays[me], async_op=async_op), check
        case 3:
            return group.barrier(async_op=async_op), lambda got: None
        case 4:
            expected = combined("max", arrays[: me + 1])
            return group.scan(arrays[me], "max", async_op=async_op), lambda got: same(got, expected)
        case _:
            numbers = list(range(10 * number, 10 * number + size))

            def check_sum(got: Any) -> None:
                assert got == sum(numbers)

            return group.all_reduce(numbers[me], async_op=async_op), check_sum


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 5], LANES))
def test_hundreds_of_mixed_operations_at_different_paces_stay_in_step(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        pace = random.Random(group.rank)
        for number in range(300):
            if pace.random() < 0.05:
                time.sleep(pace.random() * 0.005)
            result, check = _turn(group, number)
            check(result)

    run_threads(size, body, lanes=lanes)


@on_lanes_in_turn
def test_works_run_in_issue_order_and_may_be_awaited_in_any(lanes: str) -> None:
    def body(group: Group) -> None:
        choices = random.Random(group.rank)
        pending = []
        for number in range(120):
            asynchronous = choices.random() < 0.6  # each rank decides for itself: the order is what counts
            result, check = _turn(group, number, async_op=asynchronous)
            if asynchronous:
                pending.append((result, check))
            else:
                check(result)
        choices.shuffle(pending)
        for work, check in pending:
            check(work.wait(DEADLINE))
            assert work.done()
            assert work.exception() is None

    run_threads(3, body, lanes=lanes)


def test_a_blocking_operation_waits_for_the_works_before_it() -> None:
    def body(group: Group) -> None:
        x = np.full(10_000, 1.0)
        works = [group.all_reduce(x, async_op=True) for _ in range(10)]
        group.all_reduce(x)
        assert all(work.done() for work in works)
        assert (x == 3.0**11).all()

    run_threads(3, body)


def test_works_can_be_awaited_in_asyncio() -> None:
    async def main(group: Group) -> None:
        async with asyncio.timeout(DEADLINE):
            works = [group.all_reduce(np.full(100, float(turn)), async_op=True) for turn in range(20)]
            number = group.all_reduce(group.rank, async_op=True)
            for turn, result in enumerate(await asyncio.gather(*map(_result, works))):
                assert (result == 3 * turn).all()
            assert await number == 3
            assert await number == 3

    async def _result(work: Any) -> Any:
        return await work

    def body(group: Group) -> None:
        asyncio.run(main(group))

    run_threads(3, body)


def test_cancelling_an_await_leaves_the_operation() -> None:
    late = threading.Event()

    async def main(group: Group) -> None:
        async with asyncio.timeout(DEADLINE):
            x = np.full(5, group.rank + 1.0)
            work = group.all_reduce(x, async_op=True)
            waiting = asyncio.ensure_future(_result(work))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not work.done()
            late.set()
            assert (await work == 3).all()

    async def _result(work: Any) -> Any:
        return await work

    def body(group: Group) -> None:
        if group.rank == 0:
            asyncio.run(main(group))
        else:
            assert late.wait(DEADLINE)
            group.all_reduce(np.full(5, 2.0))

    run_threads(2, body)


def test_waiting_with_a_timeout_leaves_the_operation() -> None:
    late = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 0:
            work = group.all_reduce(1, async_op=True)
            with pytest.raises(DeadlineError, match="continues"):
                work.wait(0.01)
            late.set()
            assert work.wait(DEADLINE) == 2
        else:
            assert late.wait(DEADLINE)
            assert group.all_reduce(1) == 2

    run_threads(2, body)


def test_a_second_thread_in_the_same_group_is_an_error_and_not_a_race() -> None:
    refused = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 1:
            assert refused.wait(DEADLINE)
            assert group.all_reduce(1) == 2
            return
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(group.all_reduce(1)))
        thread.start()
        deadline = time.monotonic() + DEADLINE
        while not engine_of(group).has_pending and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(BusyError, match="another thread"):
            group.barrier()
        with pytest.raises(BusyError):
            group.all_reduce(np.ones(3), async_op=True)
        refused.set()
        thread.join(DEADLINE)
        assert results == [2]

    run_threads(2, body)


@on_lanes_in_turn
def test_split_makes_groups_by_color_in_the_order_of_keys(lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        with group.split(me % 2) as half:
            members = [rank for rank in range(5) if rank % 2 == me % 2]
            assert (half.size, half.rank) == (len(members), members.index(me))
            assert half.all_reduce(me) == sum(members)
            assert set(half.lanes().values()) <= {lanes}
            with half.split(0, key=-me) as turned:
                order = members[::-1]
                assert turned.rank == order.index(me)
                assert [block.item() for block in turned.all_gather(np.array(me))] == order
                with turned.split(turned.rank) as alone:
                    assert (alone.size, alone.rank, alone.all_reduce(7)) == (1, 0, 7)
                    with alone.split(3) as still_alone:
                        assert still_alone.all_gather_object("x") == ["x"]
        none = group.split(None if me < 3 else -4)
        assert (none is None) == (me < 3)
        if none is not None:
            with none:
                assert none.all_reduce(me) == 7
        same_keys = group.split(1, key=0)
        with same_keys:
            assert same_keys.rank == me
            assert same_keys.live == tuple(range(5))
        assert group.all_reduce(1) == 5

    run_threads(5, body, lanes=lanes)


@on_lanes_in_turn
def test_groups_are_used_at_the_same_time_from_different_threads(lanes: str) -> None:
    def body(group: Group) -> None:
        groups = [group, group.split(0), group.split(0, key=-group.rank), group.split(group.rank % 2)]
        errors: list[BaseException] = []

        def program(number: int, member: Group) -> None:
            try:
                pace = random.Random(10 * group.rank + number)
                for turn in range(60):
                    if pace.random() < 0.1:
                        time.sleep(pace.random() * 0.003)
                    result, check = _turn(member, turn + number)
                    check(result)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=program, args=each, daemon=True) for each in enumerate(groups)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        if errors:
            raise errors[0]
        for child in groups[1:]:
            child.close()
        group.barrier()

    run_threads(4, body, lanes=lanes)


@on_lanes_in_turn
def test_closing_a_split_group_leaves_its_parent_and_its_siblings_alone(lanes: str) -> None:
    def body(group: Group) -> None:
        for turn in range(8):
            one, other = group.split(0), group.split(turn % 2 if group.rank else 0)
            x = values(group.rank, 1000, np.float32, turn)
            one.all_reduce(x)  # the last operation of a group: no rank may be cut off by ranks that close first
            one.close()
            one.close()
            same(x, combined("sum", all_values(3, 1000, np.float32, turn)))
            with pytest.raises(ClosedError, match="closed"):
                one.all_reduce(x)
            assert other.all_reduce(1) == other.size
            assert group.all_reduce(1) == 3
            other.close()

    run_threads(3, body, lanes=lanes)


def test_closing_with_works_pending_ends_them_with_an_error_everywhere() -> None:
    closed = threading.Event()

    def body(group: Group) -> None:
        child = group.split(0)
        if group.rank == 0:
            works = [child.all_reduce(np.ones(10), async_op=True) for _ in range(3)]
            child.close()
            for work in works:
                assert isinstance(work.exception(), CoveyError)
            closed.set()
        else:
            assert closed.wait(DEADLINE)

            def reduce_on() -> None:
                for _ in range(4):  # what the other had sent before it gave up may still be received
                    child.all_reduce(np.ones(10))

            with pytest.raises(CoveyError):
                reduce_on()
            child.close()
        assert group.all_reduce(1) == 2

    run_threads(2, body)


def test_an_operation_that_takes_too_long_names_the_ranks_that_did_not_come() -> None:
    def body(group: Group) -> None:
        child = group.split(0)
        group.barrier()  # every rank has the child by now, so a slow rank can at least say so
        if group.rank != 1:
            with pytest.raises(DeadlineError) as late:
                child.barrier(timeout=0.4)
            assert 1 in late.value.late
            with pytest.raises(ClosedError) as refused:
                child.barrier()
            assert isinstance(refused.value.__cause__, DeadlineError)
        group.barrier()
        child.close()

    run_threads(3, body)


def test_a_group_of_one_needs_no_special_case() -> None:
    def body(group: Group) -> None:
        x = np.arange(4.0)
        for algorithm in ("exchange", "doubling", "direct", "ring"):
            assert group.all_reduce(x, algorithm=algorithm) is x
        assert group.all_reduce(x, "mean", weight=3) is x
        same(x, np.arange(4.0))
        assert group.all_reduce(x, async_op=True).wait(DEADLINE) is x
        assert group.lanes() == {}
        assert group.live == (0,)
        with pytest.raises(ConfigError):
            group.broadcast(x, 1)
        child = group.split(5)
        assert child is not None
        child.close()
        with pytest.raises(ClosedError):
            child.barrier()

    run_threads(1, body)


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
            child.all_reduce(np.ones(3), async_op=True).wait(DEADLINE)
            del child
        gc.collect()
        deadline = time.monotonic() + DEADLINE
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
        return [float(second.wait(DEADLINE)[0]), float(message.wait(DEADLINE)[0])]

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
        one.add_done_callback(lambda _: seen.append(float(two.wait(DEADLINE)[0])))
        group.barrier()
        one.wait(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        return seen[0]

    assert run_threads(2, body)[1] == 2.0


def test_strided_arrays_are_read_when_the_operation_runs() -> None:
    def body(group: Group) -> list[float]:
        x = np.ones(8)[::2] if group.rank == 0 else np.ones(4)
        works = [group.all_reduce(x, async_op=True) for _ in range(2)]
        for work in works:
            work.wait(DEADLINE)
        return [float(value) for value in x]

    assert run_threads(2, body) == [[4.0] * 4] * 2


def test_the_header_of_a_rank_that_never_answers_tells_what_it_called() -> None:
    """Rank 1 has a header of rank 0, which is thought to be here and does not answer; rank 1 called nothing."""

    def body(group: Group) -> str:
        group.barrier()
        engine = engine_of(group)
        said = make_call("broadcast", 0, (6,), root=0)
        if group.rank == 1:
            header = TransferHeader(said.operation, said.dtype, 0, 0, 0, engine.id, said.fingerprint, 2, 0, 48)
            engine.stalls.recognise(engine.ranks[0], header, None, is_here=True)
            engine.stalls.compare(2)
        with pytest.raises(MismatchError) as caught:
            group.recv(0 if group.rank else 1)
        return str(caught.value)

    assert all("rank 0 called broadcast(" in told for told in run_threads(2, body)[1:])
