"""One end of a lane that the compiled executor moves, as `tests.contract.test_lanes.End` is one that Python moves."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.contract.test_lanes import Transfer, noise
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import reduction
from covey.base.native import native
from covey.net.lanes.lane import LaneClosedError
from covey.plan.moves import REDUCE, STORE, Recv, Send
from covey.runtime.collectives.native_executor import (
    DONE,
    LANE_ENDED,
    NEEDS_LANE,
    STALLED,
    STOPPED,
    WRONG_HEADER,
    native_reduction,
)
from covey.wire.header import HEADER_PREFIX, TransferHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

SEQUENCE = 0xFEED
PEER = 1
PREFIX = TransferHeader(0, 0, 0, 0, 0, 7, 0, 0, 0, 0).pack()[: HEADER_PREFIX.size]


def transfers(sizes: Sequence[int], dtype: np.dtype[Any] | None = None, *, seed: int = 0) -> list[Transfer]:
    """Return the transfers of one plan, in bytes; with a dtype, their receiver reduces them."""
    made = []
    for move, nbytes in enumerate(sizes):
        header = TransferHeader(0, 0, 0, 0, 0, 7, 0, SEQUENCE, move, nbytes).pack()
        if dtype is not None and dtype.kind == "c":  # any bits would do, but a sum with zero keeps only numbers
            payload = np.random.default_rng([seed, move, nbytes]).standard_normal(nbytes // 8).view(np.uint8)
        else:
            payload = noise(nbytes, seed, move)
        made.append(Transfer(header, payload, dtype))
    return made


class OtherHeaderError(Exception):
    """Another header has arrived than the plan says: (expected, header)."""


class StoppedError(Exception):
    """The executor was stopped, or woken."""


class NativeEnd:
    """One end of a lane with all it has to send and to receive, moved by the compiled executor."""

    def __init__(
        self, lane: Any, sends: list[Transfer], recvs: list[Transfer], *, itemsize: int = 1, prefix: bytes = PREFIX
    ) -> None:
        """`itemsize` is that of elements that are stored; elements that are reduced have a dtype.

        `prefix` is the beginning of all headers that this end sends.
        """
        self.lane, self._prefix = lane, prefix
        dtype = next((each.dtype for each in (*sends, *recvs) if each.dtype is not None), None)
        self._itemsize = itemsize if dtype is None else dtype.itemsize
        self._reduction = None
        if dtype is not None:
            rule = reduction("sum" if dtype.kind == "c" else "or", dtype)
            self._reduction = native_reduction(rule, dtype, 1)
        action = STORE if dtype is None else REDUCE
        out, into = ([each.payload for each in part] for part in (sends, recvs))
        self.expected = np.concatenate([np.empty(0, np.uint8), *into])
        self._room = np.zeros(self.expected.nbytes + 2 * 64, np.uint8)
        """What is received, between two canaries."""
        self._room[:64] = self._room[-64:] = 0xA5
        self.received = self._room[64:-64]
        self._buffers = [np.concatenate([np.empty(0, np.uint8), *out]), self.received]
        self._plan = native().module.Plan(
            tuple(Send(PEER, 0, *span) for span in self._spans(out)),
            tuple(Recv(PEER, 1, *span, action) for span in self._spans(into)),
            (True,) * len(recvs),
        )
        self.runner = native().module.Runner(2)
        self.wake, self._bell = socket.socketpair()
        self._is_started = False
        self.done = False

    def _spans(self, payloads: list[Array]) -> list[tuple[int, int]]:
        spans, at = [], 0
        for payload in payloads:
            count, rest = divmod(payload.nbytes, self._itemsize)
            assert not rest, "not whole elements"
            spans.append((at, at + count))
            at += count
        return spans

    def advance(self, idle_seconds: float = 0.0) -> bool:
        """Move until nothing has moved for so long; tell whether the plan is done.

        Raises:
            LaneClosedError: the lane has ended.
            OtherHeaderError: another header came.
            StoppedError: the stop word is set, or the wake descriptor is readable.
        """
        if self.done:
            return True
        runner, stall_ns = self.runner, int(idle_seconds * 1e9)
        if self._is_started:
            reason = runner.resume(stall_ns)
        else:
            how = (self._reduction, 1, self._prefix, SEQUENCE, None, False, 0, 0, stall_ns)
            elements = [buffer.view(f"V{self._itemsize}") for buffer in self._buffers]
            reason = runner.start(self._plan, elements, *how)
            self._is_started = True
        if reason == NEEDS_LANE:
            runner.set_lane(PEER, self.lane.native, self.wake.fileno(), getattr(self.lane, "has_idle_core", False))
            return self.advance(idle_seconds)
        if reason == STOPPED:
            raise StoppedError
        if reason == LANE_ENDED:
            raise LaneClosedError(runner.details()[3])
        if reason == WRONG_HEADER:
            raise OtherHeaderError(*runner.details()[1:3])
        assert reason in (DONE, STALLED)
        self.done = reason == DONE
        return self.done

    def run(self) -> None:
        """Move everything, and check what was received."""
        assert self.advance(DEADLINE), "the lane is stuck"
        self.check()

    def check(self) -> None:
        assert np.array_equal(self.received, self.expected)
        self.check_canaries()

    def check_canaries(self) -> None:
        assert np.all(self._room[:64] == 0xA5)
        assert np.all(self._room[-64:] == 0xA5)

    def wake_up(self) -> None:
        """Make the wake descriptor readable."""
        self._bell.send(b"\0")

    def overwrite(self) -> None:
        """Change the memory that is sent, as a program may once the operation is over."""
        self._buffers[0][:] = 0xEE

    def close(self) -> None:
        self.runner.finish()
        self.runner.forget_lanes()
        self.wake.close()
        self._bell.close()


def in_parallel(*functions: Callable[[], None]) -> None:
    """Run functions on threads of their own; raise what the first of them raised."""
    errors: list[BaseException] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a lane is stuck"
