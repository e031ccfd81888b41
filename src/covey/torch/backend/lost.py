"""Means and gathered rows in process groups that continue without lost ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from covey.torch.backend.below import covey_group_of


def there(work: Any, group: Any) -> int:
    """Return how many ranks' inputs are in the result of a finished collective; on other backends, all.

    `group` is None for the default one.
    """
    return len(getattr(work, "contributors", ())) or dist.get_world_size(group)


def gather_rows(row: torch.Tensor, group: Any) -> tuple[torch.Tensor, Any]:
    """Start to gather a row of bytes from every rank; return the rows, with zeros for lost ranks, and the work."""
    rows = row.new_zeros(dist.get_world_size(group), row.numel())
    covey_group = covey_group_of(group)
    if covey_group is None or covey_group.on_loss == "raise":
        return rows, dist.all_gather(list(rows), row, group=group, async_op=True)
    # An all_gather raises if a rank is lost. In a sum its row stays zero; that takes twice the bytes.
    rows[dist.get_rank(group)] = row
    return rows, dist.all_reduce(rows, group=group, async_op=True)
