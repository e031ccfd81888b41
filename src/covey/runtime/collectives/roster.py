"""The ranks of one group: the seat, host and process of each, and how error messages name them."""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING, cast

from covey.base.numbers import Rank
from covey.net.host.machine import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.base.numbers import Seat
    from covey.net.lanes.lane import LanePath
    from covey.runtime.members.node import Node
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire import messages


class LaneKinds(dict[int, str]):
    """The kind of lane to each other rank, by rank."""

    executor = "Python"
    """What moves the data: "compiled", or "Python". `covey --version` says why."""
    paths: Mapping[int, tuple[LanePath, ...]] = types.MappingProxyType({})
    """By rank: the networks of a lane that goes over several, with the share of each; empty for other lanes."""
    streams: Mapping[int, int] = types.MappingProxyType({})
    """By rank: how many connections an open lane has; 0 if none is open, or if it shares memory."""


class GroupRoster:
    """The ranks of one group. It is fixed when the group is made; lost ranks stay in it."""

    def __init__(self, node: Node | None, seats: tuple[Seat, ...]) -> None:
        """`seats` are positions in the run, in the order of the group's ranks. A run of one has no node."""
        self.node = node
        """None in a run of one, and in a process that was forked from a member."""
        self.seats = seats
        self.size = len(seats)
        self.ranks = cast("Sequence[Rank]", range(self.size))
        self.rank = Rank(seats.index(node.seat) if node is not None else 0)
        """The rank of this process."""
        self.rank_of = dict(zip(seats, self.ranks, strict=True))

    def others(self) -> list[Seat]:
        """Return the seats of the other ranks."""
        return [] if self.node is None else [seat for seat in self.seats if seat != self.node.seat]

    def peers(self) -> list[RemoteProcess]:
        """Return the peers that are the other ranks."""
        return [] if self.node is None else [self.node.peers[seat] for seat in self.others()]

    def peer(self, rank: Rank) -> RemoteProcess | None:
        """Return the peer that is a rank; None for this process itself."""
        return None if self.node is None else self.node.peers.get(self.seats[rank])

    def present(self) -> tuple[Rank, ...]:
        """Return the ranks whose processes have neither left nor been lost."""
        return tuple(rank for rank in self.ranks if (peer := self.peer(rank)) is None or not peer.is_gone)

    def tell_others(self, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a control message to all other ranks. Returns at once.

        Unless it `wakes` all links that rest, of those it is sent only over the ones with the rank before and the rank
        after this one: so what each rank hears still connects all ranks of the group.
        """
        if self.node is None:
            return
        beside: set[Seat] = set()
        if not wakes:
            present = self.present()
            index = present.index(self.rank)
            beside = {self.seats[present[(index + step) % len(present)]] for step in (1, -1)} - {self.node.seat}
            self.node.tell(beside, message)
        self.node.tell([seat for seat in self.others() if seat not in beside], message, wakes=wakes)

    def describe(self, ranks: tuple[Rank, ...]) -> str:
        """Return the ranks with their hosts and process ids, as error messages name them."""
        if self.node is None:
            return ""
        names = []
        for rank in ranks:
            peer = self.peer(rank)
            names.append(
                f"rank {rank}" + (f" ({peer.card.host_name}, process {peer.card.pid})" if peer is not None else "")
            )
        return " and ".join(names)

    def card(self, rank: Rank) -> messages.Card:
        """Return the card of a rank's process, which may be this one."""
        assert self.node is not None
        peer = self.peer(rank)
        return self.node.card if peer is None else peer.card

    def host_name(self, rank: Rank) -> str:
        """Return the name of a rank's host; that of this host for a number that is no other rank's."""
        if self.node is None or rank not in self.ranks or rank == self.rank:
            return self.node.card.host_name if self.node is not None else ""
        return str(self.node.peers[self.seats[rank]].card.host_name)

    def host(self, rank: Rank) -> str:
        """Return what is equal for ranks that can share memory."""
        if self.node is None:
            return ""
        peer = self.peer(rank)
        contact = self.node.card.contact if peer is None else peer.contact
        return "" if contact is None else contact.host

    def pid(self, rank: Rank) -> int:
        """Return the process id of a rank."""
        peer = self.peer(rank)
        return os.getpid() if peer is None else peer.card.pid

    def lane_kind(self, rank: Rank) -> str:
        """Return the kind of lane that this end offers to a rank."""
        assert self.node is not None
        return self.node.lanes.kind(self.seats[rank])

    def shares_memory(self, rank: Rank) -> bool:
        """Tell whether a rank shares memory with this one; equal on all ranks, as plans need it."""
        assert self.node is not None
        return self.node.lanes.shares_memory(self.seats[rank])

    def has_cores(self, each: int) -> bool:
        """Tell whether every rank on this host can have so many cores for itself.

        With one, waiting ranks may spin; with two, a helper thread may encrypt.
        """
        host = self.node.host if self.node is not None else ""
        here = 1 + sum(1 for peer in self.peers() if peer.contact is not None and peer.contact.host == host)
        return here * each <= usable_cores()
