"""Programs of ranks that use JAX: processes, since JAX runs the operations of all threads of one in one order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.support.values import all_values, combined, values

import covey.jax as operations

SHAPE = (4, 3)


def close(actual: Any, expected: Any) -> None:
    assert isinstance(actual, jax.Array)
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)


def call_everything(group: Any) -> None:
    """Call every operation in one compiled program."""
    rank, size = group.rank, group.size
    every = all_values(size, SHAPE, np.float32)
    to, of = (rank + 1) % size, (rank - 1) % size

    @jax.jit
    def program(x: Any, rows: Any) -> Any:
        total = operations.all_reduce(x)
        if rank == 0:
            operations.send(total + 1, 1, 5)
        elif rank == 1:
            total = operations.recv(total, 0, 5) - 1
        operations.barrier()
        return (
            total,
            operations.all_reduce(x, "max"),
            operations.reduce(x, 1),
            operations.broadcast(x, 1),
            operations.all_gather(x),
            operations.reduce_scatter(x),
            operations.all_to_all(rows),
            operations.scan(x),
            operations.sendrecv(x, to, of),
        )

    rows = [values(each, (size, 2), np.float32) for each in range(size)]
    found = jax.block_until_ready(program(every[rank], rows[rank]))
    total = combined("sum", every)
    expected = [
        total,
        combined("max", every),
        total if rank == 1 else every[rank],
        every[1],
        np.stack(every),
        np.array_split(total, size)[rank],
        np.stack([rows[each][rank] for each in range(size)]),
        combined("sum", every[: rank + 1]),
        every[of],
    ]
    for got, want in zip(found, expected, strict=True):
        close(got, want)
    large = jax.jit(lambda x: operations.all_reduce(x, "mean") * 2)
    close(jax.block_until_ready(large(np.full(1 << 22, rank, np.float32)))[:3], [float(size - 1)] * 3)
    close(jax.block_until_ready(operations.all_reduce(every[rank], group=group)), total)  # not compiled


def differentiate(group: Any) -> None:
    """Call operations in loops, branches and gradients, and then the group itself."""
    rank, size = group.rank, group.size

    @jax.jit
    def loops(x: Any) -> Any:
        x = jax.lax.fori_loop(0, 3, lambda _, a: operations.all_reduce(a, "mean") + rank, x)
        x, _ = jax.lax.scan(lambda a, _: (operations.all_reduce(a, "mean"), None), x, None, length=2)
        return jax.lax.cond(x[0] > -1, lambda a: operations.broadcast(a, 1), lambda a: a, x)

    close(jax.block_until_ready(loops(np.zeros(2, np.float32))), [1.5, 1.5])
    x = np.arange(3, dtype=np.float32) + rank
    for op, own in (("sum", 1.0), ("mean", 1.0 / size)):

        def loss(x: Any, op: Any = op) -> Any:
            return (operations.all_reduce(x, op) ** 2).sum()

        reduced = (2 * np.arange(3) + 1) * own
        close(jax.block_until_ready(jax.jit(jax.grad(loss))(x)), 2 * reduced * own)
    _, tangent = jax.jvp(operations.all_reduce, (x,), (np.ones(3, np.float32),))
    close(tangent, [2.0] * 3)
    with pytest.raises(ValueError, match="vmap"):
        jax.vmap(operations.all_reduce)(np.ones((2, 2), np.float32))
    jax.effects_barrier()
    assert group.all_reduce(1) == size


def call_different_things(group: Any) -> str:
    """Return the error of a compiled program whose ranks disagree."""
    program = jax.jit(operations.all_reduce)
    with pytest.raises(Exception, match="MismatchError") as caught:
        jax.block_until_ready(program(np.ones(2 + group.rank, np.float32)))
    return type(caught.value).__name__


def run_the_guide(group: Any) -> list[float]:
    """Run the first program of the guide to arrays."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "arrays.md").read_text()
    step = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {"group": group, "weights": np.ones(2, np.float32), "x": np.eye(2, dtype=np.float32)}
    exec(step, names)
    return [round(float(weight), 4) for weight in names["weights"]]
