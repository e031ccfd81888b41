"""What a group has measured and chosen, left with the node for commands that ask (`covey status --graph`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from covey.wire.network import NETWORK_LIMIT, MeasuredNetwork, NetworkMember

if TYPE_CHECKING:
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.members.peers import Peer
    from covey.wire.messages import Card


def tell(attempt: Attempt, network: Network, measured_at: float, plan: str) -> None:
    """Let the node of this process tell a network that its ranks hold; the one of another group is replaced.

    A network of more than NETWORK_LIMIT ranks is not told.
    """
    engine = attempt.engine
    if engine.node is None or len(attempt.ranks) > NETWORK_LIMIT:
        return
    members = []
    for slot, rank in enumerate(attempt.ranks):
        known: Peer | Card = engine.roster.peer(rank) or engine.node.card
        members.append(
            NetworkMember(
                known.id,
                known.name,
                known.host_name,
                network.hosts[slot],
                network.sites[slot],
                _finite(network.up[slot]),
                _finite(network.down[slot]),
                tuple(map(_finite, network.rates[slot])),
                network.round_trips[slot],
            )
        )
    trunks = tuple(tuple(map(_finite, row)) for row in network.trunks)
    engine.node.measured = measured_at, MeasuredNetwork(tuple(members), trunks, 0.0, engine.node.card.name, "", plan)


def _finite(speed: float) -> float:
    return speed if math.isfinite(speed) else 0.0
