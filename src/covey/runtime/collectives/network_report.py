"""What a group has measured and chosen, left with the node for commands that ask (`covey status --graph`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from covey.wire.reports import NETWORK_LIMIT, MeasuredNetwork, NetworkMember

if TYPE_CHECKING:
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.planner import Planner, Times


def tell(attempt: Attempt, planner: Planner, plan: str) -> None:
    """Let the node of this process tell a network that its ranks hold; the one of another group is replaced.

    A network of more than NETWORK_LIMIT ranks is not told.
    """
    engine, network = attempt.engine, planner.network
    if engine.node is None or network is None or len(attempt.ranks) > NETWORK_LIMIT:
        return
    times = planner.times()
    measured_at = oldest(times)
    members = []
    for slot, rank in enumerate(attempt.ranks):
        known = engine.roster.card(rank)
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
                tuple(measured_at - at for at in times[slot]),
            )
        )
    trunks = tuple(tuple(map(_finite, row)) for row in network.trunks)
    engine.node.measured = measured_at, MeasuredNetwork(tuple(members), trunks, 0.0, engine.node.card.name, "", plan)


def oldest(times: Times) -> float:
    """Return when the first of all figures was measured."""
    return min((at for i, row in enumerate(times) for j, at in enumerate(row) if i != j), default=0.0)


def _finite(speed: float) -> float:
    return speed if math.isfinite(speed) else 0.0
