"""Objects of the extension refuse arguments that do not fit, and free what they took, also after an error."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.test_native_lanes import RINGS, WIDE
from tests.support.compiled import needs_native
from tests.support.native_ends import NativeEnd, transfers

from covey.base.native import native
from covey.net.lanes.lane import LaneClosedError

pytestmark = needs_native

PLAN = (((0, 0, 0, 5, 0),), ((0, 1, 0, 5, 0, 0),), (True,))


def start(runner: Any, plan: Any, buffers: list[Any], **changed: Any) -> Any:
    parts = {"reduction": None, "contributors": 1, "prefix": bytes(32), "sequence": 0, "undo": None}
    return runner.start(plan, buffers, *{**parts, **changed}.values(), False, 0, 0, 0)


def buffers_of(*sizes: int) -> list[bytearray]:
    return [bytearray(size) for size in sizes]


@pytest.mark.parametrize(
    ("plan", "sizes", "changed"),
    [
        (PLAN, (5,), {}),
        (PLAN, (5, 4), {}),
        (PLAN, (5, 5), {"prefix": bytes(31)}),
        (PLAN, (5, 5), {"undo": object()}),
        (PLAN, (5, 5), {"reduction": object()}),
        (((), ((0, 0, 0, 5, 1, 0),), (True,)), (5, 5), {}),  # reduces without a reduction
        (((), ((2, 0, 0, 5, 0, 0),), (True,)), (5, 5), {}),  # from a slot that the attempt does not have
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_keeps_no_buffer(plan: Any, sizes: Any, changed: Any) -> None:
    runner, buffers = native().module.Runner(2), buffers_of(*sizes)
    with pytest.raises((ValueError, TypeError)):
        start(runner, native().module.Plan(*plan), buffers, **changed)
    for buffer in buffers:
        buffer.append(1)  # BufferError if the memory were still in use


def test_a_receive_into_memory_that_is_read_only_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        start(native().module.Runner(2), native().module.Plan(*PLAN), [bytes(5), bytes(5)])


@pytest.mark.parametrize(
    "plan",
    [
        (((-1, 0, 0, 5, 0),), (), ()),
        (((0, -1, 0, 5, 0),), (), ()),
        (((0, 0, 5, 4, 0),), (), ()),
        (((0, 0, -1, 4, 0),), (), ()),
        ((((1 << 31) - 1, 0, 0, 4, 0),), (), ()),
        (((0, (1 << 31) - 1, 0, 4, 0),), (), ()),
        ((), ((0, 0, 0, 5, 0, 0),), ()),
    ],
)
def test_moves_with_impossible_numbers_are_refused(plan: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        native().module.Plan(*plan)


def test_what_is_asked_before_an_operation_started_is_refused() -> None:
    runner = native().module.Runner(2)
    for ask in (lambda: runner.resume(0), runner.waiting):
        with pytest.raises(ValueError, match="no operation"):
            ask()
    assert runner.details()[0] == 0
    for slot in (-1, 2, 1 << 30):
        with pytest.raises(ValueError, match="no lane"):
            runner.set_lane(slot, object(), 0, False)
    with pytest.raises(ValueError, match="at least one slot"):
        native().module.Runner(0)


def test_an_undo_buffer_restores_ranges_in_reverse_and_forgets_them() -> None:
    for room in (0, 1000, 1 << 20):
        undo, x = native().module.Undo(), np.arange(100_000, dtype=np.uint8)
        before = x.copy()
        undo.make_room(room)
        for start_at in (0, 50_000, 10):
            undo.save(x[start_at : start_at + 40_000])
            x[start_at : start_at + 40_000] += 1
        undo.restore()
        assert np.array_equal(x, before)
        x[:] = 0
        undo.restore()
        assert not x.any()
    with pytest.raises(ValueError, match="negative"):
        undo.make_room(-1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("make", [RINGS[0], *WIDE], ids=lambda make: make.__name__)
def test_lanes_and_operations_free_what_they_took(make: Any) -> None:
    module = native().module
    types = [getattr(module, name) for name in ("Ring", "Stream", "Sealed", "Plan", "Reduction", "Runner")]
    payload = transfers([100_000], np.dtype(np.uint8))

    def use() -> None:
        with contextlib.ExitStack() as stack:
            near, far = make(stack, (True, True))
            ends = [NativeEnd(near, payload, []), NativeEnd(far, [], payload), NativeEnd(near, [], payload)]
            for end in ends:
                stack.callback(end.close)
            while not ends[1].done:
                ends[0].advance()
                ends[1].advance()
            far.close()
            with contextlib.suppress(LaneClosedError):  # it ends in the middle
                ends[2].advance(0.001)

    for _ in range(10):
        use()
    gc.collect()
    counts, before = [sys.getrefcount(each) for each in types], resident_bytes()
    for _ in range(60):
        use()
    gc.collect()
    assert [sys.getrefcount(each) for each in types] == counts, "objects are left"
    assert resident_bytes() - before < 16 << 20
