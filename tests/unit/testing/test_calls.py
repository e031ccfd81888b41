"""The double of calls behaves as calls over a network do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator  # noqa: TC003 - annotations of functions are evaluated

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.waiting import DEADLINE

import covey
from covey.testing import LinkedNodes


def test_linked_nodes_call_each_other_with_values_that_are_decoded_by_annotations() -> None:
    with LinkedNodes(3) as nodes:

        @nodes[1].rpc
        def scale(x: npt.NDArray[np.float64], by: int) -> npt.NDArray[np.float64]:
            return x * by

        x = np.arange(100_000.0)
        assert np.array_equal(nodes[0].call(1, "scale", x, 3), 3 * x)
        assert nodes[2].broadcast_call("scale", x[:2], 1, return_exceptions=True)[1].tolist() == [0.0, 1.0]
        with pytest.raises(covey.CallRefusedError, match="did you mean 'scale'"):
            nodes[0].call(1, "scal", x, 3)
        with pytest.raises(covey.CallRefusedError, match="Expected `int`"):
            nodes[0].call(1, "scale", x, "3")


def test_linked_nodes_have_streams_handles_deadlines_and_errors() -> None:
    with LinkedNodes(2) as nodes:

        @nodes[1].rpc
        def count(to: int) -> Iterator[int]:
            yield from range(to)

        @nodes[1].rpc
        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)

        @nodes[1].rpc
        def fail() -> None:
            raise LookupError("nothing")

        values: list[int] = []
        handle = nodes[0].export(values)
        nodes[1].register("append", lambda target, value: target.append(value))
        assert list(nodes[0].stream(1, "count", 100)) == list(range(100))
        with pytest.raises(covey.DeadlineError, match="timeout"):
            nodes[0].call(1, "sleep", DEADLINE, timeout=0.05)
        with pytest.raises(covey.RemoteCallError) as caught:
            nodes[0].call(1, "fail")
        assert (caught.value.type, caught.value.peer) == ("LookupError", 1)
        nodes[0].call(1, "append", handle, 7)
        assert values == [7]


def test_a_lost_node_ends_its_calls() -> None:
    with LinkedNodes(3) as nodes:
        began, stopped = threading.Event(), threading.Event()

        def wait() -> None:
            caller = nodes[1].caller()
            began.set()
            while not caller.is_cancelled:
                time.sleep(0.005)
            stopped.set()

        nodes[1].register("wait", wait)
        nodes[2].register("five", lambda: 5)
        work = nodes[0].call_async(1, "wait")
        assert began.wait(DEADLINE)
        nodes.lose(0)
        assert stopped.wait(DEADLINE)
        nodes.lose(1)
        with pytest.raises(covey.PeerLostError):
            nodes[2].call(1, "wait")
        assert nodes[2].call(2, "five") == 5
        nodes.close()
        with pytest.raises(covey.ClosedError):
            work.wait(DEADLINE)
