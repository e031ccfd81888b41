"""Random programs of collectives, run by threads over real lanes and by an obvious sequential oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.sets import first
from tests.support.values import LANES, combined, same, values
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import DTYPES
from covey.plan import choose
from covey.plan.moves import part
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group, Op

OPERATIONS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
              "scan", "exscan", "barrier", "all_gather_object", "sync_gradients", "all_gather into rows",
              "reduce_scatter into a part", "all_to_all into rows")  # fmt: skip


@dataclass
class Step:
    """One operation as all ranks call it."""

    operation: str
    seed: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    root: int
    op: Op
    algorithm: str | None
    asynchronous: list[bool] = field(default_factory=list)
    """For each rank, whether it waits at once."""


def program(rng: random.Random, size: int, length: int) -> list[Step]:
    steps: list[Step] = []
    for seed in range(length):
        asynchronous = [rng.random() < 0.3 for _ in range(size)]
        if steps and rng.random() < 0.3:  # the same once more, with other numbers
            steps.append(replace(steps[-1], seed=seed, asynchronous=asynchronous))
            continue
        operation = rng.choice(OPERATIONS)
        dtype = rng.choice(DTYPES)
        ops: list[Op] = ["min", "max"] if dtype.kind == "b" else ["sum"] if dtype.kind == "c" else ["sum", "min", "max"]
        if dtype.kind not in "biu" and operation not in ("scan", "exscan"):
            ops.append("mean")
        algorithms: tuple[str | None, ...] = (None,)
        if operation == "all_reduce":
            algorithms = (None, *choose.ALL_REDUCE_PLANS[size > 2 :])
        elif operation in ("reduce", "broadcast"):
            algorithms = (None, *choose.ROOTED_PLANS)
        elif operation == "all_gather":
            algorithms = (None, "direct", "ring")
        large = rng.random() < 0.15
        rows = rng.choice([0, 1, size - 1, size, 2 * size + 1, rng.randrange(1, 40)])
        shape = (rng.randrange(30_000, 70_000),) if large else (rows, *[rng.randrange(1, 5)] * rng.randrange(3))
        steps.append(
            Step(
                operation,
                seed,
                dtype,
                shape,
                rng.randrange(size),
                rng.choice(ops),
                rng.choice(algorithms),
                asynchronous,
            )
        )
    return steps


def contribution(step: Step, rank: int, to: int = 0) -> Any:
    """Return what a rank brings along; uneven where the operation allows it."""
    shape = step.shape
    if step.operation in ("all_gather", "gather", "scatter", "all_to_all"):
        shape = (shape[0] + rank + to, *shape[1:])
    return values(rank + 100 * to, shape, step.dtype, step.seed)


def call(group: Group, step: Step, *, async_op: bool) -> Any:
    """Issue one step on a group."""
    x = contribution(step, group.rank)
    match step.operation:
        case "all_reduce":
            return group.all_reduce(x, step.op, algorithm=step.algorithm, async_op=async_op)
        case "reduce":
            return group.reduce(x, step.root, step.op, algorithm=step.algorithm, async_op=async_op)
        case "broadcast":
            return group.broadcast(x, step.root, algorithm=step.algorithm, async_op=async_op)
        case "all_gather":
            return group.all_gather(x, algorithm=step.algorithm, async_op=async_op)
        case "gather":
            return group.gather(x, step.root, async_op=async_op)
        case "scatter":
            blocks = [contribution(step, step.root, to) for to in range(group.size)]
            return group.scatter(blocks if group.rank == step.root else None, step.root, async_op=async_op)
        case "reduce_scatter":
            return group.reduce_scatter(x, step.op, async_op=async_op)
        case "all_to_all":
            return group.all_to_all([contribution(step, group.rank, to) for to in range(group.size)], async_op=async_op)
        case "all_gather into rows":
            return group.all_gather(x, out=np.empty((group.size, *x.shape), x.dtype), async_op=async_op)
        case "reduce_scatter into a part":
            start, stop = part(len(x), group.size, group.rank)
            out = np.empty((stop - start, *x.shape[1:]), x.dtype)
            return group.reduce_scatter(x, step.op, out=out, async_op=async_op)
        case "all_to_all into rows":
            rows = np.stack([contribution(step, group.rank, to) for to in range(group.size)])
            return group.all_to_all(rows, out=np.empty_like(rows), async_op=async_op)
        case "scan":
            return group.scan(x, step.op, async_op=async_op)
        case "exscan":
            return group.exscan(x, step.op, async_op=async_op)
        case "barrier":
            return group.barrier(async_op=async_op)
        case "all_gather_object":
            return group.all_gather_object([x, step.seed, group.rank], async_op=async_op)
        case "sync_gradients":
            grads = {"first": x, "second": contribution(step, group.rank, 1)}
            group.sync_gradients(grads, step.op, bucket_bytes=1 + 100 * step.seed)
            return [grads["first"], grads["second"]]
    raise AssertionError(step.operation)


def verify(step: Step, rank: int, size: int, got: Any) -> None:
    """Compare one rank's result of one step with what the oracle says."""
    inputs = [contribution(step, each) for each in range(size)]
    match step.operation:
        case "all_reduce":
            same(got, combined(step.op, inputs))
        case "reduce":
            same(got, combined(step.op, inputs) if rank == step.root else inputs[rank])
        case "broadcast":
            same(got, inputs[step.root])
        case "all_gather":
            _same_lists(got, inputs)
        case "gather":
            if rank == step.root:
                _same_lists(got, inputs)
            else:
                assert got is None
        case "scatter":
            same(got, contribution(step, step.root, rank))
        case "all_gather into rows":
            same(got, np.stack(inputs))
        case "all_to_all into rows":
            same(got, np.stack([contribution(step, each, rank) for each in range(size)]))
        case "reduce_scatter" | "reduce_scatter into a part":
            same(got, np.array_split(combined(step.op, inputs), size)[rank])
        case "all_to_all":
            _same_lists(got, [contribution(step, each, rank) for each in range(size)])
        case "scan":
            same(got, combined(step.op, inputs[: rank + 1]))
        case "exscan":
            if rank:
                same(got, combined(step.op, inputs[:rank]))
            else:
                same(combined(step.op, [got, inputs[0]]), inputs[0])
        case "barrier":
            assert got is None
        case "all_gather_object":
            for each, (array, seed, sender) in enumerate(got):
                same(array, inputs[each])
                assert (seed, sender) == (step.seed, each)
        case "sync_gradients":
            same(got[0], combined(step.op, inputs))
            same(got[1], combined(step.op, [contribution(step, each, 1) for each in range(size)]))


def _same_lists(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("seed", first(8, range(40)))
def test_a_random_program_gives_what_the_oracle_says(seed: int) -> None:
    rng = random.Random(seed)
    size, lanes = 2 + seed % 4, LANES[seed % len(LANES)]
    steps = program(rng, size, 60)

    def body(group: Group) -> None:
        pending = []
        for step in steps:
            async_op = step.asynchronous[group.rank] and step.operation != "sync_gradients"
            result = call(group, step, async_op=async_op)
            if async_op:
                pending.append((step, result))
                continue
            verify(step, group.rank, size, result)
        for step, work in pending:
            verify(step, group.rank, size, work.wait(DEADLINE))

    run_threads(size, body, lanes=lanes)
