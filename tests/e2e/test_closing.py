"""Closing: twice, from several threads, from callbacks, while something opens. Nothing hangs or is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.base.config import GroupConfig
from covey.base.numbers import Seat
from covey.net.discovery.host_rendezvous import RUN_TOKEN_BYTES
from covey.runtime import loop as control
from covey.runtime.collectives import closure
from covey.runtime.environment import LaunchedRank
from covey.runtime.group.internals import engine_of
from covey.runtime.joining import node as nodes
from covey.runtime.joining.bootstrap import join_at
from covey.runtime.joining.generations import _Generations
from covey.runtime.joining.newcomer import Newcomer
from covey.runtime.joining.request import JoinRequest
from covey.runtime.messages import driving_thread, shared_driving
from covey.testing import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.joining.node import NodeParts

NEVER = 2 * DEADLINE
"""Seconds that no test waits."""


@pytest.fixture
def launched() -> Iterator[Callable[..., LaunchedRank]]:
    token = secrets.token_bytes(RUN_TOKEN_BYTES)
    with tempfile.TemporaryDirectory(prefix="covey-") as folder:

        def launch(rank: int, size: int, **more: Any) -> LaunchedRank:
            spot: dict[str, Any] = {
                "local_rank": rank,
                "local_size": size,
                "folder": folder,
                "token": token,
                "name": "closing",
            }
            return LaunchedRank(rank=rank, size=size, **spot, **more)

        yield launch


@pytest.fixture(autouse=True)
def _limits_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for one of covey's own limits, and then goes on, waits longer than a test does."""
    for name in ("MESSAGES_FLUSH_SECONDS", "OPERATION_END_SECONDS", "OTHER_CLOSE_SECONDS"):
        monkeypatch.setattr(closure, name, NEVER)
    for module in (driving_thread, shared_driving):
        for name in ("STEP_ASIDE_SECONDS", "IDLE_DRIVER_SECONDS"):
            monkeypatch.setattr(module, name, NEVER)


def what_the_loop_polls() -> tuple[set[int], set[int]]:
    """Return the numbers that the control loop believes to poll, and those that the kernel polls for it."""

    selector: Any = control.control_loop()._selector  # type: ignore[attr-defined]

    def look() -> tuple[set[int], set[int]]:
        lines = Path(f"/proc/self/fdinfo/{selector._selector.fileno()}").read_text()
        return {key.fd for key in selector.get_map().values()}, {int(fd) for fd in re.findall(r"tfd:\s*(\d+)", lines)}

    async def look_there() -> tuple[set[int], set[int]]:
        return look()

    return control.run(look_there(), DEADLINE)


# Several threads


def test_a_message_that_comes_to_a_group_just_after_it_was_closed_is_refused_at_once() -> None:
    def work(group: covey.Group) -> str:
        pair = group.split(color=0)
        assert pair is not None
        routing, name = engine_of(pair).routing, ""
        if group.rank == 0:
            routing.messenger()
            pair.close()
            with pytest.raises(covey.ClosedError, match="is closed") as refused:
                routing._socket(1)  # as a thread does that looked before the group was closed
            assert not isinstance(refused.value.__context__, covey.DeadlineError), "it has waited for a lane"
            name = type(refused.value).__name__
        group.barrier()
        return name

    assert run_threads(2, work, timeout=DEADLINE) == ["ClosedError", ""]


def test_receiving_ends_whenever_another_thread_closes_the_group() -> None:
    def work(group: covey.Group) -> None:
        for number in range(40):
            pair = group.split(color=0)
            assert pair is not None
            group.barrier()

            def receive(pair: covey.Group = pair) -> None:
                with pytest.raises((covey.ClosedError, covey.PeerLostError)):
                    pair.recv(src=1 - pair.rank)

            thread = threading.Thread(target=receive)
            thread.start()
            time.sleep(number * 2e-5)
            pair.close()
            thread.join(DEADLINE)
            assert not thread.is_alive(), f"number {number} still receives"
            group.barrier()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_threads(2, work, lanes="unix", timeout=DEADLINE)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("lanes", ["unix", "tcp"])
