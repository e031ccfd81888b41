"""A key-value store for all ranks of a group, held by rank 0."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import Rank, Seat
from covey.runtime import loop as control
from covey.runtime.group.internals import node_of, seat_of
from covey.runtime.members.store import StoreClient, Stores

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


OPEN_SECONDS: Final = 60.0
"""How long the control loop may take to make a store; it takes far less, unless the machine is suspended."""


def open_group_store(group: Group, timeout: float | None = None) -> StoreClient:
    """Make a store on rank 0, and return this rank's client of it. Every rank of the group calls this."""
    node = node_of(group)
    number = secrets.randbits(62)
    if node is None:
        alone = Stores(None)
        alone.keep(number)
        return StoreClient(alone, number, Seat(0))
    if group.rank == 0:  # before any rank hears of it: the loop may be about to read what another rank asks
        control.run(_keep(node.stores, number), OPEN_SECONDS)
    number = group.broadcast_object(number, type=int, timeout=timeout)
    if not 0 <= number < 1 << 62:
        raise RemoteProtocolError(f"rank 0 sent the store number {number}, which is not within 62 bits")
    return StoreClient(node.stores, number, seat_of(group, Rank(0)))


async def _keep(stores: Stores, number: int) -> None:
    stores.keep(number)
