"""Sizes other than the defaults: the same results, on every lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import pairs
from tests.support.values import LANES, all_values, same, total, values

from covey.runtime.group.internals import engine_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

SMALL: dict[str, Any] = {
    "exchange_bytes": 100,
    "doubling_bytes": 200,
    "tree_bytes": 300,
    "segment_bytes": 4096,
    "cached_segment_bytes": "4KiB",
    "ring_bytes": "16KiB",
    "eager_bytes": 64,
    "credit_bytes": "64KiB",
    "bucket_bytes": 5000,
}
LARGE: dict[str, Any] = {
    "exchange_bytes": "1GiB",
    "doubling_bytes": "1GiB",
    "tree_bytes": "1GiB",
    "segment_bytes": "1GiB",
    "ring_bytes": "4MiB",
    "kernel_copy": "always",
    "eager_bytes": "1MiB",
}


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 3], LANES))
@pytest.mark.parametrize("settings", [SMALL, LARGE], ids=["small", "large"])
def test_results_are_the_same_with_other_sizes(size: int, lanes: str, settings: dict[str, Any]) -> None:
    def body(group: Group) -> None:
        for count in (0, 24, 80, 3001, 40_007):
            same(group.all_reduce(values(group.rank, count, np.float32, 1)), total("sum", size, count, np.float32, 1))
            same(group.broadcast(values(group.rank, count, np.float32, 2), 1), values(1, count, np.float32, 2))
            part = values(group.rank, (size * count, 2), np.int64, 3)
            mine = slice(group.rank * count, (group.rank + 1) * count)
            same(group.reduce_scatter(part), total("sum", size, (size * count, 2), np.int64, 3)[mine])
            for got, expected in zip(
                group.all_gather(values(group.rank, count, np.int16, 4)),
                all_values(size, count, np.int16, 4),
                strict=True,
            ):
                same(got, expected)
            work = group.send(values(group.rank, count, np.float64, 5), (group.rank + 1) % size, async_op=True)
            source = (group.rank - 1) % size
            same(group.recv(source), values(source, count, np.float64, 5))
            work.wait()
        grads = {name: values(group.rank, 700, np.float32, seed) for seed, name in enumerate("abc")}
        group.sync_gradients(grads, "sum")
        for seed, name in enumerate("abc"):
            same(grads[name], total("sum", size, 700, np.float32, seed))

    run_threads(size, body, lanes=lanes, settings=settings)


def test_the_sizes_of_a_group_are_those_that_it_was_joined_with() -> None:
    def body(group: Group) -> tuple[int, ...]:
        return tuple(engine_of(group.split(0)).attempt.sizes)

    assert run_threads(2, body, settings=SMALL) == [(100, 200, 300, 4096, 4096)] * 2


@pytest.mark.parametrize(("eager_bytes", "is_sent_at_once"), [(100, True), (99, False)])
def test_a_message_is_sent_at_once_up_to_the_limit(eager_bytes: int, is_sent_at_once: bool) -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            work = group.send(np.arange(100, dtype=np.uint8), 1, async_op=True)
            if is_sent_at_once:
                work.wait()
            group.barrier()
            assert work.done() is is_sent_at_once
            group.barrier()
            work.wait()
        else:
            assert group.probe(0).nbytes == 100  # it is here, or announced
            group.barrier()
            group.barrier()
            same(group.recv(0), np.arange(100, dtype=np.uint8))

    run_threads(2, body, lanes="unix", settings={"eager_bytes": eager_bytes})
