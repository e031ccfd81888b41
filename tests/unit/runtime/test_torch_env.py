"""What torch is told about a group: where its rank 0 is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from covey.base.numbers import Seat
from covey.runtime.collectives.roster import GroupRoster
from covey.runtime.joining.torch_env import address_of_first
from covey.runtime.peers.peer_table import PeerTable
from covey.runtime.peers.remote_process import RemoteProcess
from covey.wire.messages import Address, Card, Contact


def contact(host: int) -> Contact:
    return Contact(f"host{host}", (Address(f"10.0.0.{host}", 1000),), "")


def card(seat: int) -> Card:
    return Card(b"", b"", "", "", 0, contact(seat))


def group_of(seats: tuple[int, ...], own: int, known: tuple[int, ...]) -> Any:
    """Return the group of the processes in `seats`, each on a host of its own, in seat `own`, which knows `known`."""
    peers = {Seat(seat): RemoteProcess(card(seat), seat=Seat(seat), is_dialled=True) for seat in known if seat != own}
    for seat, peer in peers.items():
        peer.way = (f"10.0.0.{seat}", 1000)
    table = PeerTable(Seat(own), peers, f"host{own}")
    node: Any = SimpleNamespace(peers=table, card=SimpleNamespace(contact=contact(own)))
    roster = GroupRoster(node, tuple(map(Seat, seats)))
    return SimpleNamespace(rank=roster.rank, _engine=SimpleNamespace(node=node, roster=roster))


@pytest.mark.parametrize(
    ("seats", "own", "known"),
    [
        ((1, 2, 3), 1, (0, 1, 2, 3)),  # the process in seat 0 was lost, and this one is rank 0 now
        ((1, 2, 3), 2, (0, 1, 2, 3)),
        ((1, 2, 3), 3, (1, 2, 3)),  # a newcomer, which never knew the process in seat 0
    ],
    ids=["the new rank 0", "another rank", "a newcomer"],
)
def test_torch_meets_at_rank_0_of_the_generation_after_the_first_process_was_lost(
    seats: tuple[int, ...], own: int, known: tuple[int, ...]
) -> None:
    assert address_of_first(group_of(seats, own, known)) == "10.0.0.1"
