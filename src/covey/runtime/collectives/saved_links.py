"""Figures of links that outlast a measurement: those of earlier runs, from which a group plans before it has measured
itself, and those that the node tells commands that ask (`covey status --graph`).

Each machine keeps the figures of the links that end at it (`net.saved_figures`). At the first large sum of a group
every rank adds its own figures to a sum of disjoint rows, as in `link_probes`, so that all ranks hold the same bits,
and either all plan from them or none does. A rank has no figure of a link whose interface or addresses are others now.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from covey.base.errors import AuthError
from covey.base.numbers import FASTEST, SLOWEST
from covey.net.discovery.interfaces import all_interfaces
from covey.net.host.saved_figures import OLDEST_SECONDS, is_recent, keep_figures, read_figures
from covey.plan.measurement import steps
from covey.plan.network import Flow
from covey.runtime.collectives.link_probes import MeasuredLinks, both_ways
from covey.wire.reports import NETWORK_LIMIT, MeasuredNetwork, NetworkMember
from covey.wire.saved_figures import LONGEST_TRIP, SavedFigure
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.base.numbers import Rank
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.roster import GroupNode
    from covey.wire.signed import Endorsed

logger = logging.getLogger("covey")

CLUSTER_BYTES: Final = 16
SPEED, TRIP, AGE, FIELDS = 0, 1, 2, 3


class _End(NamedTuple):
    """A slot of the attempt, as later runs know it."""

    machine: bytes
    ordinal: int
    """Among the slots on its machine."""


class _LinkWay(NamedTuple):
    """How a link reaches another machine; empty for one that stays on this machine."""

    interface: str
    here: str
    there: str


class ToldNetwork(Protocol):
    """What the ranks have agreed on of the links between them (`planner.Planner`)."""

    network: Network | None

    def times(self) -> tuple[tuple[float, ...], ...]:
        """Return when the figures of each link were measured, or last seen to hold, by source and target."""


def recalled(attempt: Attempt) -> MeasuredLinks | None:
    """Return what earlier runs have measured; None, on all ranks alike, if a figure is missing or is none.

    A step of an operation: all ranks of the attempt call it.
    """
    size, rounds = attempt.size, steps(attempt.size)
    figures = np.zeros((size, len(rounds), FIELDS), np.float64)
    figures[attempt.slot] = _own_figures(attempt, rounds)
    flat = figures.reshape(-1)
    attempt.all_reduce(flat, "sum")
    figures = flat.reshape(figures.shape)
    if not np.isfinite(figures).all() or (figures < 0).any() or not (figures[:, :, SPEED] > 0).all():
        return None
    if (figures[:, :, AGE] > OLDEST_SECONDS).any():
        return None
    trips, ages = np.full((size, size), np.nan), np.full((size, size), np.nan)
    np.fill_diagonal(ages, 0.0)
    flows = []
    for at, step in enumerate(rounds):
        together = []
        for target in range(size):
            source = (target - step) % size
            together.append(Flow(source, target, min(FASTEST, max(SLOWEST, float(figures[target, at, SPEED])))))
            trips[target, source] = figures[target, at, TRIP]
            ages[source, target] = figures[target, at, AGE]
        flows.append(tuple(sorted(together)))
    oldest = float(np.nanmax(ages))
    ages = np.where(np.isnan(ages), oldest, ages)
    return MeasuredLinks(attempt.ranks, tuple(flows), both_ways(trips), time.time(), tuple(map(tuple, ages.tolist())))


def keep(attempt: Attempt, measured: MeasuredLinks) -> None:
    """Let this machine keep what this rank has received; it is written on another thread."""
    node, ends = attempt.roster.node, _ends(attempt)
    if node is None or ends is None:
        return
    mine, ways, cluster = ends[attempt.slot], _ways(attempt, node), _cluster(node)
    figures = []
    for flows in measured.rounds:
        for flow in flows:
            way = ways.get(attempt.ranks[flow.source])
            if flow.target == attempt.slot and way is not None:
                sender = ends[flow.source]
                trip = min(LONGEST_TRIP, max(0.0, measured.round_trips[attempt.slot][flow.source]))
                speed = min(FASTEST, max(SLOWEST, flow.bytes_per_second))
                made = SavedFigure(
                    cluster, sender.machine, sender.ordinal, mine.ordinal, *way, speed, trip, measured.at
                )
                figures.append(made)
    try:
        threading.Thread(
            target=keep_figures, args=(mine.machine, figures), name="covey-figures", daemon=True
        ).start()  # fmt: skip
    except RuntimeError as error:  # the system starts no more threads
        logger.warning("what was measured of links is not kept for the next run: %s", error)


def _own_figures(attempt: Attempt, rounds: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return this rank's row: what it has received in each round of a measurement; zeros for what is not known."""
    row = np.zeros((len(rounds), FIELDS), np.float64)
    node, ends = attempt.roster.node, _ends(attempt)
    if node is None or ends is None:
        return row
    mine, now, cluster = ends[attempt.slot], time.time(), _cluster(node)
    known = {
        (each.machine, each.sender, each.interface, each.here, each.there): each
        for each in read_figures(mine.machine)
        if each.cluster == cluster and each.receiver == mine.ordinal and is_recent(each, now)
    }
    ways = _ways(attempt, node) if known else {}
    for at, step in enumerate(rounds):
        source = (attempt.slot - step) % attempt.size
        way = ways.get(attempt.ranks[source])
        figure = None if way is None else known.get((*ends[source], *way))
        if figure is not None:
            row[at] = figure.bytes_per_second, figure.round_trip, max(0.0, now - figure.at)
    return row


