"""The covey group behind a process group of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def covey_group_of(process_group: Any = None) -> Group | None:
    """Return the covey group behind `process_group` (default: the default one), or None if its backend is not covey."""
    below: Group | None = getattr(process_group or dist.group.WORLD, "covey_group", None)
    return below
