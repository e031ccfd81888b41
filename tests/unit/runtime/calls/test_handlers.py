"""The threads and the loop that run functions for other nodes."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.support.waiting import DEADLINE

from covey.runtime.calls import handlers
from covey.runtime.calls.handlers import HandlerLoop, HandlerThreads


def wait_for(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=DEADLINE)


def test_threads_are_reused_and_end_when_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "IDLE_HANDLER_SECONDS", 0.05)
    threads, done, used = HandlerThreads("test reuse"), threading.Semaphore(0), set[int]()

    def job() -> None:
        used.add(threading.get_ident())
        done.release()

    for _ in range(30):
        threads.run(job)
        wait_for(done, 1)
        time.sleep(0.001)  # the thread is idle again
    assert len(used) < 5
    deadline = time.monotonic() + DEADLINE
    while any("test reuse" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    threads.run(job)
    wait_for(done, 1)
    threads.close()


def test_a_job_waits_for_a_busy_thread_if_the_system_starts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done, go = HandlerThreads("test scarce"), threading.Semaphore(0), threading.Event()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            threads.run(done.release)

    def wait() -> None:
        assert go.wait(DEADLINE)
        done.release()

    threads.run(wait)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        threads.run(done.release)
    assert not done.acquire(timeout=0.05)
    go.set()
    wait_for(done, 4)
    threads.close()


def test_a_job_that_raises_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = HandlerThreads("test raise"), threading.Semaphore(0)
    threads.run(lambda: 1 // 0)  # type: ignore[arg-type]
    for _ in range(3):
        threads.run(done.release)
    wait_for(done, 3)
    until = time.monotonic() + DEADLINE
    while "a thread continues after an error" not in caplog.text:  # the thread that failed may be the last to get there
        assert time.monotonic() < until
        time.sleep(0.01)
    threads.close()


def test_tasks_run_on_a_loop_of_their_own_and_end_with_it() -> None:
    loop, ended = HandlerLoop("test loop"), threading.Semaphore(0)
    names: list[str] = []

    async def task(seconds: float) -> None:
        names.append(threading.current_thread().name)
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.release()

    loop.cancel("nothing runs yet")
    loop.run(1, task(0.0))
    wait_for(ended, 1)
    for key in (2, 3):
        loop.run(key, task(DEADLINE))
    deadline = time.monotonic() + DEADLINE
    while len(names) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    loop.cancel(2)
    wait_for(ended, 1)
    loop.close()
    wait_for(ended, 1)
    loop.run(4, task(0.0))  # closed: it does not run, and is not left unawaited
    assert set(names) == {"test loop loop"}


def test_a_task_that_is_cancelled_before_it_began_is_reported() -> None:
    loop, told, ran = HandlerLoop("test early cancel"), threading.Semaphore(0), list[int]()

    async def task(number: int) -> None:
        ran.append(number)

    async def hold_up() -> None:
        for number in range(3):  # while this runs, both requests wait for the loop
            loop.run(number, task(number), told.release)
            loop.cancel(number)

    loop.run("first", hold_up())
    wait_for(told, 3)
    assert ran == []
    loop.close()
