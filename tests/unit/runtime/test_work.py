from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import CancelledError, DeadlineError, MismatchError
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_work_ends_with_its_result() -> None:
    work: Work[int] = Work("count")
    assert not work.done()
    assert repr(work) == "<Work count: pending>"
    work.finish(7)
    assert work.done()
    assert (work.wait(), work.wait(0), work.result(), work.exception()) == (7, 7, 7, None)
    assert repr(work) == "<Work count: done>"


def test_a_work_that_failed_raises_the_same_error_every_time() -> None:
    work: Work[int] = Work("count")
    error = MismatchError("differs")
    work.fail(error)
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            work.wait(0)
        assert caught.value is error
    assert work.exception() is error
    assert repr(work) == "<Work count: failed>"


def test_a_wait_that_is_over_before_the_work_says_that_it_goes_on() -> None:
    work: Work[int] = Work("a long sum")
    with pytest.raises(DeadlineError, match=r"a long sum is not done after the timeout of 0\.01 s; it continues"):
        work.wait(0.01)
    work.finish(1)
    assert work.wait(0) == 1


def test_a_waiting_thread_is_woken_by_the_end() -> None:
    work: Work[str] = Work("text")
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(work.wait(DEADLINE)))
    thread.start()
    work.finish("done")
    thread.join(DEADLINE)
    assert got == ["done"]


def test_callbacks_run_once_at_the_end_or_at_once_after_it() -> None:
    work: Work[int] = Work("count")
    seen: list[str] = []
    work.add_done_callback(lambda ended: seen.append(f"first {ended.result()}"))
    work.add_done_callback(lambda ended: seen.append(f"second {ended.result()}"))
    assert seen == []
    work.finish(3)
    work.add_done_callback(lambda ended: seen.append(f"late {ended.result()}"))
    assert seen == ["first 3", "second 3", "late 3"]


def test_a_driven_work_makes_progress_on_the_thread_that_waits() -> None:
    steps: list[float | None] = []

    def drive(work: Work[Any], deadline: float | None) -> None:
        steps.append(deadline)
        work.finish(threading.get_ident())

    work: Work[int] = Work("driven", drive=drive)
    assert work.wait(DEADLINE) == threading.get_ident()
    work.wait()
    assert len(steps) == 1
    assert steps[0] is not None


def test_a_driven_work_that_is_not_done_in_time_goes_on() -> None:
    work: Work[int] = Work("driven", drive=lambda _work, _deadline: None)
    with pytest.raises(DeadlineError, match="continues"):
        work.wait(0.01)


def test_a_work_can_be_awaited_before_and_after_its_end_and_by_several() -> None:
    async def main() -> None:
        async def result() -> int:
            return await work

        work: Work[int] = Work("count")
        first, second = asyncio.ensure_future(result()), asyncio.ensure_future(result())
        await asyncio.sleep(0)
        thread = threading.Thread(target=work.finish, args=(5,))
        thread.start()
        async with asyncio.timeout(DEADLINE):
            assert [await first, await second, await work] == [5, 5, 5]
        thread.join(DEADLINE)

        failed: Work[int] = Work("count")
        failed.fail(MismatchError("differs"))
        with pytest.raises(MismatchError):
            await failed

    asyncio.run(main())


def test_a_work_that_ends_after_its_await_was_cancelled_or_its_loop_was_closed_raises_nothing() -> None:
    work: Work[int] = Work("count")

    async def main(*, linger: bool) -> None:
        async def result() -> int:
            return await work

        waiting = asyncio.ensure_future(result())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if linger:
            work.finish(1)
            await asyncio.sleep(0)

    asyncio.run(main(linger=False))
    asyncio.run(main(linger=True))
    assert work.wait(0) == 1


class Given:
    """A work whose result can be given back, and how often it was."""

    def __init__(self, *, can_cancel: bool) -> None:
        self.returned = 0
        self.work: Work[int] = Work("receive", cancel=self._cancel, give_back=self._give_back)
        self._can_cancel = can_cancel

    def _cancel(self, work: Work[Any]) -> bool:
        if self._can_cancel:
            work.fail(CancelledError("receive was cancelled"))
        return self._can_cancel

    def _give_back(self) -> None:
        self.returned += 1


async def cancelled(work: Work[Any], before: Callable[[], None] = lambda: None) -> None:
    """Cancel an await of a work; `before` runs while the loop cannot."""
    task = asyncio.ensure_future(asyncio.wait_for(work, None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    before()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_await_withdraws_the_receive() -> None:
    given = Given(can_cancel=True)
    asyncio.run(cancelled(given.work))
    assert given.returned == 0
    with pytest.raises(CancelledError):
        given.work.wait(0)


def test_a_result_that_came_as_the_await_was_cancelled_is_given_back() -> None:
    given = Given(can_cancel=False)
    asyncio.run(cancelled(given.work, before=lambda: given.work.finish(7)))
    assert given.returned == 1
    with pytest.raises(CancelledError):
        given.work.wait(0)
    late = Given(can_cancel=False)  # its message is here, and another thread is about to tell of it
    teller = threading.Timer(0.05, late.work.finish, [7])
    asyncio.run(cancelled(late.work, before=teller.start))
    assert late.returned == 1, "before the await ended: the next receive must not overtake the message"
    teller.join()


def test_a_result_that_comes_much_later_is_given_back_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.runtime.work.ENDING_SECONDS", 0.01)
    given = Given(can_cancel=False)
    asyncio.run(cancelled(given.work))
    assert not given.work.done()
    given.work.finish(7)
    assert given.returned == 1


def test_a_result_that_somebody_has_is_not_given_back() -> None:
    given = Given(can_cancel=False)
    given.work.finish(7)
    assert given.work.wait(0) == 7
    given.work.release()
    assert given.returned == 0
    given.work.release(is_taken=True)  # the caller drops it
    assert given.returned == 1

    async def two() -> int:
        shared = Given(can_cancel=True)
        keeper = asyncio.ensure_future(asyncio.wait_for(shared.work, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await cancelled(shared.work)
        shared.work.finish(8)
        return await keeper

    assert asyncio.run(two()) == 8


def test_a_failed_work_gives_nothing_back_and_a_collective_goes_on() -> None:
    given = Given(can_cancel=False)
    given.work.fail(MismatchError("differs"))
    given.work.release()
    assert given.returned == 0
    work: Work[int] = Work("sum")
    asyncio.run(cancelled(work))
    work.finish(1)
    assert work.wait(0) == 1


def test_asking_for_the_error_of_an_ended_work_keeps_nothing_of_those_who_ask() -> None:
    shared = ValueError("for many works")
    kept: list[weakref.ref[Any]] = []

    def ask(work: Work[None]) -> None:
        memory = np.ones(3)
        kept.append(weakref.ref(memory))
        assert work.exception() is shared

    for _ in range(3):
        work: Work[None] = Work("one of them")
        work.add_done_callback(ask)
        work.fail(shared)
    assert shared.__traceback__ is None
    assert [memory() for memory in kept] == [None] * 3
