"""Which links of a member stay awake: those with its neighbours in the overlay, and all of the leader.

The leader tells all members several times a second that it leads, and hears from them. So each member is heard by the
leader and by a few neighbours, and any of them notices when it is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto.overlay import Overlay
from covey.runtime.members.peers import PeerState

if TYPE_CHECKING:
    from covey.base.numbers import Seat
    from covey.runtime.members.generation import Generation
    from covey.runtime.members.node import Node


class AwakeLinks:
    """Tells which links of one node stay awake in its present view."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._view = (-1, -1)
        self._neighbours: frozenset[int] = frozenset()

    def includes(self, seat: Seat) -> bool:
        """Tell whether the link with a seat stays awake: always, while it is open which members the run has."""
        generation = self._node.generation
        if generation is None or generation.is_over or not generation.is_sparse or self._node.is_closing:
            return True
        ranks, rank, leader = generation.view.ranks, generation.rank_of(seat), generation.view_driver.leader()
        is_member = rank is not None and rank in ranks and generation.rank in ranks
        if not is_member or leader is None or leader in (rank, generation.rank):
            return True
        return self._node.peers[seat].state is not PeerState.ACTIVE or rank in self._near(generation)

    def _near(self, generation: Generation) -> frozenset[int]:
        if (number := (generation.number, generation.view.number)) != self._view:
            overlay = Overlay(generation.topology, len(generation.seats), generation.view.ranks)
            self._view, self._neighbours = number, overlay.neighbours(generation.rank)
        return self._neighbours
