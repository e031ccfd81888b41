"""Relays for a rank that a launcher started. On the control loop.

Ranks are dialled by number, so a rank hears of no others at a relay: rank 0 has a token that all ranks derive, and its
roster has those of the others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from covey.proto.relay_trips import is_news
from covey.runtime import loop as control
from covey.runtime.peers.endpoint import TOKEN_BYTES
from covey.runtime.peers.relays import Relays
from covey.wire import messages

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.link import Link
    from covey.runtime.members.node import Node
    from covey.runtime.peers.remote_process import RemoteProcess

TELL_SECONDS: Final = 2.0
"""How often other ranks are told how far the relays are, if that has changed."""


def first_token(cluster: Cluster, run: str) -> bytes:
    """Return the token of rank 0 of a launcher's run: the only rank that others must find without being told."""
    return cluster.secret.derive(f"relayed-launch/{run}")[:TOKEN_BYTES]


def use_relays(node: Node, cluster: Cluster) -> None:
    """Have a node of a launcher register with the cluster's relays, and reach other ranks through them. Any thread."""
    made = _LaunchedRelays(node, cluster)
    control.soon(made.open)


class _LaunchedRelays:
    """The relays of one node."""

    def __init__(self, node: Node, cluster: Cluster) -> None:
        token = node.card.contact.relay
        self._node = node
        self._relays = Relays(
            cluster, token, node.acceptor, found=lambda _token: None, spawn=node.spawn, is_listed=False
        )
        self._told: dict[Link, tuple[messages.RelayTrip, ...]] = {}
        """By link: what was told on it."""
        node.relayed_ways, node.relayed_trip = self._relays.ways, self._relays.round_trip
        node.on_relay_trips = self._heard

    def open(self) -> None:
        """Register, and keep other ranks informed."""
        if not self._node.is_closing:
            self._relays.open()
            self._node.spawn(self._keep_telling())

    def _heard(self, peer: RemoteProcess, trips: tuple[messages.RelayTrip, ...]) -> None:
        if peer.contact is not None:
            self._relays.told(peer.contact.relay, trips)

    async def _keep_telling(self) -> None:
        while True:
            trips, told = self._relays.trips(), {}
            for peer in self._node.peers.values():
                if peer.link is not None and peer.link.relay:
                    before = self._told.get(peer.link)
                    is_due = before is None or is_news(before, trips)
                    told[peer.link] = trips if is_due or before is None else before
                    if is_due:
                        self._node.send(peer.seat, messages.RelayTrips(trips))
            self._told = told
            await asyncio.sleep(TELL_SECONDS)
