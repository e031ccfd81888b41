"""Calls with arrays like earlier ones, which the compiled executor runs without the long way through Python."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from tests.support.compiled import needs_native, use_executors
from tests.support.sets import first, in_part, pairs
from tests.support.values import LANES, all_values, same, total, values
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey import MismatchError
from covey.base.arithmetic import BFLOAT16
from covey.net.host.machine import native_crypto
from covey.runtime.group.internals import engine_of, issuer_of
from covey.runtime.group.moves import ALL_GATHER, ALL_TO_ALL
from covey.runtime.joining.node import node_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey import Group, Op
    from covey.runtime.collectives.engine import Engine

    Array = np.ndarray[Any, np.dtype[Any]]

on_lanes_in_turn = in_part("lanes", LANES)
REPEATED = range(4)


def exchanged(group: Group, shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Return what `all_to_all` gives this rank if every rank passes its `values`."""
    return np.stack([values(rank, shape, dtype, seed)[group.rank] for rank in range(group.size)])


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 3, 4], LANES))
@pytest.mark.parametrize("dtype", first(2, ["float32", "bool", "complex128", "bfloat16"]))
def test_every_repetition_has_its_own_result(size: int, dtype: str, lanes: str) -> None:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    op: Op = "or" if dtype == "bool" else "sum"

    def body(group: Group) -> None:
        for count in (0, 1, 501, 9001):
            rows, room, part = np.zeros((size, count), kind), np.zeros((size, 3), kind), np.zeros((count, 2), kind)
            for seed in REPEATED:
                same(
                    group.all_gather(values(group.rank, count, kind, seed), out=rows),
                    np.stack(all_values(size, count, kind, seed)),
                )
                sums = total(op, size, (size * count, 2), kind, seed)[group.rank * count : (group.rank + 1) * count]
                same(group.reduce_scatter(values(group.rank, (size * count, 2), kind, seed), op, out=part), sums)
                same(group.reduce_scatter(values(group.rank, (size * count, 2), kind, seed), op), sums)
                same(
                    group.all_to_all(values(group.rank, (size, 3), kind, seed), out=room),
                    exchanged(group, (size, 3), kind, seed),
                )
                same(group.all_reduce(values(group.rank, count, kind, seed), op), total(op, size, count, kind, seed))
                root = seed % size
                same(group.broadcast(values(group.rank, count, kind, seed), root), values(root, count, kind, seed))
                group.barrier()

    run_threads(size, body, lanes=lanes)


@on_lanes_in_turn
def test_arrays_may_overlap_be_read_only_or_lie_anywhere(lanes: str) -> None:
    def body(group: Group) -> None:
        me, size, count = group.rank, group.size, 40
        for seed in REPEATED:
            every = np.stack(all_values(size, count, seed=seed))
            sums = total("sum", size, (size, count), seed=seed)
            odd = np.empty(8 * count + 1, np.uint8)[1:].view(np.float64)  # not aligned
            odd[...] = every[me]
            frozen = values(me, count, seed=seed)
            frozen.flags.writeable = False
            for x in (every[me].copy(), frozen, odd):
                same(group.all_gather(x, out=np.zeros((size, count))), every)
            same(group.all_reduce(odd), total("sum", size, count, seed=seed))
            for row in (me, 0):  # its own, and on the other ranks one that is overwritten
                rows = np.zeros((size, count))
                rows[row] = every[me]
                same(group.all_gather(rows[row], out=rows), every)
                parts = values(me, (size, count), seed=seed)
                same(group.reduce_scatter(parts, out=parts[row : row + 1]), sums[me : me + 1])
            sent = values(me, (size, count), seed=seed)
            same(group.all_to_all(sent, out=sent), exchanged(group, (size, count), np.float64, seed))

    run_threads(3, body, lanes=lanes)


@on_lanes_in_turn
def test_a_rank_may_come_late_to_any_repetition(lanes: str) -> None:
    def body(group: Group) -> None:
        x, rows = np.empty(5), np.empty((2, 5))
        for seed in range(6):
            if seed % 2 == group.rank:
                time.sleep(0.03)  # longer than the other rank looks for it at first
            x[...] = values(group.rank, 5, seed=seed)
            same(group.all_gather(x, out=rows), np.stack(all_values(2, 5, seed=seed)))

    run_threads(2, body, lanes=lanes)


