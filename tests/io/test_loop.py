"""Things that are made on the control loop have an owner at any time, whenever the program is interrupted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime import loop as control
from covey.runtime.joining import node as node_module
from covey.runtime.joining.node import node_of
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import covey

TURNS = 600


class Interrupt(BaseException):
    """Ctrl-C."""


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGUSR1 interrupts the thread that makes something."""

    def interrupt(_signum: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not control.make.__code__:
            frame = frame.f_back
        if frame is not None and "tasks" in frame.f_locals:
            raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("interrupts")
def test_what_is_made_is_returned_or_discarded_and_what_is_not_made_is_cleaned_up_first() -> None:
    rng = random.Random(1)
    made: list[int] = []
    cleaned: list[int] = []
    discarded: list[int] = []
    returned: list[int] = []
    unmade: list[int] = []

    async def making(turn: int, pauses: int) -> int:
        try:
            for _ in range(pauses):
                await asyncio.sleep(0.0002)
            made.append(turn)
            return turn
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            cleaned.append(turn)
            raise

    def send(after: float) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGUSR1)

    for turn in range(TURNS):
        sender = threading.Thread(target=send, args=(0.002 * rng.random() ** 3,))
        sender.start()
        state: list[Any] = []

        def otherwise(turn: int = turn, state: list[Any] = state) -> None:
            state.append((turn in made, turn in cleaned))
            unmade.append(turn)

        try:
            returned.append(control.make(making(turn, rng.randrange(6)), discard=discarded.append, otherwise=otherwise))
        except Interrupt:
            assert state in ([], [(False, True)], [(False, False)])  # the last: it had not even begun
        sender.join()
    wait_until(lambda: sorted(returned + discarded) == made)
    assert sorted(returned + discarded + unmade) == list(range(TURNS))
    assert set(cleaned) <= set(unmade)
    assert len(returned) > TURNS // 10
    assert len(unmade) > TURNS // 10


def test_what_cannot_be_made_is_an_error_once_everything_is_cleaned_up() -> None:
    said: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("cannot divide the cake")

    with pytest.raises(ValueError, match="cake"):
        control.make(
            fail(), discard=lambda made: said.append(f"discards {made}"), otherwise=lambda: said.append("otherwise")
        )
    assert said == ["otherwise"]


def test_a_group_that_the_garbage_collector_closes_on_the_loop_does_not_hold_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "GOODBYE_SECONDS", DEADLINE)  # a loop that waits for itself waits for so long

    async def close(group: covey.Group) -> None:
        group.close()  # as the end of a forgotten `for group in covey.generations()` does

    def work(group: covey.Group) -> None:
        group.barrier()
        control.start(close(group)).result(DEADLINE)
        deadline = time.monotonic() + DEADLINE
        node = node_of(group)
        assert node is not None
        while not node._is_closed.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    run_threads(2, work, lanes="unix", timeout=DEADLINE)


def test_a_signal_that_another_thread_gets_ends_a_wait_of_the_main_thread() -> None:
    class CameError(Exception): ...

    def handle(*_: object) -> None:
        raise CameError

    def signal_this_thread() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    async def never() -> None:
        threading.Thread(target=signal_this_thread).start()
        await asyncio.Event().wait()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(CameError):
            control.run(never(), DEADLINE)
        with pytest.raises(CameError):
            control.make(never(), discard=lambda _: None, otherwise=lambda: None)
    finally:
        signal.signal(signal.SIGUSR1, before)
