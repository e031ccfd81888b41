"""Relays for a rank that a launcher started. On the control loop.

Ranks are dialled by number, so a rank hears of no others at a relay: rank 0 has a token that all ranks derive, and its
roster has those of the others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from covey.proto.relay_trips import is_news
from covey.runtime.peers.endpoint import TOKEN_BYTES
from covey.runtime.peers.relays import Relays
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.numbers import Seat
    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.link import Link
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.tasks import Tasks

TELL_SECONDS: Final = 2.0
"""How often other ranks are told how far the relays are, if that has changed."""


def first_token(cluster: Cluster, run: str) -> bytes:
    """Return the token of rank 0 of a launcher's run: the only rank that others must find without being told."""
    return cluster.secret.derive(f"relayed-launch/{run}")[:TOKEN_BYTES]


class LaunchedRelays:
    """The relays of one rank, through which it reaches ranks that it cannot connect with."""

    def __init__(
        self, cluster: Cluster, card: messages.Card, acceptor: Acceptor, peers: PeerTable, tasks: Tasks
    ) -> None:
        """`card` is that of this rank, and `tasks` are those of its run."""
        self._peers, self._tasks = peers, tasks
        self._relays = Relays(
            cluster, card.contact.relay, acceptor, found=lambda _token: None, spawn=tasks.spawn, is_listed=False
        )
        self.ways, self.round_trip = self._relays.ways, self._relays.round_trip
        self._told: dict[Link, tuple[messages.RelayTrip, ...]] = {}
        """By link: what was told on it."""

    def open(self) -> None:
        """Register, and keep other ranks informed."""
        if not self._tasks.is_closing:
            self._relays.open()
            self._tasks.spawn(self._keep_telling())

    def heard(self, seat: Seat, told: messages.RelayTrips) -> None:
        """Take from a rank how far its relays are."""
        contact = self._peers[seat].contact
        if contact is not None:
            self._relays.told(contact.relay, told.trips)

    async def _keep_telling(self) -> None:
        while True:
            trips, told = self._relays.trips(), {}
            for peer in self._peers.values():
                if peer.link is not None and peer.link.relay:
                    before = self._told.get(peer.link)
                    is_due = before is None or is_news(before, trips)
                    told[peer.link] = trips if is_due or before is None else before
                    if is_due:
                        peer.send(messages.RelayTrips(trips))
            self._told = told
            await asyncio.sleep(TELL_SECONDS)
