"""Calls between the nodes of a run over real sockets: what arrives, what is refused, and how each call ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import gc
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator  # noqa: TC003 - annotations of functions are evaluated
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.waiting import DEADLINE, wait_until

import covey
from covey.proto.calling.outgoing import CALLS_LIMIT
from covey.proto.calling.tags import ANSWER_PARTS
from covey.runtime.calls import lane_transport
from covey.runtime.calls.lane_transport import LaneTransport
from covey.runtime.calls.transport import PartsTaker  # noqa: TC001 - annotations of functions are evaluated
from covey.runtime.joining.node import node_of
from covey.testing import run_threads

LARGE = 200_000
"""Elements of arrays that travel beside the message."""


@dataclasses.dataclass
class Sample:
    """A type of a program, with arrays in it."""

    name: str
    data: npt.NDArray[np.float64]
    when: datetime.date | None = None
    children: list[Sample] = dataclasses.field(default_factory=list)


class Counter:
    """An object to export."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def __call__(self) -> int:
        return self.value

    def _secret(self) -> str:
        return "secret"


def register_all(group: covey.Group) -> None:
    node = group.node

    @node.rpc
    def add(a: int, b: int = 10) -> int:
        return a + b + 1000 * group.rank

    @node.rpc("join all")
    def join_all(*words: str, **named: float) -> str:
        return " ".join([*words, *(f"{name}={value}" for name, value in named.items())])

    @node.rpc
    async def sleep(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return f"rank {group.rank}"

    @node.rpc
    def scale(x: npt.NDArray[np.float64], by: float) -> npt.NDArray[np.float64]:
        return x * by + group.rank

    @node.rpc
    def grow(sample: Sample) -> Sample:
        assert isinstance(sample, Sample)
        return Sample(sample.name + "!", sample.data + 1, sample.when, [sample])

    @node.rpc
    def fail(text: str) -> None:
        raise KeyError(text)

    @node.rpc
    def count(to: int) -> Iterator[int]:
        for number in range(to):
            yield number + 1000 * group.rank

    @node.rpc
    async def rows(to: int, width: int) -> AsyncIterator[npt.NDArray[np.float64]]:
        for number in range(to):
            await asyncio.sleep(0)
            yield np.full(width, float(number))

    @node.rpc
    def a_set() -> Any:
        return object()

    node.register("lambda", lambda value: value)


def in_a_run(function: Callable[[covey.Group], Any], size: int = 2, lanes: str = "unix") -> list[Any]:
    """Call `function(group)` on every rank, between two barriers: all functions are registered, and stay so."""

    def body(group: covey.Group) -> Any:
        register_all(group)
        group.barrier()
        result = function(group)
        group.barrier()
        return result

    return run_threads(size, body, lanes=lanes, timeout=DEADLINE)


def refusal(function: Callable[[], Any], kind: type[BaseException]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize("lanes", ["unix", "tcp", "memory"])
def test_every_rank_calls_every_other_and_itself(lanes: str) -> None:
    def body(group: covey.Group) -> list[Any]:
        x = np.arange(LARGE, dtype=np.float64)
        node, results = group.node, []
        for rank in range(group.size):
            results.append(node.call(rank, "add", 1, 2))
            results.append(node.call(rank, "add", a=group.rank))
            results.append(node.proxy(rank).sleep(0.0))
            assert np.array_equal(node.call(rank, "scale", x, by=2), 2 * x + rank)
        assert group.call(1, "lambda", [1, None, {"a": b"b"}]) == [1, None, {"a": b"b"}]
        return results

    for rank, results in enumerate(in_a_run(body, size=3, lanes=lanes)):
        assert results == [each for other in range(3) for each in
                           (3 + 1000 * other, 10 + rank + 1000 * other, f"rank {other}")]  # fmt: skip


def test_values_become_what_the_annotations_say_in_both_directions() -> None:
    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank
        child = Sample("child", np.arange(5.0))
        sample = Sample("s", np.arange(LARGE, dtype=np.float64) + group.rank, datetime.date(2026, 1, 2), [child])
        grown = node.call(other, "grow", sample)
        assert isinstance(grown, Sample)
        assert (grown.name, grown.when) == ("s!", sample.when)
        assert np.array_equal(grown.data, sample.data + 1)
        assert np.array_equal(grown.children[0].children[0].data, child.data)
        assert node.call(other, "join all", "a", "b", x=1) == "a b x=1.0"
        plain = node.call(other, "lambda", (sample, np.float32(2.5), np.arange(3, dtype=np.int16)))
        assert plain[0]["name"] == "s", "without annotations a dataclass is a dict"
        assert (plain[1], plain[1].dtype, plain[2].dtype) == (2.5, np.float32, np.int16)
        received = node.call(other, "lambda", np.arange(3))
        received += 1  # the receiver's own memory

    in_a_run(body)


def test_what_cannot_work_is_refused_with_the_reason() -> None:
    def body(group: covey.Group) -> list[str]:
        node, other = group.node, 1 - group.rank
        return [
            refusal(lambda: node.call(other, "ad", 1), covey.CallRefusedError),
            refusal(lambda: node.call(other, "add", "one"), covey.CallRefusedError),
            refusal(lambda: node.call(other, "add", 1, 2, 3), covey.CallRefusedError),
            refusal(lambda: node.call(other, "scale", np.arange(3), 2), covey.CallRefusedError),
            refusal(lambda: node.call(other, "count", 3), covey.CallRefusedError),
            refusal(lambda: list(node.stream(other, "add", 3)), covey.CallRefusedError),
            refusal(lambda: node.call(other, "a_set"), covey.CallRefusedError),
            refusal(lambda: node.call(other, "add", object()), TypeError),
            refusal(lambda: node.call(9, "add", 1), covey.ConfigError),
            refusal(lambda: node.call("nobody", "add", 1), covey.ConfigError),
            refusal(lambda: node.call(other, "x" * 300), covey.CallRefusedError),
            refusal(node.caller, covey.ConfigError),
        ]

    for texts in in_a_run(body):
        wanted = [
            "no function 'ad' is registered; did you mean 'add'?",
            "'a': Expected `int`, got `str`",
            "too many positional arguments",
            "'x': expected an array of float64, got int64",
            "'count' is a stream",
            "'add' is a function",
            "cannot send a builtins.object",
            "cannot send a builtins.object",
            "there is no rank 9",
            "no node is named 'nobody'",
            "1 to 200 printable characters",
            "inside of a function",
        ]
        for text, words in zip(texts, wanted, strict=True):
            assert words in text


def test_a_node_answers_from_the_moment_it_joins_though_its_program_knows_nothing_of_calls() -> None:
    def body(group: covey.Group) -> str:
        group.barrier()
        text = (
            "" if group.rank else refusal(lambda: group.call(1, "anything", timeout=DEADLINE), covey.CallRefusedError)
        )
        group.barrier()
        return text

    told = run_threads(2, body, lanes="unix", timeout=DEADLINE)[0]
    assert "no function 'anything' is registered; no function is registered there" in told


def test_functions_that_cannot_be_called_are_refused_when_they_are_registered() -> None:
    def odd(x: int | np.ndarray[Any, Any]) -> None: ...

    def unknown(x: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def body(group: covey.Group) -> None:
        node = group.node
        assert "union" in refusal(lambda: node.register("odd", odd), covey.ConfigError).lower()
        assert "NoSuchType" in refusal(lambda: node.register("unknown", unknown), covey.ConfigError)
        assert "registered already" in refusal(lambda: node.register("add", len), covey.ConfigError)
        assert "with a function" in refusal(lambda: node.register("three", 3), covey.ConfigError)  # type: ignore[arg-type]
        assert "printable" in refusal(lambda: node.register("", len), covey.ConfigError)
        node.register("short", lambda: 1)
        node.unregister("short")
        assert "no function 'short'" in refusal(lambda: node.call(group.rank, "short"), covey.CallRefusedError)

    in_a_run(body)


def test_an_exception_arrives_with_its_class_text_and_remote_traceback() -> None:
    def body(group: covey.Group) -> None:
        with pytest.raises(covey.RemoteCallError) as caught:
            group.node.call(1 - group.rank, "fail", "no luck")
        error = caught.value
        assert (error.type, error.text, error.peer) == ("KeyError", "'no luck'", 1 - group.rank)
        assert "in fail" in error.traceback
        assert "raise KeyError(text)" in error.traceback
        assert "runtime/calls" not in error.traceback
        assert error.traceback in "".join(error.__notes__)
        assert "KeyError: 'no luck'" in str(error)

    in_a_run(body)


def test_a_call_past_its_deadline_raises_and_cancels_the_function() -> None:
    begun, cancelled, given = list[str](), list[str](), dict[int, float]()

    async def forever() -> None:
        begun.append("forever")
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            cancelled.append("forever")

    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank
        node.register("forever", forever)

        def until_cancelled() -> None:
            caller = node.caller()
            assert (caller.rank, caller.name, caller.is_cancelled) == (other, "until cancelled", False)
            begun.append("until cancelled")
            assert caller.seconds_left <= given[other]
            while not caller.is_cancelled:
                time.sleep(0.01)
            cancelled.append("until cancelled")

        node.register("until cancelled", until_cancelled)
        group.barrier()
        for name in ("forever", "until cancelled"):
            for timeout in (0.3, 3.0, DEADLINE / 2):  # a function whose call comes late does not begin
                given[group.rank] = timeout
                with pytest.raises(covey.DeadlineError, match="timeout") as caught:
                    node.call(other, name, timeout=timeout)
                assert caught.value.late == (other,)
                if name in begun:
                    break
        wait_until(lambda: sorted(cancelled) == sorted(begun))
        group.barrier()

    in_a_run(body)
    assert set(begun) == {"forever", "until cancelled"}


def test_a_cancelled_call_ends_at_once_and_cancels_its_function() -> None:
    began, cancelled = ([threading.Semaphore(0) for _ in range(2)] for _ in range(2))

    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank

        @node.rpc
        async def forever() -> None:
            began[group.rank].release()
            try:
                await asyncio.sleep(DEADLINE)
            finally:
                cancelled[group.rank].release()

        group.barrier()
        work = node.call_async(other, "forever")
        assert began[other].acquire(timeout=DEADLINE)
        assert work.cancel()
        assert not work.cancel()
        with pytest.raises(covey.CallCancelledError):
            work.wait()
        assert cancelled[other].acquire(timeout=DEADLINE)

        async def give_up() -> None:
            task = asyncio.ensure_future(_await(node.call_async(other, "forever")))
            assert await asyncio.to_thread(began[other].acquire, timeout=DEADLINE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(give_up())
        assert cancelled[other].acquire(timeout=DEADLINE)

    in_a_run(body)


async def _await(work: covey.CallWork[Any]) -> Any:
    return await work


def test_calls_can_be_awaited_and_gathered() -> None:
    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank

        async def main() -> list[int]:
            works = [node.call_async(other, "add", number, 0) for number in range(300)]
            return list(await asyncio.gather(*map(_await, works)))

        assert asyncio.run(main()) == [number + 1000 * other for number in range(300)]

    in_a_run(body)


def test_a_broadcast_returns_results_by_rank_or_raises_the_first_error() -> None:
    def body(group: covey.Group) -> None:
        node = group.node
        others = [rank for rank in range(3) if rank != group.rank]
        assert node.broadcast_call("add", 1, 1) == {rank: 2 + 1000 * rank for rank in others}
        assert node.broadcast_call("add", 1, 1, peers=[group.rank]) == {group.rank: 2 + 1000 * group.rank}
        with pytest.raises(covey.RemoteCallError) as caught:
            node.broadcast_call("fail", "x")
        assert caught.value.peer == min(others)
        errors = node.broadcast_call("fail", "x", return_exceptions=True)
        assert {rank: error.peer for rank, error in errors.items()} == {rank: rank for rank in others}

    in_a_run(body, size=3)


def test_streams_arrive_in_order_and_run_only_a_little_ahead_of_the_reader() -> None:
    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank
        made = 0

        @node.rpc
        def endless() -> Iterator[int]:
            nonlocal made
            while True:
                made += 1
                yield made

        group.barrier()
        assert list(node.stream(other, "count", 100)) == [number + 1000 * other for number in range(100)]
        assert list(node.stream(other, "count", 0)) == []
        for number, row in enumerate(node.stream(other, "rows", 30, LARGE // 10)):
            assert np.array_equal(row, np.full(LARGE // 10, float(number)))

        async def read() -> list[float]:
            return [row[0] async for row in node.stream(other, "rows", 40, 3)]

        assert asyncio.run(read()) == list(map(float, range(40)))
        slow = node.stream(other, "endless")
        assert next(slow) == 1
        time.sleep(0.2)
        assert node.call(other, "add", 1, 1) == 2 + 1000 * other, "a slow reader stalls only its own stream"
        slow.close()
        with pytest.raises(covey.CallCancelledError):
            list(slow)
        group.barrier()
        assert 1 <= made <= 32
        group.barrier()  # only now may the other rank read on
        late = node.stream(other, "endless", timeout=0.2)
        with pytest.raises(covey.DeadlineError, match="timeout"):
            list(late)

    in_a_run(body)


def test_a_stream_that_is_dropped_closes_its_generator() -> None:
    closed = threading.Semaphore(0)

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.release()

    def body(group: covey.Group) -> None:
        group.node.register("endless", endless)
        group.barrier()
        for _ in group.node.stream(1 - group.rank, "endless"):
            break
        gc.collect()
        assert closed.acquire(timeout=DEADLINE)

    in_a_run(body)


def test_the_methods_of_an_exported_object_can_be_called_until_its_handles_are_dropped() -> None:
    def body(group: covey.Group) -> None:
        node, other = group.node, 1 - group.rank
        counter = Counter()
        kept: list[covey.Handle] = []

        @node.rpc
        def counter_of() -> covey.Handle:
            return node.export(counter)

        @node.rpc
        def keep(handle: covey.Handle) -> int:
            kept.append(handle)
            return int(handle.add(7))

        @node.rpc
        def is_mine(value: Any) -> bool:
            return value is counter

        group.barrier()
        handle = node.call(other, "counter_of")
        assert isinstance(handle, covey.Handle)
        assert [handle.add(1), handle.add(amount=2), handle(), handle.call("add", 3, timeout=DEADLINE)] == [1, 3, 3, 6]
        assert node.call(other, "is_mine", handle), "on its owner a handle is the object"
        assert "no public method" in refusal(handle.nothing, covey.CallRefusedError)
        assert "no public method" in refusal(functools.partial(handle.call, "_secret"), covey.CallRefusedError)
        group.barrier()
        mine = node.export(counter)
        assert node.call(other, "keep", mine) == 13
        assert mine() == 13, "its owner can use it, too"
        group.barrier()
        exported = _calls(group).exported
        del mine
        gc.collect()
        assert len(exported), "the other node holds it"
        group.barrier()
        kept.clear()
        handle.release()
        assert "was released" in refusal(handle, covey.CallRefusedError)
        del handle
        gc.collect()
        wait_until(lambda: not len(exported))

    in_a_run(body)


def test_a_handle_is_passed_to_third_nodes_and_its_object_lives_until_all_have_dropped_theirs() -> None:
    """Rank 0 exports an object; 1 gets a handle and passes it on in every way; 2 uses it when 1 has dropped its own."""

    def body(group: covey.Group) -> None:
        node, counter = group.node, Counter()
        kept: dict[str, Any] = {}
        if group.rank == 0:
            node.register("counter_of", lambda: node.export(counter))
            node.register("is_mine", lambda value: value is counter)

        @node.rpc
        def keep(name: str, given: Any) -> None:
            kept[name] = given

        @node.rpc
        def kept_by(name: str) -> Any:
            return kept[name]

        @node.rpc
        def all_kept() -> Iterator[Any]:
            yield from kept.values()

        group.barrier()
        if group.rank == 1:
            handle = node.call(0, "counter_of")
            node.call(2, "keep", "argument", handle)
            node.call(2, "keep", "inside", {"large": np.ones(LARGE), "handles": [handle, handle]})
            node.call(1, "keep", "own", handle)
            kept["mine"] = handle
            del handle
        group.barrier()
        if group.rank == 2:
            kept["result"] = node.call(1, "kept_by", "mine")
            kept["item"] = list(node.stream(1, "all_kept"))[-1]
            assert kept["argument"].add(1) == 1
        group.barrier()
        if group.rank == 1:
            for name in ("own", "mine"):
                kept.pop(name).release()
        group.barrier()
        if group.rank == 2:
            assert [kept["result"].add(2), kept["item"].add(3), kept["inside"]["handles"][1].add(4)] == [3, 6, 10]
            assert node.call(0, "is_mine", kept["item"])
            # A call that is refused, cancelled or too large drops its handles, also those of a node that is not called.
            with pytest.raises(covey.CallRefusedError, match="no function"):
                node.call(1, "no such function", kept["item"])
            with pytest.raises(covey.CallRefusedError):
                node.call(1, "keep", kept["item"], 2, 3)
            waiting = [node.call_async(1, "sleep", 3600.0, kept["item"]) for _ in range(3)]
            more = [node.call_async(1, "sleep", 3600.0) for _ in range(CALLS_LIMIT)]
            unsent = [node.call_async(1, "keep", "unsent", kept["item"]) for _ in range(3)]
            for work in (*unsent, *waiting, *more):
                work.cancel()
        group.barrier()
        if group.rank == 0:
            gc.collect()
            assert len(_calls(group).exported) == 1
        group.barrier()
        kept.clear()
        gc.collect()
        if group.rank == 0:
            wait_until(lambda: not len(_calls(group).exported))
        group.barrier()

    in_a_run(body, size=3)


def test_a_run_with_an_older_node_passes_handles_between_two_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaneTransport, "lists_handles", lambda transport: False)

    def body(group: covey.Group) -> None:
        node, counter = group.node, Counter()
        node.register("counter_of", lambda: node.export(counter))
        node.register("is_mine", lambda value: value is counter)
        node.register("use", lambda handle: handle.add(1))
        group.barrier()
        if group.rank == 1:
            handle = node.call(0, "counter_of")
            assert handle.add(2) == 2
            assert node.call(0, "is_mine", handle)
            assert "update covey on all machines" in refusal(lambda: node.call(2, "use", handle), TypeError)
            own = node.export(counter)
            assert node.call(2, "use", own) == 1
            assert node.call(1, "is_mine", own)
        group.barrier()

    in_a_run(body, size=3)


def _calls(group: covey.Group) -> Any:
    node = node_of(group)
    assert node is not None
    assert node.calls is not None
    return node.calls.service()


def test_at_most_so_many_functions_run_and_nodes_are_served_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from covey.base import config

    defaults = config.GroupConfig.__init__.__kwdefaults__ or {}
    monkeypatch.setattr(config.GroupConfig.__init__, "__kwdefaults__", {**defaults, "call_handlers": 3})
    lock, running, most, order = threading.Lock(), 0, 0, list[int]()
    may_go, services = threading.Event(), dict[int, Any]()

    def all_of(group: covey.Group) -> None:
        node = group.node
        services[group.rank] = _calls(group)
        if group.rank == 0:

            def work() -> None:
                nonlocal running, most
                with lock:
                    running += 1
                    most = max(most, running)
                    order.append(node.caller().rank)
                may_go.wait(DEADLINE)
                time.sleep(0.002)
                with lock:
                    running -= 1

            node.register("work", work)
        group.barrier()
        works = [node.call_async(0, "work") for _ in range(40)] if group.rank == 1 else []
        if works:
            wait_until(lambda: len(order) == 2)  # those of one node are taken; the others wait
        group.barrier()
        if group.rank == 2:
            works = [node.call_async(0, "work") for _ in range(5)]
            wait_until(lambda: len(services[0]._core.incoming) == 45 and len(order) == 3)
            may_go.set()
        for work_ in works:
            work_.wait(DEADLINE)
        group.barrier()

    run_threads(3, all_of, lanes="unix", timeout=DEADLINE)
    assert most == 3
    assert len(order) == 45
    assert max(at for at, rank in enumerate(order) if rank == 2) < 20, "rank 2 did not wait for the backlog of rank 1"


def test_too_large_arguments_and_results_are_refused_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: covey.Group) -> list[str]:
        node, other = group.node, 1 - group.rank
        service = _calls(group)
        node.register("zeros", lambda count: np.zeros(count))
        group.barrier()
        texts = []
        service._core.incoming._message_bytes = service._serving._message_bytes = 1 << 20
        group.barrier()
        texts.append(refusal(lambda: node.call(other, "lambda", np.zeros(1 << 18)), covey.CallRefusedError))
        texts.append(refusal(lambda: node.call(other, "zeros", 1 << 18), covey.CallRefusedError))
        assert node.call(other, "add", 1, 1) == 2 + 1000 * other
        service._config = dataclasses.replace(service._config, call_bytes=1000)
        texts.append(refusal(lambda: node.call(other, "lambda", np.zeros(1 << 18)), covey.CallRefusedError))
        return texts

    for texts in in_a_run(body):
        assert all("2097" in text and "bytes" in text for text in texts), texts


def test_calls_to_a_rank_that_leaves_end_at_once() -> None:
    def body(group: covey.Group) -> str:
        node = group.node
        began = threading.Event()

        def forever() -> None:
            began.set()
            caller = node.caller()
            while not caller.is_cancelled:
                time.sleep(0.01)

        node.register("forever", forever)
        group.barrier()
        if group.rank == 1:
            assert began.wait(DEADLINE)
            return ""
        work, began_at = node.call_async(1, "forever"), time.monotonic()
        with pytest.raises((covey.ClosedError, covey.PeerLostError)) as caught:
            work.wait(DEADLINE)
        assert time.monotonic() - began_at < DEADLINE / 2
        wait_until(lambda: isinstance(node.call_async(1, "forever", timeout=0.1).exception(), covey.PeerLostError))
        with pytest.raises(covey.PeerLostError, match="rank 1") as later:
            node.call(1, "forever")
        assert later.value.rank == 1
        return str(caught.value)

    told = run_threads(2, body, lanes="unix", timeout=DEADLINE)[0]
    assert "forever" in told


def test_an_answer_that_was_given_arrives_though_its_node_leaves_at_once() -> None:
    size = 48 << 20  # more than the buffers of a connection hold
    returned = threading.Event()

    def body(group: covey.Group) -> bool:
        def large(start: int) -> np.ndarray[Any, Any]:
            returned.set()
            return np.arange(start, start + size // 8)

        group.node.register("large", large)
        group.barrier()
        if group.rank == 1:
            assert returned.wait(DEADLINE)
            wait_until(lambda: not group.node._service._core.incoming.running)
            return True
        return bool((group.node.call(1, "large", 7) == np.arange(7, 7 + size // 8)).all())

    assert run_threads(2, body, lanes="unix", timeout=DEADLINE) == [True, True]


def test_an_answer_whose_last_part_has_arrived_is_the_outcome_though_its_node_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch = LaneTransport.fetch_parts

    def late(self: Any, peer: Any, tag: int, sizes: Any, then: PartsTaker) -> None:
        def stand_still(parts: list[Any] | BaseException | None) -> None:
            time.sleep(1.0)  # the thread that receives has no core when all has arrived
            then(parts)

        fetch(self, peer, tag, sizes, stand_still)

    monkeypatch.setattr(LaneTransport, "fetch_parts", late)
    returned = threading.Event()

    def body(group: covey.Group) -> bool:
        def large(start: int) -> np.ndarray[Any, Any]:
            returned.set()
            return np.arange(start, start + 100_000)

        group.node.register("large", large)
        group.barrier()
        if group.rank == 1:
            assert returned.wait(DEADLINE)
            wait_until(lambda: not group.node._service._core.incoming.running)
            return True
        return bool((group.node.call(1, "large", 7) == np.arange(7, 100_007)).all())

    assert run_threads(2, body, lanes="unix", timeout=DEADLINE) == [True, True]


def test_a_node_leaves_soon_though_an_answer_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_transport, "STALLED_PARTS_SECONDS", 0.2)
    returned, left = threading.Event(), threading.Event()

    def body(group: covey.Group) -> float:
        def large() -> np.ndarray[Any, Any]:
            returned.set()
            return np.ones(8 << 20)

        group.node.register("large", large)
        group.barrier()
        if group.rank == 0:
            monkeypatch.setattr(group.node._service._transport, "fetch_parts", lambda *_: None)
            work = group.node.call_async(1, "large")
            assert left.wait(DEADLINE)
            return float(work.exception() is not None)
        assert returned.wait(DEADLINE)
        wait_until(lambda: not group.node._service._core.incoming.running)
        group.close()
        left.set()
        return 1.0

    assert run_threads(2, body, lanes="unix", timeout=DEADLINE) == [1.0, 1.0]


def test_a_node_that_is_lost_while_it_sends_a_large_result_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    send_parts = LaneTransport.send_parts

    def send_no_answer(self: LaneTransport, peer: Any, tag: int, *rest: Any) -> None:
        if not tag & ANSWER_PARTS:
            send_parts(self, peer, tag, *rest)

    monkeypatch.setattr(LaneTransport, "send_parts", send_no_answer)

    def body(group: covey.Group) -> None:
        node, service = group.node, _calls(group)
        node.register("zeros", lambda: np.zeros(LARGE))

        @node.rpc
        def many() -> Iterator[npt.NDArray[np.float64]]:
            yield np.zeros(LARGE)

        group.barrier()
        if group.rank == 0:
            work, items = node.call_async(1, "zeros"), node.stream(1, "many")
            wait_until(lambda: bool(service._core.outgoing._fetching) and not len(service._serving._under_way))
            wait_until(lambda: bool(items._state._slots))
            transport = service._transport
            assert isinstance(transport, LaneTransport)
            for lanes in (transport._large, transport._small):  # as if the connections had broken, and it was not heard
                messenger = lanes.messenger()
                messenger.part_with(1, covey.PeerLostError("gone", rank=1, operation="test"))
                messenger.flush()  # ends its works
            with pytest.raises(covey.PeerLostError, match="rank 1"):
                work.wait(DEADLINE)
            with pytest.raises(covey.PeerLostError, match="rank 1"):
                next(items)
        group.barrier()

    in_a_run(body)


def test_calls_of_a_closed_node_raise() -> None:
    def body(group: covey.Group) -> covey.Node:
        register_all(group)
        group.barrier()
        return group.node

    node = run_threads(2, body, lanes="unix", timeout=DEADLINE)[0]
    with pytest.raises(covey.ClosedError, match="join again"):
        node.call(1, "add", 1)


def test_a_node_that_is_alone_calls_itself() -> None:
    with contextlib.closing(covey.join()) as group:
        register_all(group)
        x = np.arange(LARGE, dtype=np.float64)
        assert group.call(0, "add", 1, 2) == 3
        assert np.array_equal(group.node.call(0, "scale", x, 3.0), 3 * x)
        assert list(group.node.stream(0, "count", 40)) == list(range(40))
        assert group.node.broadcast_call("add", 1) == {}
        assert group.node.export(Counter()).add(4) == 4


def test_groups_of_one_run_share_functions_and_number_nodes_their_own_way() -> None:
    def body(group: covey.Group) -> None:
        half = group.split(group.rank % 2, key=-group.rank)
        other = 1 - half.rank
        there = group.rank + 2 if group.rank < 2 else group.rank - 2
        assert half.call(other, "add", 0, 0) == 1000 * there
        assert half.node.call(half.rank, "add", 0, 0) == 1000 * group.rank
        half.close()

    in_a_run(body, size=4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_many_calls_of_all_sizes_both_ways_with_cancellations_end_right_and_leave_nothing(seed: int) -> None:
    """`covey.lab.call_stress` does the same between processes."""
    ran: list[set[tuple[int, int]]] = [set() for _ in range(3)]
    lock = threading.Lock()

    def body(group: covey.Group) -> int:
        node, chance = group.node, random.Random(f"{seed}/{group.rank}")
        service = _calls(group)

        @node.rpc
        def check(caller: int, number: int, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
            with lock:
                assert (caller, number) not in ran[group.rank], "a call ran twice"
                ran[group.rank].add((caller, number))
            assert data.size == 0 or int(data[0]) == int(data[-1]) == number % 251
            return data[::-1] ^ np.uint8(255)

        group.barrier()
        works = []
        for number in range(250):
            size = int(2 ** chance.uniform(0, 20))
            data = np.full(size, number % 251, np.uint8)
            peer = chance.choice([rank for rank in range(3) if rank != group.rank])
            work = node.call_async(peer, "check", group.rank, number, data)
            if chance.random() < 0.2:
                work.cancel()
            works.append((number, size, work))
        answered = 0
        for number, size, work in works:
            try:
                result = work.wait(DEADLINE)
            except covey.CallCancelledError:
                continue
            assert np.array_equal(result, np.full(size, (number % 251) ^ 255, np.uint8))
            answered += 1
        group.barrier()
        core = service._core
        wait_until(lambda: not len(core.outgoing) and not len(core.incoming) and not core.incoming.running)
        assert len(service.made) == 0
        return answered

    answered = run_threads(3, body, lanes="unix", timeout=DEADLINE)
    assert all(150 <= count <= 250 for count in answered)


def test_calls_go_on_over_connections_that_break_none_is_lost_and_none_runs_twice() -> None:
    ran: list[list[int]] = [[], []]

    def body(group: covey.Group) -> int:
        node, other, chance = group.node, 1 - group.rank, random.Random(group.rank)
        transport = _calls(group)._transport
        assert isinstance(transport, LaneTransport)

        @node.rpc
        def echo(number: int, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
            ran[group.rank].append(number)
            return data + np.uint8(1)

        group.barrier()
        node.call(other, "echo", 0, np.zeros(LARGE, np.uint8))
        over, breaks = threading.Event(), 0

        def break_connections() -> None:
            nonlocal breaks
            while not over.wait(0.02):
                lanes = chance.choice([transport._small, transport._large])
                lane = lanes.messenger()._lanes.by_rank.get(other)
                if lane is not None and not lane.is_ended:
                    with contextlib.suppress(OSError):
                        lane.sock.shutdown(socket.SHUT_RDWR)
                        breaks += 1

        thread = threading.Thread(target=break_connections)
        thread.start()
        try:
            for start in range(1, 200, 20):
                datas = {number: np.full(chance.choice([10, LARGE]), number % 200, np.uint8)
                         for number in range(start, start + 20)}  # fmt: skip
                works = {number: node.call_async(other, "echo", number, data) for number, data in datas.items()}
                for number, work in works.items():
                    assert np.array_equal(work.wait(DEADLINE), datas[number] + np.uint8(1))
                time.sleep(0.02)
        finally:
            over.set()
            thread.join()
        return breaks

    breaks = in_a_run(body, lanes="tcp")
    assert all(breaks)
    assert [sorted(numbers) for numbers in ran] == [list(range(201))] * 2


def test_text_that_cannot_be_encoded_is_an_error_at_once_wherever_it_stands_in_a_call() -> None:
    def body(group: covey.Group) -> Any:
        node, other, bad = group.node, 1 - group.rank, "x\ud800"
        node.register("echo", lambda value: value)
        node.register("half a character", lambda: bad)
        group.barrier()
        for call in (
            lambda: node.call(other, bad),
            lambda: list(node.stream(other, bad)),
            lambda: node.call(other, "half a character"),
        ):
            with pytest.raises(covey.CallRefusedError, match="surrogates"):
                call()
        with pytest.raises(TypeError, match="surrogates"):
            node.call(other, "echo", bad)
        answer = node.call(other, "echo", 5)
        group.barrier()
        return answer

    assert run_threads(2, body) == [5, 5]
