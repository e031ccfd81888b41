"""What members say as they leave, passed on by the leader of the view. On the control loop.

A member says goodbye on the links that are awake. In a run of many nodes, most of its links rest; the leader, whose
links do not, tells the others before the view comes that goes on without the member. It decides nothing: it only makes
the others call the member one that left, or name the error of its program.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from covey.runtime.peers.remote_process import PeerEvent
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.base.numbers import Seat
    from covey.runtime.members.node import Node


class DeparturesTold:
    """Collects what members say while this node leads, and tells the other members."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._untold: set[Seat] = set()

    def heard(self, seat: Seat) -> None:
        """Note that a member said that it leaves or fails; tell the others soon, together with those that follow."""
        generation = self._node.generation
        if generation is None or not generation.is_sparse or generation.view_driver.leader() != generation.rank:
            return
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.add(seat)

    def _tell(self) -> None:
        seats, self._untold = sorted(self._untold), set()
        node, generation = self._node, self._node.generation
        if generation is None or node.is_closing:
            return
        peers = [node.peers[seat] for seat in seats]
        members = tuple(messages.Departure(peer.seat, peer.has_left, peer.failure) for peer in peers)
        for rank in generation.view.ranks:
            seat = generation.seats[rank]
            if seat != node.seat and seat not in seats:
                node.send(seat, messages.Departures(members))

    def told(self, members: Iterable[messages.Departure]) -> None:
        """Take what the leader passes on."""
        for said in members:
            peer = self._node.peers.get(said.seat)
            if peer is not None and not peer.is_excluded:
                peer.failure = peer.failure or said.reason
                if said.has_left:
                    peer.note(PeerEvent.SAID_GOODBYE)