def test_two_threads_that_close_a_group_lose_none_of_its_messages(lanes: str) -> None:
    count = 50
    is_closing = threading.Event()

    def work(group: covey.Group) -> int:
        if group.rank == 0:
            for number in range(count):
                group.send(np.full(1 << 13, number, np.float64), dst=1, async_op=True)  # accepted at once
            other = threading.Thread(target=group.close)
            other.start()
            wait_until(lambda: engine_of(group).is_closed)
            is_closing.set()
            group.close()
            assert engine_of(group).is_freed
            other.join(DEADLINE)
            return count
        assert is_closing.wait(DEADLINE)  # and more than the kernel takes is still to be sent
        return sum(int(group.recv(src=0)[-1]) == number for number in range(count))

    assert run_threads(2, work, lanes=lanes, timeout=DEADLINE) == [count, count]


def test_a_group_that_one_of_its_callbacks_closes_is_closed_by_others_too() -> None:
    def work(group: covey.Group) -> float:
        closed = threading.Event()

        def close(_: Any) -> None:
            group.close()
            closed.set()

        operation = group.all_reduce(np.arange(4.0) + group.rank, async_op=True)
        operation.add_done_callback(close)
        total = operation.wait()
        group.close()
        assert closed.wait(DEADLINE)
        return float(total[3])

    assert run_threads(3, work, timeout=DEADLINE) == [12.0] * 3


def test_a_callback_that_exits_keeps_no_other_operation_waiting() -> None:
    is_set = threading.Event()

    def work(group: covey.Group) -> list[float]:
        if group.rank == 1:
            assert is_set.wait(DEADLINE)
        operations = [group.all_reduce(np.arange(3.0) * number, async_op=True) for number in range(1, 4)]
        if group.rank == 0:
            operations[0].add_done_callback(lambda _: sys.exit(3))
            is_set.set()
        return [float(operation.wait(DEADLINE)[2]) for operation in operations]

    assert run_threads(2, work, timeout=DEADLINE) == [[4.0, 8.0, 12.0]] * 2


# What the control loop has


