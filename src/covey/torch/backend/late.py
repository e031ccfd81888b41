"""Who keeps a process group waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from covey.runtime.collectives.stalls import Late


def who_is_late(group: Any = None, timeout: float = 2.0) -> list[Late]:
    """Return the ranks that keep a group of covey's waiting: behind the others, or without an answer in `timeout`.

    Only the caller asks, from any thread, and nothing is disturbed: unlike `monitored_barrier`, which all ranks call
    before something hangs, this tells when it does. `rank` is the rank in the default group; `print` of an entry says
    who it is, how far behind, and in what. None is the default group.

        threading.Timer(60, lambda: print(*covey.torch.who_is_late(), sep="\\n")).start()

    Raises:
        ConfigError: the group is not covey's.
    """
    chosen = dist.group.WORLD if group is None else group
    below = getattr(chosen, "covey_group", None)
    if below is None:
        raise ConfigError('who_is_late asks the ranks of a group with backend "covey"; this one is not')
    return [replace(late, rank=dist.get_global_rank(chosen, late.rank)) for late in below.who_is_late(timeout=timeout)]
