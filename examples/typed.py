"""What a type checker knows of a program with covey: `mypy --strict` and pyright find nothing wrong here.

Start with: covey run -n 3 examples/typed.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import covey


@dataclass
class Batch:
    """What one rank has counted."""

    rows: int
    loss: float


def count(rows: int, *, loss: float = 0.0) -> Batch:
    """Return a batch of so many rows; other ranks call this."""
    return Batch(rows, loss)


def total(group: covey.Group, values: np.ndarray[tuple[int], np.dtype[np.float64]], op: covey.Op = "sum") -> float:
    """Return one number of the values of all ranks, and go on while they are combined."""
    work = group.all_reduce(values, op, async_op=True)  # Work of the same kind of array
    rows = group.all_reduce(len(values))  # int
    return float(work.wait().sum()) / rows


with covey.join(on_loss="raise") as group:
    group.node.register("count", count)
    group.barrier()
    peer = (group.rank + 1) % group.size
    mine = count(group.rank, loss=0.5)
    if group.size > 1:
        theirs = group.node.call(peer, count, 7, loss=0.25)  # a Batch, as the annotation says
        mine = Batch(mine.rows + theirs.rows, theirs.loss)
    batches = group.all_gather_object(mine, type=Batch)  # list of Batch
    mean = total(group, np.full(4, float(group.rank)))
    group.barrier()
    print(f"rank {group.rank} of {group.size}: {sum(batch.rows for batch in batches)} rows, mean {mean}")
