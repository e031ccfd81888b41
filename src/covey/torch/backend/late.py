"""Which ranks keep a process group waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.torch.backend.below import covey_group_of

if TYPE_CHECKING:
    from covey.runtime.collectives.stalls import Late


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