def _ends(attempt: Attempt) -> list[_End] | None:
    """Return what later runs know the slots by; None if a node has no key, or names a machine that is not its own."""
    node, roster = attempt.roster.node, attempt.roster
    assert node is not None
    ends: list[_End] = []
    for rank in attempt.ranks:
        card: Endorsed = roster.card(rank)
        try:
            machine = machine_of(card)
        except AuthError:
            return None
        if not machine:
            return None
        ends.append(_End(machine, sum(1 for end in ends if end.machine == machine)))
    return ends


def _ways(attempt: Attempt, node: GroupNode) -> Mapping[Rank, _LinkWay]:
    """Return how this rank reaches each other one; none for a link through a relay, whose speed is the relay's."""
    names = {ip: each.name for each in all_interfaces() for ip in each.addresses}
    roster, ways = attempt.roster, {}
    for rank in attempt.ranks:
        peer = roster.peer(rank)
        if peer is None:
            continue
        if roster.host(rank) == node.peers.host:
            ways[rank] = _LinkWay("", "", "")
            continue
        link = peer.link
        if link is None or link.relay:
            continue
        here, there = (ip.partition("%")[0] for ip in (link.local_ip, link.remote_ip))
        if here in names:
            ways[rank] = _LinkWay(names[here].encode("ascii", "backslashreplace").decode(), here, there)
    return ways


def _cluster(node: GroupNode) -> bytes:
    import hashlib  # slow to load: it loads OpenSSL

    return hashlib.blake2b(node.cluster.encode(), digest_size=CLUSTER_BYTES).digest()


def tell(attempt: Attempt, planner: ToldNetwork, plan: str) -> None:
    """Let the node of this process tell a network that its ranks hold; the one of another group is replaced.

    A network of more than NETWORK_LIMIT ranks is not told.
    """
    node, network = attempt.roster.node, planner.network
    if node is None or network is None or len(attempt.ranks) > NETWORK_LIMIT:
        return
    times = planner.times()
    measured_at = oldest(times)
    members = []
    for slot, rank in enumerate(attempt.ranks):
        known = attempt.roster.card(rank)
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
    node.measured = measured_at, MeasuredNetwork(tuple(members), trunks, 0.0, node.card.name, "", plan)


def oldest(times: tuple[tuple[float, ...], ...]) -> float:
    """Return when the first of all figures was measured."""
    return min((at for i, row in enumerate(times) for j, at in enumerate(row) if i != j), default=0.0)


def _finite(speed: float) -> float:
    return speed if math.isfinite(speed) else 0.0
