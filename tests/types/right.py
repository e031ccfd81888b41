"""What type checkers make of covey. It is never run: mypy reads it in `make test`, as does basedpyright.

`wrong.py` has what they must find.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator  # noqa: TC003
from typing import Any, assert_type

import numpy as np

import covey

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Array = np.ndarray[Any, np.dtype[Any]]


def arrays(group: covey.Group, x: Floats, flag: bool) -> None:
    assert_type(group.all_reduce(x), Floats)
    assert_type(group.all_reduce(x, "max", weight=2.0, compress="int8", timeout=1.0), Floats)
    assert_type(group.all_reduce(x, async_op=True), covey.Work[Floats])
    assert_type(group.all_reduce(x, async_op=True).wait(), Floats)
    assert_type(group.all_reduce(x, async_op=flag), Any)
    assert_type(group.all_reduce(bytearray(4), "or"), bytearray)
    assert_type(group.reduce(x, 1, "min"), Floats)
    assert_type(group.reduce(x, async_op=True), covey.Work[Floats])
    assert_type(group.reduce_scatter(x, counts=[1, 2]), Array)
    assert_type(group.reduce_scatter(x, out=x), Floats)
    assert_type(group.reduce_scatter(x, "sum", async_op=True), covey.Work[Array])
    assert_type(group.scan([1, 2, 3], "prod"), Array)
    assert_type(group.exscan(x, async_op=True), covey.Work[Array])
    assert_type(group.broadcast(x, 2), Floats)
    assert_type(group.broadcast(x, async_op=True), covey.Work[Floats])
    assert_type(group.all_gather(x), list[Array])
    assert_type(group.all_gather(1.5), list[Array])
    assert_type(group.all_gather(x, out=x), Floats)
    assert_type(group.all_gather(x, async_op=True), covey.Work[list[Array]])
    assert_type(group.gather(x, 0), list[Array] | None)
    assert_type(group.scatter([x, x]), Array)
    assert_type(group.scatter(None, 1, async_op=True), covey.Work[Array])
    assert_type(group.all_to_all([x, x]), list[Array])
    assert_type(group.all_to_all(np.ones((2, 3)), out=x), Floats)
    assert_type(group.barrier(), None)
    assert_type(group.barrier(async_op=True), covey.Work[None])
    group.sync_gradients({"w": x}, "sum")


def numbers(group: covey.Group) -> None:
    assert_type(group.all_reduce(3), int)
    assert_type(group.all_reduce(3, "mean"), float)
    assert_type(group.all_reduce(3, op="mean", async_op=True), covey.Work[float])
    assert_type(group.all_reduce(3.5, "max"), float)
    assert_type(group.all_reduce(1j), complex)
    assert_type(group.all_reduce(2, async_op=True), covey.Work[int])
    assert_type(group.all_reduce(np.float32(1)), Any)


def messages(group: covey.Group, x: Floats, read_only: bytes) -> None:
    assert_type(group.send(x, 1), None)
    assert_type(group.send([x, x], 1, tag=3, async_op=True), covey.Work[None])
    group.send(read_only, 1)
    group.send([1, 2, 3], 1)
    assert_type(group.recv(0), Array | Any)
    assert_type(group.recv(0, out=x), Floats)
    assert_type(group.recv(covey.ANY, covey.ANY, out=x, async_op=True), covey.Work[Floats])
    assert_type(group.sendrecv(x, 1, out=x), Floats)
    assert_type(group.probe(), covey.MessageInfo)
    assert_type(group.iprobe(), covey.MessageInfo | None)
    assert_type(group.probe(async_op=True), covey.Work[covey.MessageInfo])


def values(group: covey.Group) -> None:
    assert_type(group.broadcast_object({"a": 1}), Any)
    assert_type(group.broadcast_object({1, 2}, type=set[int]), set[int])
    assert_type(group.all_gather_object("a", type=str), list[str])
    assert_type(group.gather_object(1, type=int, async_op=True), covey.Work[list[int] | None])
    assert_type(group.scatter_object([1, 2], type=int), int)
    assert_type(group.recv_object(0, type=int), int)
    assert_type(group.recv_object(0, type=int, async_op=True), covey.Work[int])
    assert_type(group.send_object({1}, 1, type=set[int]), None)


def area(width: int, height: float = 1.0) -> float:
    return width * height


async def names(prefix: str) -> list[str]:
    await asyncio.sleep(0)
    return [prefix]


def squares(count: int) -> Iterator[int]:
    yield from range(count)


async def letters() -> AsyncIterator[str]:
    yield "a"


def calls(group: covey.Group, node: covey.Node) -> None:
    assert_type(node.call(1, area, 2, height=3.0), float)
    assert_type(node.call("south", area, 2, timeout=3.0), float)
    assert_type(node.call(1, names, "a"), list[str])
    assert_type(node.call(1, names, "a", timeout=1), list[str])
    assert_type(node.call(1, "area", 2), Any)
    assert_type(group.call(1, area, 2), float)
    assert_type(node.call_async(1, area, 2), covey.CallWork[float])
    assert_type(node.call_async(1, names, "a"), covey.CallWork[list[str]])
    assert_type(node.stream(1, squares, 3), covey.CallStream[int])
    assert_type(node.stream(1, letters, timeout=1.0), covey.CallStream[str])
    assert_type(node.broadcast_call(area, 2), dict[int, float])
    assert_type(node.broadcast_call(names, "a"), dict[int, list[str]])
    for item in node.stream(1, squares, 3):
        assert_type(item, int)


async def awaited(group: covey.Group, x: Floats) -> None:
    assert_type(await group.all_reduce(x, async_op=True), Floats)
    assert_type(await covey.join_async(on_loss="continue"), covey.Group)


def works(group: covey.Group, x: Floats) -> None:
    assert_type(covey.wait_all([group.all_reduce(x, async_op=True)]), list[Floats])
    assert_type(covey.wait_any([group.barrier(async_op=True)]), int)


def everything_else(group: covey.Group) -> None:
    assert_type(group.on_loss, covey.OnLoss)
    assert_type(group.split(1), covey.Group)
    assert_type(covey.launch(whole, 2), list[float])
    assert_type(covey.launch(whole, 2, on_loss="continue"), list[float | None])
    assert_type(covey.run_on("north", whole, processes=2), list[float])
    assert_type(covey.run_on(["north"], whole, on_loss="continue"), list[float | None])


def whole(group: covey.Group) -> float:
    return group.size / 2