@on_lanes_in_turn
@pytest.mark.parametrize("other", ["another length", "another operation", "a list"])
def test_a_different_call_after_equal_ones_is_a_mismatch_on_every_rank(other: str, lanes: str) -> None:
    def gather(group: Group, count: int) -> Any:
        return group.all_gather(values(group.rank, count), out=np.empty((3, count)))

    different: dict[str, Callable[[Group], Any]] = {
        "another length": lambda group: gather(group, 7),
        "another operation": lambda group: group.all_to_all(np.empty((3, 6)), out=np.empty((3, 6))),
        "a list": lambda group: group.all_gather(values(1, 6)),
    }

    def differ(group: Group) -> None:
        if group.rank == 1:
            different[other](group)
        else:
            gather(group, 6)
        group.barrier()  # a rank that only had to send may get here

    def body(group: Group) -> None:
        for _ in REPEATED:
            gather(group, 6)
        with pytest.raises(MismatchError):
            differ(group)

    run_threads(3, body, lanes=lanes)


def test_an_output_that_does_not_fit_is_refused_after_any_repetition() -> None:
    def body(group: Group) -> None:
        for _ in REPEATED:
            group.all_gather(np.ones(6), out=np.empty((2, 6)))
            for wrong in (np.empty((6, 2)), np.empty((2, 6), np.int64), np.empty((2, 3, 2)), np.empty(12)):
                with pytest.raises(TypeError, match="out must be"):
                    group.all_gather(np.ones(6), out=wrong)

    run_threads(2, body)


@needs_native
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_small_repetitions_do_take_the_shortcut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this test a shortcut that is never taken would go unnoticed: its result is the same."""
    use_executors(monkeypatch, "native")
    calls: dict[str, tuple[tuple[str, ...], Callable[[Group], tuple[Array, Array]]]] = {
        "all_gather": (ALL_GATHER, lambda group: (values(group.rank, 7), np.empty((2, 7)))),
        "reduce_scatter": (("reduce_scatter", "sum"), lambda group: (values(group.rank, 7), np.empty(4 - group.rank))),
        "all_to_all": (ALL_TO_ALL, lambda group: (values(group.rank, (2, 7)), np.empty((2, 7)))),
    }
    what, arrays = calls[name]

    def body(group: Group) -> None:
        x, out = arrays(group)
        shortcut = group._engine.shortcut
        assert shortcut is not None
        assert not issuer_of(group).took_shortcut(shortcut, shortcut.name(what), x, out)
        expected = getattr(group, name)(x, out=out).copy()
        out[...] = -1
        assert issuer_of(group).took_shortcut(shortcut, shortcut.name(what), x, out)
        same(out, expected)
        held = x, out, x.dtype, what  # the last two are also held by the other rank for a moment
        before = [sys.getrefcount(each) for each in held]
        for _ in range(100):
            getattr(group, name)(x, out=out)
        after = [sys.getrefcount(each) for each in held]
        assert after[:2] == before[:2]
        assert max(after[2] - before[2], after[3] - before[3]) < 50
        large = np.empty((2, 1 << 16))
        for _ in REPEATED:  # too large for the moment in which the interpreter's lock is held
            group.all_to_all(large, out=np.empty_like(large))
        assert not issuer_of(group).took_shortcut(shortcut, ALL_TO_ALL, large, np.empty_like(large))

    run_threads(2, body, lanes="unix")


@needs_native
@pytest.mark.skipif(bool(native_crypto()), reason=native_crypto())
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_lane_that_may_call_python_to_seal_does_not_in_a_shortcut(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread could then start an operation in the middle of this one."""
    use_executors(monkeypatch, "native")

    def body(group: Group) -> tuple[bool, ...]:
        taken = []
        for count in (4095, 4096, 30_000):
            for seed in REPEATED:
                x = values(group.rank, count, np.float32, seed)
                if seed < 3:
                    group.all_reduce(x)
                else:
                    shortcut = group._engine.shortcut
                    assert shortcut is not None
                    outcome = shortcut.run(x, "sum")
                    taken.append(outcome is not False)
                    if outcome not in (True, False):
                        issuer_of(group).resume(x, outcome)
                    elif not outcome:
                        group.all_reduce(x)
                same(x, total("sum", 2, count, np.float32, seed))
        return tuple(taken)

    with mock.patch("covey.net.lanes.native.has_slow_libcrypto", return_value=is_slow):
        assert run_threads(2, body, lanes="secure") == [(True, not is_slow, not is_slow)] * 2