def test_an_interrupted_newcomer_leaves_the_control_loop_whole(
    launched: Callable[..., LaunchedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    become_a_node, waits = Newcomer.become_a_node, threading.Event()

    async def tell_and_become_a_node(newcomer: Newcomer, wait: float) -> NodeParts:
        waits.set()
        return await become_a_node(newcomer, wait)

    monkeypatch.setattr(Newcomer, "become_a_node", tell_and_become_a_node)

    def interrupt() -> None:
        assert waits.wait(DEADLINE)
        control.soon(time.sleep, 0.5)
        os.kill(os.getpid(), signal.SIGINT)

    keys, polled = what_the_loop_polls()
    assert keys == polled
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        join_at(launched(1, 2, is_restarted=True), GroupConfig(lanes="unix"), timeout=DEADLINE)
    assert run_threads(3, lambda group: float(group.all_reduce(group.rank + 1.0)), timeout=DEADLINE) == [6.0] * 3
    wait_until(lambda: what_the_loop_polls() == (keys, polled))


def test_a_link_that_comes_while_a_node_closes_is_not_kept(
    launched: Callable[..., LaunchedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closes, came = nodes.NodeParts.close, threading.Event(), list[Any]()

    def close_slowly(node: NodeParts) -> None:
        if node.seat == 0:
            waits = threading.Event()

            async def linger() -> None:
                waits.set()
                try:
                    await asyncio.sleep(NEVER)
                finally:  # the node closes
                    closes.set()
                    while node.peers[Seat(1)].link is None:  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                    came.append(node.peers[Seat(1)].link)

            control.soon(lambda: node.tasks.spawn(linger()))
            assert waits.wait(DEADLINE)
        close(node)

    monkeypatch.setattr(nodes.NodeParts, "close", close_slowly)
    monkeypatch.setattr(nodes, "GOODBYE_SECONDS", DEADLINE)

    def join(rank: int) -> None:
        with pytest.raises(covey.DeadlineError):
            join_at(launched(rank, 3), GroupConfig(lanes="unix"), timeout=0.5)

    def join_until_it_came() -> None:
        while not came:
            join(1)

    first = threading.Thread(target=join, args=(0,))
    first.start()
    assert closes.wait(DEADLINE)
    second = threading.Thread(target=join_until_it_came)
    second.start()
    for thread in (first, second):
        thread.join(DEADLINE)
        assert not thread.is_alive()
    (link,) = came
    assert not link.is_open


def test_a_rank_that_cannot_be_a_node_gives_its_seat_back(
    launched: Callable[..., LaunchedRank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = launched(1, 2)
    monkeypatch.setenv("COVEY_EVENTS", str(tmp_path / "nowhere" / "events"))
    for _ in range(2):  # the seat is free again
        with pytest.raises(covey.ConfigError, match="COVEY_EVENTS"):
            join_at(mine, GroupConfig(lanes="tcp"), timeout=DEADLINE)
        assert os.listdir(mine.folder) == []


# Signals and forks


def test_a_signal_that_interrupts_its_own_handler_is_no_deadlock() -> None:
    class Alone:
        """A group of one, as far as leaving it goes."""

        class _engine:  # noqa: N801
            node = None

    program = _Generations(JoinRequest())
    program._group = Alone()  # type: ignore[assignment]
    again = [signal.SIGTERM] * 20

    def interrupt(*_: Any) -> None:
        if again:
            signal.raise_signal(again.pop())

    with program._listening_for_sigterm():
        sys.setprofile(interrupt)  # at every call and return, also in the handler
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            sys.setprofile(None)
    assert program._is_asked_to_leave
    assert len(again) < 20


def test_a_fork_ends_its_copies_of_operations_whichever_thread_was_at_them() -> None:
    def work(group: covey.Group) -> int:
        if group.rank == 1:
            group.recv(src=0)
            return int(group.all_reduce(2))
        operation = group.all_reduce(3, async_op=True)
        with operation._lock:  # as a thread has it that ends the operation just now
            child = os.fork()
            if not child:
                os._exit(0 if operation.done() else 1)
        ended = threading.Event()

        def kill_if_it_hangs() -> None:
            if not ended.wait(DEADLINE):
                os.kill(child, signal.SIGKILL)

        killer = threading.Thread(target=kill_if_it_hangs)
        killer.start()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended.set()
        killer.join()
        assert code == 0
        group.send(np.arange(3), dst=1)
        return int(operation.wait(DEADLINE))

    assert run_threads(2, work, lanes="unix", timeout=DEADLINE) == [5, 5]


def test_a_group_that_is_dropped_takes_its_thread_for_messages_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving_thread, "IDLE_DRIVER_SECONDS", 0.05)

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith(" messages")]

    def work(group: covey.Group) -> int:
        pair = group.split(0)
        other = 1 - pair.rank
        coming = pair.recv(src=other, async_op=True)
        pair.send(np.arange(5) + pair.rank, dst=other)
        wait_until(coming.done)
        first = int(coming.wait()[0])
        wait_until(lambda: not threads())
        group.barrier()
        coming = pair.recv(src=other, async_op=True)  # another thread does as well
        pair.send(np.arange(5) * pair.rank, dst=other)
        wait_until(coming.done)
        second = int(coming.wait()[4])
        group.barrier()
        dropped = weakref.ref(engine_of(pair))
        del pair, coming
        wait_until(lambda: gc.collect() >= 0 and dropped() is None)
        group.barrier()
        return 10 * first + second

    assert run_threads(2, work, lanes="unix", timeout=DEADLINE) == [14, 0]
    wait_until(lambda: not threads())


def test_a_loss_that_only_a_finished_send_met_is_told_to_every_later_call() -> None:
    leave = threading.Event()

    def work(group: covey.Group) -> list[str]:
        group.send(np.arange(3), dst=1 - group.rank)
        group.recv(src=1 - group.rank)
        group.barrier()
        if group.rank == 1:
            assert leave.wait(DEADLINE)
            with pytest.raises(ZeroDivisionError), group:
                raise ZeroDivisionError("no cake")
            return []
        current = engine_of(group).routing._current()
        assert current is not None
        current._lanes.by_rank[1].sock.shutdown(socket.SHUT_RDWR)  # as a reset does that comes before the news
        group.send(np.arange(3), dst=1)  # it is ours once it is copied
        leave.set()
        wait_until(lambda: engine_of(group).is_over)
        said = []
        for _ in range(2):
            with pytest.raises(covey.CoveyError) as caught:
                group.recv(src=1)
            said.append(type(caught.value).__name__)
        return said

    assert run_threads(2, work, lanes="unix", timeout=DEADLINE)[0] == ["PeerLostError", "PeerLostError"]


def test_a_thread_that_was_interrupted_as_it_began_an_operation_can_begin_another_and_close_the_group() -> None:
    def work(group: covey.Group) -> float:
        engine_of(group)._issuing.acquire()  # Ctrl-C came right after this, before anything that would release it
        total = float(group.all_reduce(group.rank + 1.0))
        group.close()  # it would wait for another thread's operation, if it took the lock for one
        return total

    assert run_threads(2, work, timeout=DEADLINE) == [3.0, 3.0]
