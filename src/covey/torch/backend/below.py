"""covey's group below a process group of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def covey_group_of(process_group: Any = None) -> Group | None:
    """Return covey's group below a process group, by default the default one; None if it has another backend."""
    below: Group | None = getattr(process_group or dist.group.WORLD, "covey_group", None)
    return below
