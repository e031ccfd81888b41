"""Mistakes that type checkers must find. It is never run: `right.py` says who reads it.

Each comment says that there is an error in its line; both checkers have one where there is none.
"""

from __future__ import annotations

import numpy as np

import covey


def area(width: int, height: float = 1.0) -> float:
    return width * height


def mistakes(group: covey.Group, node: covey.Node, text: str) -> None:
    x = np.ones(3)
    group.all_reduce(x, op="men")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    group.reduce(x, 0, "avg")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    group.sync_gradients({"x": x}, "men")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    group.all_reduce(x, op=text)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    group.all_reduce(x, weigth=1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    group.all_reduce("text")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    group.all_reduce([1.0, 2.0])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    group.broadcast(b"read-only")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    group.all_reduce(x).wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    group.all_reduce(x, async_op=True).sum()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    group.gather(x)[0]  # type: ignore[index]  # pyright: ignore[reportOptionalSubscript]
    group.send(x, "1")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    node.call(1, area, "wide")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    node.call(1, area)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    node.call(1, area, 2, depth=3)  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
    node.call(1, area, 2).wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    node.call_async(1, area, "2")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    covey.join(on_loss="proceed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    covey.join(lanes="shmem")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    covey.join(onloss="raise")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    group.restore({}, on_drift="mend")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
