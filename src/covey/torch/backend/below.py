"""The covey group behind a process group of torch, and what it is asked: late ranks, rows without lost ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from covey.runtime.collectives.stalls import Late
    from covey.runtime.group.group import Group


def covey_group_of(process_group: Any = None) -> Group | None:
    """Return the covey group behind `process_group` (default: the default one), or None if its backend is not covey."""
    below: Group | None = getattr(process_group or dist.group.WORLD, "covey_group", None)
    return below


def who_is_late(group: Any = None, timeout: float = 2.0) -> list[Late]:
    """Return the ranks of a covey group that are behind the others, or do not answer within `timeout` seconds.

    Only the caller asks, on any thread, and no operation is disturbed. `monitored_barrier` must be called by all ranks
    before something hangs; this function tells afterwards. In each entry, `rank` is the rank in the default group;
    printing an entry shows the rank, its host and process, and how far behind it is. `group=None` is the default group.

        threading.Timer(60, lambda: print(*covey.torch.who_is_late(), sep="\\n")).start()

    Raises:
        ConfigError: the group is not covey's.
    """
    chosen = dist.group.WORLD if group is None else group
    below = covey_group_of(chosen)
    if below is None:
        raise ConfigError('who_is_late needs a process group with backend "covey"; this group has another')
    found = below.who_is_late(timeout=timeout)
    return [late._replace(rank=dist.get_global_rank(chosen, late.rank)) for late in found]


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
