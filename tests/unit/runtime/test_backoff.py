"""`Backoff` under a clock that the test moves: pauses, the end, and the lines that say what is waited for."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from covey.base.pace import Growing
from covey.runtime.backoff import FORGET_SECONDS, TELL_AGAIN_SECONDS, TELL_FAILURE_SECONDS, Backoff

if TYPE_CHECKING:
    import pytest


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_up_to_the_longest_and_begin_again_after_a_success() -> None:
    tries = Backoff("a thing", Growing(0.1, 0.5), clock=Clock())
    assert tries.pause == 0.0
    pauses = []
    for _ in range(5):
        tries.failed("no")
        pauses.append(tries.pause)
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5]
    tries.worked()
    tries.failed("no")
    assert tries.pause == 0.1


def test_a_pause_after_a_million_failures_is_the_longest() -> None:
    assert Growing(0.1, 2.0).after(10**6) == 2.0
    assert Growing(1e-9, 2.0, 1.5).after(10**6) == 2.0


def test_tries_end_in_time_and_the_last_pause_is_not_longer_than_what_is_left() -> None:
    clock = Clock()
    tries = Backoff("a thing", Growing(4.0, 4.0), within=5.0, clock=clock)
    assert not tries.is_over
    tries.failed("no")
    clock.now += 4.0
    tries.failed("no")
    assert not tries.is_over
    assert tries.pause == 1.0
    clock.now += 1.0
    assert tries.is_over
    tries.worked()
    assert not tries.is_over


def test_a_line_says_after_a_while_what_is_waited_for_and_why_and_seldom_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "covey")
    clock = Clock()
    tries = Backoff("a lane to rank 3", Growing(0.1, 1.0), clock=clock)
    tries.failed("first reason")
    clock.now += TELL_FAILURE_SECONDS - 0.1
    tries.failed("second reason")
    assert not caplog.messages
    clock.now += 0.1
    tries.failed("the backlog is full")
    assert caplog.messages == ["waiting for a lane to rank 3 for 5 s: the backlog is full"]
    for _ in range(int(TELL_AGAIN_SECONDS)):
        clock.now += 1.0
        tries.failed("still full")
    assert caplog.messages[1:] == ["waiting for a lane to rank 3 for 65 s: still full"]
    tries.worked()
    assert caplog.messages[2:] == ["a lane to rank 3: succeeded after 65 s"]


def test_a_failure_long_after_the_last_one_is_a_first_one() -> None:
    clock = Clock()
    tries = Backoff("a thing", Growing(0.1, 1.0), within=5.0, clock=clock)
    tries.failed("no")
    clock.now += 4.9
    tries.failed("no")
    assert not tries.has_lasted(5.0)
    clock.now += 0.1
    assert tries.has_lasted(5.0)
    clock.now += FORGET_SECONDS
    assert not tries.has_lasted(5.0)
    tries.failed("no")
    assert tries.failures == 1
    assert not tries.is_over


def test_a_line_is_written_while_the_first_try_hangs(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    tries = Backoff("rank 1", Growing(0.1, 1.0), clock=clock)

    async def work() -> None:
        with tries.telling():
            clock.now += TELL_FAILURE_SECONDS
            with tries.telling():  # the second timer is due at once
                while not caplog.messages:  # noqa: ASYNC110  (a log handler tells no loop)
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert caplog.messages == ["waiting for rank 1 for 5 s; nothing has answered yet"]


def test_a_rest_can_be_ended_before_its_time() -> None:
    tries = Backoff("a thing", Growing(600.0, 600.0))
    tries.failed("no")

    async def work() -> None:
        resting = asyncio.ensure_future(tries.rest())
        await asyncio.sleep(0)
        tries.wake()
        await resting

    asyncio.run(asyncio.wait_for(work(), 60))
    woken = threading.Event()
    woken.set()
    assert tries.rest_on(woken)
