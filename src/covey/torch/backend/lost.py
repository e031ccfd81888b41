"""Means and rows of process groups that go on without lost ranks: whose parts there are, and how many."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def there(work: Any, group: Any) -> int:
    """Return how many ranks' inputs are in the result of a collective that is done; all, on other backends.

    `group` is None for the default one.
    """
    return len(getattr(work, "contributors", ())) or dist.get_world_size(group)


def gather_rows(row: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Start to gather a row of bytes from every rank; return the rows, zeros where a rank is lost, and the work."""
    rows = row.new_zeros(dist.get_world_size(group), row.numel())
    covey_group = getattr(group or dist.group.WORLD, "covey_group", None)
    if covey_group is None or covey_group.on_loss == "raise":
        return rows, dist.all_gather(list(rows), row, group=group, async_op=True)
    # Nobody may miss from a gathering; in a sum, what is missing is zero. That takes twice the bytes.
    rows[dist.get_rank(group)] = row
    return rows, dist.all_reduce(rows, group=group, async_op=True)
