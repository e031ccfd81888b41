"""What the nodes of runs have measured of the links between them: asked for, and put together."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.plan.network import Network
from covey.runtime.metrics.inspection import NETWORK
from covey.wire import messages
from covey.wire.reports import decode_network

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.base.errors import CoveyError
    from covey.runtime.peers.visit import Visit
    from covey.wire.reports import MeasuredNetwork


@dataclass(frozen=True)
class NetworkHost:
    """A machine of a run."""

    name: str
    site: int
    ranks: tuple[int, ...]
    """Positions of its members in the network."""
    up: float
    down: float
    """Bytes per second, to and from other machines."""
    medium: str
    """`wired`, `wireless`, `virtual`; `unknown` if its nodes did not answer."""
    age: float = 0.0
    """Seconds since the oldest figure of its links was measured, or seen to hold."""


@dataclass(frozen=True)
class RunNetwork:
    """The links of a run."""

    network: Network
    hosts: tuple[NetworkHost, ...]
    age: float
    """Seconds since the links were measured."""
    plan: str


def combined(told: Iterable[MeasuredNetwork]) -> RunNetwork | None:
    """Return the network that was measured last, with the mediums that all nodes tell; None if there is none.

    Nodes may tell anything: a network whose parts do not fit together is left out.
    """
    whole = [(each, network) for each in told if (network := _network(each)) is not None]
    if not whole:
        return None
    latest, network = min(whole, key=lambda each: (-len(each[0].members), each[0].age))
    mediums = {}
    for each, _ in whole:
        if each.medium != "unknown":
            mediums[each.sender] = each.medium
    hosts: dict[int, list[int]] = {}
    for slot, host in enumerate(network.hosts):
        hosts.setdefault(host, []).append(slot)
    names = [latest.members[slots[0]].host_name for slots in hosts.values()]
    found = []
    for at, slots in enumerate(hosts.values()):
        first = slots[0]
        same = names[:at].count(names[at])
        found.append(
            NetworkHost(
                f"{names[at]}#{same + 1}" if same else names[at],
                network.sites[first],
                tuple(slots),
                network.up[first],
                network.down[first],
                next((mediums[key] for slot in slots if (key := latest.members[slot].name) in mediums), "unknown"),
                _age(latest, slots),
            )
        )
    return RunNetwork(network, tuple(found), latest.age, latest.plan)


def _network(told: MeasuredNetwork) -> Network | None:
    """Return what a node tells as a network, or None if it is none."""
    members = told.members
    size, sites = len(members), {each.site for each in members}
    if size < 2 or sites != set(range(len(told.trunks))) or any(len(row) != len(sites) for row in told.trunks):
        return None
    if any(len(row) != size for each in members for row in (each.rates, each.round_trips, each.ages or each.rates)):
        return None
    return Network(
        tuple(each.host for each in members),
        tuple(tuple(map(_known, each.rates)) for each in members),
        tuple(_known(each.up) for each in members),
        tuple(_known(each.down) for each in members),
        tuple(tuple(max(0.0, trip) for trip in each.round_trips) for each in members),
        tuple(each.site for each in members),
        tuple(tuple(map(_known, row)) for row in told.trunks),
    )


def _age(told: MeasuredNetwork, slots: list[int]) -> float:
    """Return the age of the oldest figure of links between members of one machine and others."""
    members = told.members
    ends = [(i, j) for i in slots for j in range(len(members)) if j not in slots]
    more = [members[a].ages[b] for i, j in ends for a, b in ((i, j), (j, i)) if members[a].ages]
    return max(0.0, told.age + max(more, default=0.0))


def _known(speed: float) -> float:
    return speed if speed > 0 else math.inf


def measured_networks(
    visit: Visit, cards: Sequence[messages.Card], stories: Sequence[messages.Answer | CoveyError], within: float
) -> dict[str, RunNetwork | None]:
    """Return what the nodes of each run have measured; `stories` are their answers to Ask."""
    runs = {
        card.id: (card, tell.run)
        for card, tell in zip(cards, stories, strict=True)
        if isinstance(tell, messages.Tell) and tell.state == "running"
    }
    told: dict[str, list[MeasuredNetwork]] = {run: [] for run in sorted({run for _, run in runs.values()})}
    asked = [card for card, _ in runs.values()]
    for card, answer in zip(asked, visit.ask_all(asked, messages.Inspect(NETWORK), within), strict=True):
        if isinstance(answer, messages.Inspected) and answer.what == NETWORK and answer.pages:
            with contextlib.suppress(RemoteProtocolError):
                told[runs[card.id][1]].append(decode_network(answer.body))
    return {run: combined(each) for run, each in told.items()}
