"""A queued collective is cancelled on all ranks or on none, whichever rank asks for it and when."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds
from tests.support.values import LANES
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.runtime.collectives.cancelling import Cancellation
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

SIZE = 3
OnLoss = Literal["raise", "continue"]


def outcome(work: Any) -> str:
    """Return "done", or the text of the cancellation."""
    try:
        work.wait(DEADLINE)
    except covey.CancelledError as error:
        return str(error)
    return "done"


def cancellation_of(work: Any) -> Cancellation:
    found = work._cancel.__self__
    assert isinstance(found, Cancellation)
    return found


@pytest.mark.parametrize("on_loss", ["raise", "continue"])
@pytest.mark.parametrize("lanes", LANES[:2])
def test_a_collective_that_waits_on_one_rank_is_cancelled_on_all(lanes: str, on_loss: OnLoss) -> None:
    """Rank 2 begins nothing before rank 1 has cancelled what waits behind the first operation."""
    is_cancelled = threading.Event()

    def body(group: Group) -> Any:
        arrays = [np.arange(2000.0) * (group.rank + 1) + number for number in range(4)]
        before = [x.copy() for x in arrays]
        if group.rank == 2:
            assert is_cancelled.wait(DEADLINE)
        with group.cancellable():
            works = [group.all_reduce(x, async_op=True) for x in arrays[:3]]
            barrier = group.barrier(async_op=True)
        if group.rank == 1:
            assert [work.cancel() for work in (works[1], barrier)] == [True, True]
            assert works[1].cancel(), "it is cancelled already"
            is_cancelled.set()
        told = [outcome(work) for work in (*works, barrier)]
        assert told[0] == told[2] == "done"
        for text, what in ((told[1], "all_reduce(float64[2000]"), (told[3], "barrier()")):
            assert what in text
            assert "was cancelled on all ranks: rank 1 asked for it" in text
        assert isinstance(works[1].exception(), covey.CancelledError)
        assert not works[1].cancel(), "it has ended"
        total = np.arange(2000.0) * sum(range(1, SIZE + 1))
        assert np.array_equal(arrays[0], total)
        assert np.array_equal(arrays[1], before[1]), "the array of what was cancelled is as it was"
        assert np.array_equal(arrays[2], total + 2 * SIZE)
        group.all_reduce(arrays[3])  # the short way again
        group.all_reduce(arrays[3])
        return arrays[3][1]

    assert len({*run_threads(SIZE, body, lanes=lanes, on_loss=on_loss)}) == 1


def test_what_has_begun_or_was_issued_without_the_block_is_not_cancelled() -> None:
    has_asked = threading.Event()

    def body(group: Group) -> None:
        x = np.arange(3.0) + group.rank
        if group.rank:
            assert has_asked.wait(DEADLINE)
        with group.cancellable():
            first = group.all_reduce(x, async_op=True)
        plain = group.all_reduce(x, async_op=True)
        if group.rank == 0:
            wait_until(lambda: cancellation_of(first)._has_begun)
            assert not first.cancel()
            assert not plain.cancel()
            has_asked.set()
        assert outcome(first) == outcome(plain) == "done"
        assert x[0] == 2.0

    run_threads(2, body)


def test_a_rank_that_waits_itself_hears_of_the_cancellation_and_the_group_goes_on() -> None:
    is_cancelled = threading.Event()

    def body(group: Group) -> None:
        with group.cancellable():
            if group.rank == 0:
                first, second = (group.all_reduce(np.ones(2), async_op=True) for _ in range(2))
                assert second.cancel()
                is_cancelled.set()
                assert (outcome(first), outcome(second)[:10]) == ("done", "all_reduce")
            else:
                assert is_cancelled.wait(DEADLINE)
                group.all_reduce(np.ones(2))
                with pytest.raises(covey.CancelledError, match="rank 0 asked"):
                    group.all_reduce(np.ones(2))
        assert group.all_gather(np.ones(1))[1][0] == 1.0

    run_threads(2, body)


def test_a_rank_outside_of_the_block_called_something_else() -> None:
    def body(group: Group) -> None:
        block = contextlib.nullcontext() if group.rank else group.cancellable()
        with block, pytest.raises(covey.MismatchError, match=r"in group\.cancellable\(\)"):
            group.all_reduce(np.ones(5000))

    run_threads(2, body)


@in_turn(seed=seeds(4))
def test_whatever_ranks_cancel_at_any_moment_all_have_the_same_outcomes(seed: int) -> None:
    def body(group: Group) -> list[str]:
        chance, own = random.Random(seed), random.Random(100 * seed + group.rank)
        works, arrays, asked = [], [], set()
        with group.cancellable():
            for number in range(60):
                arrays.append(np.full(int(10 ** chance.uniform(0, 4)), float(group.rank + number)))
                works.append(group.all_reduce(arrays[-1], async_op=True))
                if own.random() < 0.3:
                    which = own.randrange(max(0, number - 5), number + 1)
                    if works[which].cancel():
                        asked.add(which)
                if own.random() < 0.05:
                    works[own.randrange(number + 1)].wait_until_done(0.002)
        told = [outcome(work) for work in works]
        for number, text in enumerate(told):
            if text == "done":
                assert number not in asked, "a cancellation was not heard"
                assert arrays[number][0] == sum(range(SIZE)) + SIZE * number
            else:
                assert arrays[number][0] == group.rank + number
        return ["done" if text == "done" else text.rpartition(": ")[2] for text in told]

    first, *others = run_threads(SIZE, body, on_loss="continue" if seed % 2 else "raise")
    assert all(other == first for other in others)
    assert 0 < first.count("done") < 60
