"""What was received is freed with the last reference to it: no operation needs the cyclic collector."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import threading
import tracemalloc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import first
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.runtime.calls import lane_transport
from covey.runtime.joining.node import node_of
from covey.runtime.lanes import acceptor as lane_acceptor
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey import Group

ROUNDS = 24
PAYLOAD = 1 << 18
MOST = 12
"""Payloads that two ranks may hold at a time: what both send, receive, and decode, and not 24 rounds of it."""


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """No collection during the test, and little to look at in those that the test asks for."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@contextlib.contextmanager
def cycles() -> Iterator[collections.Counter[str]]:
    """Count the objects of covey's classes, by name, that become garbage for the cyclic collector meanwhile."""
    found: collections.Counter[str] = collections.Counter()
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("covey"))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def ways_to_receive(group: Group, x: Any, loop: asyncio.AbstractEventLoop) -> dict[str, Callable[[], Any]]:
    """Return functions that pass a payload each way between two ranks."""
    node, other = group.node, 1 - group.rank

    def blocking(**into: Any) -> None:
        if group.rank:
            group.send(x, 0)
            group.recv(0, **into)
        else:
            group.recv(1, **into)
            group.send(x, 1)

    def works(src: int) -> None:
        receiving, sending = group.recv(src, async_op=True), group.send(x, other, async_op=True)
        receiving.wait(DEADLINE)
        sending.wait(DEADLINE)

    def objects() -> None:
        sending = group.send_object({"bytes": x.tobytes()}, other, async_op=True)
        assert len(group.recv_object(other)["bytes"]) == x.nbytes
        sending.wait(DEADLINE)

    def probed() -> None:
        sending = group.send([x, x[:3]], other, async_op=True)
        assert group.probe(other).nbytes > x.nbytes
        assert len(group.recv(other)) == 2
        sending.wait(DEADLINE)

    def awaited(coroutine: Callable[[], Any]) -> Callable[[], None]:
        return lambda: loop.run_until_complete(coroutine())

    async def message() -> None:
        sending = group.send(x, other, async_op=True)
        await group.recv(other, async_op=True)
        await sending

    async def call() -> None:
        await node.call_async(other, "echo", x)

    async def stream() -> None:
        async for _ in node.stream(other, "twice", x[: len(x) // 4]):
            pass

    return {
        "sendrecv": lambda: group.sendrecv(x, other, other),
        "recv": blocking,
        "recv into out": lambda: blocking(out=np.empty_like(x)),
        "recv with a work": lambda: works(other),
        "recv from any rank": lambda: works(covey.ANY),
        "recv with asyncio": awaited(message),
        "recv from itself": lambda: (group.send(x, group.rank), group.recv(group.rank)),
        "several arrays after a probe": probed,
        "recv_object": objects,
        "call": lambda: node.call(other, "echo", x),
        "call with asyncio": awaited(call),
        "stream": lambda: list(node.stream(other, "twice", x[: len(x) // 4])),
        "stream with asyncio": awaited(stream),
        "all_gather": lambda: group.all_gather(x),
        "all_gather with a work": lambda: group.all_gather(x, async_op=True).wait(DEADLINE),
        "broadcast": lambda: group.broadcast(x.copy()),
    }


def ways_to_fail(group: Group, x: Any, loop: asyncio.AbstractEventLoop) -> dict[str, Callable[[], Any]]:
    """Return functions of which each has an error, or leaves something early."""
    node, other = group.node, 1 - group.rank

    def failing(function: Callable[[], Any]) -> Callable[[], None]:
        def fail() -> None:
            with contextlib.suppress(covey.CoveyError):
                function()
                raise AssertionError("it did not fail")

        return fail

    def left() -> None:
        for _ in node.stream(other, "twice", x):
            break

    async def call() -> None:
        with pytest.raises(covey.RemoteCallError):  # inside: the task of the loop keeps an error and its frames
            await node.call_async(other, "fail", x)

    async def receive() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.recv(other, 7, async_op=True), 0.001)

    return {
        "recv that is late": failing(lambda: group.recv(other, 7, timeout=0.001)),
        "sendrecv that is late": failing(lambda: group.sendrecv(x[:0], group.rank, other, recv_tag=7, timeout=0.001)),
        "work that is cancelled": lambda: group.recv(other, 7, async_op=True).cancel(),
        "await that is cancelled": lambda: loop.run_until_complete(receive()),
        "call of a function that fails": failing(lambda: node.call(other, "fail", x)),
        "work of a function that fails": failing(lambda: node.call_async(other, "fail", x).wait(DEADLINE)),
        "await of a function that fails": lambda: loop.run_until_complete(call()),
        "call of no function": failing(lambda: node.call(other, "nothing", x)),
        "stream that is left early": left,
    }


def serve(group: Group) -> None:
    """Register what the other rank calls."""

    def fail(_: Any) -> None:
        raise ValueError("as it should")

    def twice(x: Any) -> Any:
        yield x
        yield x

    group.node.register("echo", lambda x: x)
    group.node.register("fail", fail)
    group.node.register("twice", twice)
    group.barrier()


def in_step(turn: threading.Barrier, rank: int, function: Callable[[], Any]) -> Any:
    """Call `function` on rank 0, while the other waits."""
    turn.wait(DEADLINE)
    result = function() if rank == 0 else None
    turn.wait(DEADLINE)
    return result


@pytest.mark.parametrize("lanes", first(1, ["shm", "memory", "tcp", "secure"]))
def test_what_was_received_is_freed_with_the_last_reference_to_it(lanes: str) -> None:
    turn, peaks = threading.Barrier(2), dict[str, float]()

    def body(group: Group) -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            serve(group)
            operate(group, loop)

    def operate(group: Group, loop: asyncio.AbstractEventLoop) -> None:
        for name, exchange in ways_to_receive(group, np.full(PAYLOAD // 8, 1.0 + group.rank), loop).items():
            exchange()  # opens lanes and starts threads
            in_step(turn, group.rank, tracemalloc.reset_peak)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(ROUNDS):
                exchange()
            peak = in_step(turn, group.rank, lambda: tracemalloc.get_traced_memory()[1])
            if group.rank == 0:
                peaks[name] = (peak - before) / PAYLOAD

    tracemalloc.start(1)
    try:
        run_threads(2, body, lanes=lanes)
    finally:
        tracemalloc.stop()
    assert {name: peak for name, peak in peaks.items() if peak > MOST} == {}
    assert len(peaks) == 16


@pytest.mark.parametrize("lanes", first(1, ["shm", "memory", "tcp", "secure"]))
def test_no_operation_leaves_objects_for_the_collector(lanes: str) -> None:
    turn, garbage = threading.Barrier(2), dict[str, dict[str, int]]()

    def body(group: Group) -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            serve(group)
            operate(group, loop)

    def operate(group: Group, loop: asyncio.AbstractEventLoop) -> None:
        x = np.full(20_000, 1.0 + group.rank)  # more than an eager message
        sums = {
            "all_reduce": lambda: group.all_reduce(x.copy()),
            "all_reduce with a work": lambda: group.all_reduce(x.copy(), async_op=True).wait(DEADLINE),
            "compressed all_reduce": lambda: group.all_reduce(x.astype(np.float32), compress="int8"),
            "all_to_all": lambda: group.all_to_all([x, x]),
            "scatter": lambda: group.scatter([x, x] if group.rank == 0 else None),
            "all_gather_object": lambda: group.all_gather_object({"rank": group.rank}),
            "barrier with a work": lambda: group.barrier(async_op=True).wait(DEADLINE),
            "the store": lambda: group.node.store.set(f"{group.rank}", b"x"),
        }
        ways = {**ways_to_receive(group, x, loop), **ways_to_fail(group, x, loop), **sums}
        for name, operation in ways.items():
            operation()
            with contextlib.ExitStack() as counting:
                found = in_step(turn, group.rank, lambda: counting.enter_context(cycles()))
                for _ in range(10):
                    operation()
                turn.wait(DEADLINE)
            if found:
                garbage[name] = found
            turn.wait(DEADLINE)

    run_threads(2, body, lanes=lanes)
    assert garbage == {}


def objects_by_type() -> collections.Counter[str]:
    """Count the objects of covey's classes, by name, that are alive."""
    gc.collect()
    return collections.Counter(type(each).__name__ for each in gc.get_objects() if type(each).__module__[:5] == "covey")


@pytest.mark.parametrize("splits", first(1, [100, 300]))
def test_groups_that_are_split_off_and_closed_leave_no_objects(splits: int) -> None:
    turn, growth = threading.Barrier(2), collections.Counter[str]()

    def body(group: Group) -> None:
        def split(times: int) -> None:
            for _ in range(times):
                with group.split(0) as part:
                    part.all_reduce(np.ones(3))
                    part.sendrecv(np.ones(3), 1 - part.rank, 1 - part.rank)

        split(10)
        before = in_step(turn, group.rank, objects_by_type)
        split(splits)
        after = in_step(turn, group.rank, objects_by_type)
        if group.rank == 0:
            growth.update(after)
            growth.subtract(before)

    run_threads(2, body, lanes="shm")
    assert {name: count for name, count in growth.items() if count > splits // 20} == {}


def test_a_node_that_has_left_is_freed_before_the_timers_that_it_had_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((lane_acceptor, "HANDSHAKE_SECONDS"), (lane_transport, "PART_SECONDS")):
        monkeypatch.setattr(module, name, 100 * DEADLINE)
    left: list[weakref.ref[Any]] = []

    def body(group: Group) -> None:
        serve(group)
        other = 1 - group.rank
        group.sendrecv(np.ones(3), other, other)
        group.node.call(other, "echo", np.ones(20_000), timeout=100 * DEADLINE)
        group.barrier()  # a rank that has its own answer leaves; a call to it that is still on its way would be lost
        left.append(weakref.ref(node_of(group)))

    run_threads(2, body, lanes="shm")
    wait_until(lambda: gc.collect() >= 0 and all(node() is None for node in left))
    assert len(left) == 2
