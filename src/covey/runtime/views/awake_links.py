"""Which links of a member stay awake: those with its neighbours in the overlay, and all of the leader.

The leader tells all members several times a second that it leads, and hears from them. So each member is heard by the
leader and by a few neighbours, and any of them notices when it is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto.overlay import Overlay
from covey.runtime.peers.remote_process import PeerState

if TYPE_CHECKING:
    from covey.base.numbers import Seat
    from covey.runtime.members.node import Node
    from covey.runtime.views.generation import Generation


class AwakeLinks:
    """Tells which links of one node stay awake in its present view."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._view = (-1, -1)
        self._ranks: frozenset[int] = frozenset()
        self._neighbours: frozenset[int] = frozenset()

    def wants(self, seat: Seat) -> bool:
        """Tell whether the link with a seat is to be awake, and to be woken if it rests.

        So is that of a node which is no member any more: if the node lives, it has to learn that; if not, the link
        ends, and a later life of the node gets one.
        """
        generation = self._generation()
        if generation is None or not generation.is_sparse:
            return generation is not None
        return not self._are_members(generation, seat) or self._are_near(generation, seat)

    def may_rest(self, seat: Seat) -> bool:
        """Tell whether the link with a seat may rest: not while it is open which members there are, or which leads."""
        generation = self._generation()
        if generation is None or not generation.is_sparse or not self._are_members(generation, seat):
            return False
        is_calm = generation.view_driver.leader() is not None and self._node.peers[seat].state is PeerState.ACTIVE
        return is_calm and not self._are_near(generation, seat)

    def _generation(self) -> Generation | None:
        """Return the generation that this node is in, with its members and neighbours noted."""
        generation = self._node.generation
        if generation is None or generation.is_over or self._node.is_closing:
            return None
        if (number := (generation.number, generation.view.number)) != self._view:
            self._view, self._ranks, self._neighbours = number, frozenset(generation.view.ranks), frozenset()
            if generation.is_sparse and generation.rank in self._ranks:
                overlay = Overlay(generation.topology, len(generation.seats), self._ranks)
                self._neighbours = overlay.neighbours(generation.rank)
        return generation

    def _are_members(self, generation: Generation, seat: Seat) -> bool:
        """Tell whether this node and that of a seat are in the view."""
        return generation.rank in self._ranks and generation.rank_of(seat) in self._ranks

    def _are_near(self, generation: Generation, seat: Seat) -> bool:
        """Tell whether the node of a seat is a neighbour, or one of the two leads."""
        rank, leader = generation.rank_of(seat), generation.view_driver.leader()
        return rank in self._neighbours or leader in (rank, generation.rank)
