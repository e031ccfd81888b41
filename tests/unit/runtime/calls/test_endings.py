"""Every call ends with exactly one answer, whatever code of the program does, and no code of it holds others up."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator  # noqa: TC003 - annotations of functions are evaluated
from typing import Any

import numpy as np  # noqa: TC002 - annotations of functions are evaluated
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.seeds import examples
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.base.errors import RemoteProtocolError
from covey.runtime.calls import handlers
from covey.testing import LinkedNodes

HANDLERS = 4


class MuteError(Exception):
    """An exception whose text cannot be made."""

    def __str__(self) -> str:
        raise SystemExit(1)


RAISED: list[Callable[[], BaseException]] = [
    *(SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError, AssertionError, StopIteration),
    *(StopAsyncIteration, OverflowError, ValueError, TypeError, NotImplementedError, asyncio.CancelledError, MuteError),
    functools.partial(RemoteProtocolError, "of the program's own"),
    functools.partial(covey.CallRefusedError, "of the program's own"),
    functools.partial(KeyError, "\ud800\x1b" * 3000),
    functools.partial(BaseExceptionGroup, "several", [SystemExit(2), ValueError("one of them")]),
]
FAILURES = covey.RemoteCallError, covey.CallRefusedError, covey.CallCancelledError


@dataclasses.dataclass
class Refusing:
    """A type of a program that raises when it is made from what another node sent."""

    which: int

    def __post_init__(self) -> None:
        if self.which >= 0:
            raise RAISED[self.which]()


class Packing:
    """Cannot be sent, and says so in its own way."""

    def __init__(self, which: int) -> None:
        self.which = which

    def _raise(self) -> Any:
        raise RAISED[self.which]()

    locals()["__class__"] = property(_raise)


class Thing:
    """An object to export."""

    def __init__(self, gone: Callable[[], None] = lambda: None) -> None:
        self._gone = gone

    @property
    def broken(self) -> Any:
        pytest.fail("a property was asked for its value")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("raise"):
            raise RAISED[int(name[5:])]()
        if name.startswith("hold"):
            assert HOLD.wait(DEADLINE)
        raise AttributeError(name)

    def plus(self, value: int) -> int:
        return value + 1

    def __del__(self) -> None:
        self._gone()


HOLD = threading.Event()


def register_all(node: covey.Node) -> None:
    def plain(which: int) -> None:
        raise RAISED[which]()

    async def asynchronous(which: int) -> None:
        raise RAISED[which]()

    def stream(which: int, after: int) -> Iterator[int]:
        yield from range(after)
        raise RAISED[which]()

    async def async_stream(which: int, after: int) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise RAISED[which]()

    def unclosed(which: int) -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            raise RAISED[which]()

    async def with_task(which: int) -> int:
        async def behind() -> None:
            raise RAISED[which]()

        task = asyncio.ensure_future(behind())
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is not None
        return 1

    def takes(value: Refusing) -> int:
        return value.which

    async def takes_async(value: Refusing) -> int:
        return value.which

    def result(which: int) -> Any:
        return [Packing(which)]

    def item(which: int) -> Iterator[Any]:
        yield 1
        yield Packing(which)

    for function in (plain, asynchronous, stream, async_stream, unclosed, with_task, takes, takes_async, result, item):
        node.register(function.__name__, function)
    node.register("thing", lambda: node.export(Thing()))
    node.register("int8", lambda value: value)
    node.unregister("int8")

    def int8(value: np.int8) -> int:
        return int(value)

    node.register("int8", int8)


KINDS = ["plain", "asynchronous", "stream", "async_stream", "unclosed", "with_task", "takes", "takes_async", "result"]
KINDS += ["item", "lookup", "property", "int8"]


def make_one(node: covey.Node, handle: covey.Handle, kind: str, which: int, after: int) -> None:
    """Make a call whose function, or what is around it, raises; it fails in one of the ways that callers know."""
    match kind:
        case "stream" | "async_stream":
            with pytest.raises(FAILURES):
                list(node.stream(1, kind, which, after))
        case "unclosed":
            with node.stream(1, kind, which) as numbers:
                assert next(numbers) == 0
        case "item":
            with pytest.raises(FAILURES):
                list(node.stream(1, kind, which))
        case "takes" | "takes_async":
            with pytest.raises(covey.CallRefusedError, match=r"'value'|of the program's own"):
                node.call(1, kind, {"which": which})
        case "with_task":
            assert node.call(1, kind, which) == 1
        case "lookup":
            with pytest.raises(FAILURES):
                handle.call(f"raise{which}")
        case "property":
            with pytest.raises(covey.CallRefusedError, match="no public method 'broken'"):
                handle.call("broken")
        case "int8":
            with pytest.raises(covey.CallRefusedError, match=r"'value': OverflowError: .*300"):
                node.call(1, "int8", 300)
        case _:
            with pytest.raises(FAILURES):
                node.call(1, kind, which)


@pytest.fixture(scope="module")
def linked() -> Iterator[tuple[LinkedNodes, covey.Handle]]:
    with LinkedNodes(2, timeout=DEADLINE, call_handlers=HANDLERS) as nodes:
        for node in nodes:
            register_all(node)
        yield nodes, nodes[0].call(1, "thing")


def is_at_rest(nodes: LinkedNodes) -> bool:
    """Tell whether every handler of the called node is free, and nothing is left of any call."""
    incoming = nodes[1]._service._core.incoming
    return (len(incoming), incoming.running, incoming.left_over) == (0, 0, 0)


@settings(max_examples=examples(60), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, len(RAISED) - 1), st.integers(0, 20)), min_size=1, max_size=8
    )
)
def test_whatever_code_of_the_program_raises_the_call_ends_and_gives_its_handler_back(
    linked: tuple[LinkedNodes, covey.Handle], calls: list[tuple[str, int, int]]
) -> None:
    nodes, handle = linked
    for kind, which, after in calls:
        make_one(nodes[0], handle, kind, which, after)
    wait_until(lambda: is_at_rest(nodes))
    assert handle.call("plus", 1) == 2


def test_each_kind_of_code_raises_each_exception_once(linked: tuple[LinkedNodes, covey.Handle]) -> None:
    nodes, handle = linked
    for kind in KINDS:
        for which in range(len(RAISED)):
            make_one(nodes[0], handle, kind, which, 1)
    wait_until(lambda: is_at_rest(nodes))
    assert nodes[1].call(0, "takes", {"which": -1}) == -1, "no node was cut off"
    assert nodes[0].call(1, "takes_async", {"which": -1}) == -1


def test_a_slow_lookup_holds_up_no_other_call(linked: tuple[LinkedNodes, covey.Handle]) -> None:
    nodes, handle = linked
    HOLD.clear()
    work = handle.call_async("hold")
    assert [handle.call("plus", number) for number in range(50)] == list(range(1, 51))
    HOLD.set()
    with pytest.raises(covey.CallRefusedError, match="no public method 'hold'"):
        work.wait(DEADLINE)
    assert nodes[1]._service.exported._objects[1].methods.keys() == {"plus"}, "names without end are not kept"


def test_a_destructor_may_block_and_use_its_node() -> None:
    began, go, numbers = threading.Event(), threading.Event(), list[str]()
    with LinkedNodes(2, timeout=DEADLINE) as nodes:

        def gone() -> None:
            began.set()
            assert go.wait(DEADLINE)
            numbers.append(repr(nodes[1].export(object())))

        register_all(nodes[1])
        nodes[1].register("made", lambda: nodes[1].export(Thing(gone)))
        handle = nodes[0].call(1, "made")
        gc.collect()
        handle.release()
        assert began.wait(DEADLINE)
        assert nodes[0].call(1, "int8", 3) == 3
        go.set()
        wait_until(lambda: len(numbers) == 1)


def test_callbacks_may_raise_and_block_and_hold_up_no_call() -> None:
    go, ran = threading.Event(), list[int]()
    with LinkedNodes(2, timeout=DEADLINE) as nodes:
        register_all(nodes[1])

        def leave(_: object) -> None:
            raise SystemExit

        def block(_: object) -> None:
            assert go.wait(DEADLINE)
            ran.append(1)

        for callback in (leave, block, block):
            work = nodes[0].call_async(1, "int8", 1)
            work.add_done_callback(callback)
            assert work.wait(DEADLINE) == 1
        assert nodes[0].call(1, "int8", 2) == 2
        go.set()
        wait_until(lambda: len(ran) == 2 or not nodes)


def test_the_loop_of_asynchronous_functions_survives_what_a_function_leaves_behind() -> None:
    loop, ran = handlers.HandlerLoop("test survives"), threading.Semaphore(0)

    def leave() -> None:
        raise SystemExit

    async def task() -> None:
        asyncio.get_running_loop().call_soon(leave)
        asyncio.get_running_loop().call_soon(ran.release)

    for number in range(3):
        loop.run(number, task())
        assert ran.acquire(timeout=DEADLINE)
    loop.close()


@in_turn(is_async=[False, True])
def test_functions_past_their_deadlines_give_their_handlers_back(is_async: bool) -> None:
    go, began = threading.Event(), threading.Semaphore(0)
    with LinkedNodes(3, timeout=DEADLINE, call_handlers=HANDLERS) as nodes:
        register_all(nodes[1])

        def hang() -> None:
            began.release()
            assert go.wait(DEADLINE)

        async def hang_async() -> None:
            began.release()
            while not go.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue  # as a function does that knows better

        nodes[1].register("hang", hang_async if is_async else hang)
        works = []
        for _ in range(3):  # as many as one node gets
            works.append(nodes[0].call_async(1, "hang"))
            assert began.acquire(timeout=DEADLINE)
        assert nodes[2].call(1, "int8", 1) == 1, "one node does not get all handlers"
        for work in works:
            work.cancel()
        incoming = nodes[1]._service._core.incoming
        wait_until(lambda: (incoming.running, incoming.left_over) == (0, 3))
        assert nodes[0].call(1, "int8", 2) == 2
        go.set()
        wait_until(lambda: is_at_rest(nodes))


def test_a_name_that_cannot_be_sent_is_refused_at_once() -> None:
    with LinkedNodes(2) as nodes, pytest.raises(covey.CallRefusedError, match="printable"):
        nodes[0].call(1, "\ud800")