@needs_native
def test_a_repeated_call_with_a_timeout_takes_the_shortcut_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    use_executors(monkeypatch, "native")
    has_raised = threading.Event()

    def body(group: Group) -> None:
        shortcut = group._engine.shortcut
        assert shortcut is not None
        run, outcomes = shortcut.run, list[Any]()

        def watched(*args: Any) -> Any:
            outcomes.append(run(*args))
            return outcomes[-1]

        shortcut.run = watched
        for seed in REPEATED:
            x = values(group.rank, 5, np.float32, seed)
            group.all_reduce(x, timeout=DEADLINE)
            same(x, total("sum", 2, 5, np.float32, seed))
        assert outcomes[0] is False
        assert False not in outcomes[1:]
        if group.rank == 0:
            with pytest.raises(covey.DeadlineError, match=r"0\.02 s"):
                group.all_reduce(x, timeout=0.02)
            has_raised.set()
        else:
            assert has_raised.wait(DEADLINE)
        with pytest.raises(covey.ConfigError):
            group.all_reduce(x, timeout=-1)

    run_threads(2, body)


@on_lanes_in_turn
def test_asynchronous_repetitions_are_begun_at_once_and_end_in_order(lanes: str) -> None:
    def body(group: Group) -> None:
        for seed in range(12):
            x, y = (values(group.rank, 9, np.float32, seed + each) for each in (0, 100))
            if seed % 3 == group.rank:
                time.sleep(0.003)
            ended = list[Any]()
            works = [group.all_reduce(x, async_op=True, timeout=DEADLINE), group.all_reduce(y, async_op=True)]
            for work in works:
                work.add_done_callback(ended.append)
            if seed % 2:
                group.barrier()
            assert works[1].wait() is y
            assert works[0].wait() is x
            assert works[0].contributors == (0, 1)
            same(x, total("sum", 2, 9, np.float32, seed))
            same(y, total("sum", 2, 9, np.float32, seed + 100))
            assert ended == works

    run_threads(2, body, lanes=lanes)


@needs_native
def test_an_asynchronous_repetition_sends_before_any_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that comes last finds what it needs, so its work is done when it is returned."""
    use_executors(monkeypatch, "native")
    has_begun = [threading.Event() for _ in range(3)]

    def body(group: Group) -> list[bool]:
        x, found = values(group.rank, 4), []
        group.all_reduce(x)
        for turn in has_begun:
            if group.rank == 1:
                assert turn.wait(DEADLINE)
            work = group.all_reduce(x, async_op=True)
            found.append(work.done())
            turn.set()
            work.wait()
            group.barrier()
        return found

    assert run_threads(2, body)[1] == [True] * 3


@needs_native
def test_a_change_that_a_rank_learns_of_in_a_repetition_is_known_to_all_after_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_executors(monkeypatch, "native")
    engines: dict[int, Engine] = {}
    has_sent = threading.Event()

    def body(group: Group) -> list[bool]:
        engine = engines[group.rank] = engine_of(group)
        node, atomic, pending = node_of(group), engine.atomic, []
        assert node is not None
        assert atomic is not None
        commit, stalled = atomic.attempt.commit, atomic.attempt.stalled

        def stall(*args: Any) -> float:
            has_sent.set()
            return stalled(*args)

        def commit_late() -> None:
            other = engines[0].atomic
            assert other is not None
            wait_until(lambda: other.is_executing)  # the long way: its shortcut has begun the barrier
            commit()

        for _ in range(5):
            group.all_reduce(np.zeros(1))
        node.views.wishes.is_elastic = True  # too late for its group, whose operations take the shortcut
        for _ in range(3):
            node.views.wishes.is_draining = False
            group.barrier()
            atomic._commit.pending = False
            group.barrier()
            node.views.wishes.is_draining = group.rank == 0
            if group.rank:
                atomic.attempt.close_shortcut()
                with mock.patch.multiple(atomic.attempt, commit=commit_late, stalled=stall):
                    group.all_reduce(np.zeros(1))
            else:
                assert has_sent.wait(DEADLINE)
                has_sent.clear()
                group.all_reduce(np.zeros(1))
            pending.append(group.change_pending)
        return pending

    first, second = run_threads(2, body, on_loss="continue")
    assert first == second
