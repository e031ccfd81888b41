"""A key-value store that rank 0 of a group keeps, and that all its ranks use."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.runtime import loop as control
from covey.runtime.members.store import StoreClient, Stores

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def open_group_store(group: Group, timeout: float | None = None) -> StoreClient:
    """Return this rank's access to a new store that rank 0 keeps. Every rank of the group calls it."""
    node = group._engine.node
    number = secrets.randbits(62)
    if node is None:
        alone = Stores(None)
        alone.keep(number)
        return StoreClient(alone, number, 0)
    if group.rank == 0:
        control.soon(node.stores.keep, number)
    number = group.broadcast_object(number, type=int, timeout=timeout)
    if not 0 <= number < 1 << 62:
        raise RemoteProtocolError(f"rank 0 named store {number}, and the numbers of stores have 62 bits")
    return StoreClient(node.stores, number, group._engine.members[0])
