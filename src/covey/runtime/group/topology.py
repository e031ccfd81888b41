"""The network between the members of a group, as a graph: from what the ranks have measured together, if they have.

A snapshot, read without asking other nodes.

And what notebooks show of it, and of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.html import Mark, Shade, table
from covey.base.text import spell_rate
from covey.runtime.collectives.saved_links import oldest
from covey.runtime.group import members as known_members

if TYPE_CHECKING:
    from covey.base.html import Cell
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt, AttemptPlanner
    from covey.runtime.group.members import DescribedEngine

ROWS_SHOWN: Final = 64
"""Ranks, or machines, in one table."""
PAIRS_SHOWN: Final = 12
"""Up to so many ranks the speed of every pair is shown."""
_STATE_MARKS: Final = {"active": "good", "suspected": "warn", "leaving": "busy", "left": "off"}


def group_html(engine: DescribedEngine, *, is_over: bool) -> str:
    """Return the members of a group, with their health, and how this rank reaches them."""
    roster = engine.roster
    title = f"Group {engine.facts.name!r}: rank {roster.rank} of {roster.size}"
    if is_over:
        return table(f"{title}, closed", (), ())
    names = {rank: host for host, ranks in known_members.hosts(engine, tuple(roster.ranks)).items() for rank in ranks}
    links = {link.rank: link for link in known_members.links(engine)} if roster.node is not None else {}
    health = known_members.health(engine)
    rows = []
    for member in known_members.members(engine)[:ROWS_SHOWN]:
        state, link = health[member.rank], links.get(member.rank)
        trip = "" if link is None or link.round_trip is None else f"{link.round_trip * 1e3:.1f} ms"
        rows.append(
            (
                f"{member.rank}{' (this one)' if member.rank == roster.rank else ''}",
                names.get(member.rank, member.host),
                Mark(f"{state.state}: {state.why}" if state.why else state.state, _STATE_MARKS.get(state.state, "bad")),
                "" if link is None else link.lane,
                trip,
                str(member.cores or ""),
                ", ".join(member.accelerators),
            )
        )
    left_out = len(roster.ranks) - len(rows)
    columns = ("rank", "machine", "state", "lane", "round trip", "cores", "accelerators")
    return table(title, columns, rows, f"and {left_out} more ranks" if left_out > 0 else "")


def topology_html(shown: Topology) -> str:
    """Return machines with what they send and receive, and, of few ranks, the speed between each two."""
    rows = [
        (str(host.site), host.name, ", ".join(map(str, host.ranks)), spell_rate(host.up), spell_rate(host.down))
        for host in shown.hosts[:ROWS_SHOWN]
    ]
    between = "; ".join(
        f"site {one} to site {other}: {spell_rate(rate)}" for (one, other), rate in shown.between_sites.items()
    )
    when = "" if shown.measured_at is not None else "The ranks have not measured the links together yet."
    made = table("Machines", ("site", "machine", "ranks", "sends", "receives"), rows, between or when)
    ranks = [node.rank for node in shown.nodes]
    rates = {(link.source, link.target): link.bytes_per_second for link in shown.links}
    known = [rate for rate in rates.values() if rate is not None]
    if not known or len(ranks) > PAIRS_SHOWN:
        return made
    most = max(known)
    pairs = [(f"from {one}", *(_speed(rates.get((one, other)), most) for other in ranks)) for one in ranks]
    return made + table("Speed between ranks", ("", *(f"to {rank}" for rank in ranks)), pairs)


def _speed(rate: float | None, most: float) -> Cell:
    return "" if rate is None else Shade(spell_rate(rate), rate / most if most else 0.0)


@dataclass(frozen=True)
class TopologyNode:
    """A live member of the group."""

    rank: int
    name: str
    host: str
    """The name of its machine, as in `Node.hosts`."""
    site: int
    """Members with equal numbers are near each other. 0 for all before the links are measured."""


@dataclass(frozen=True)
class TopologyHost:
    """A machine."""

    name: str
    ranks: tuple[int, ...]
    site: int
    up: float | None
    """Bytes per second that it can send to other machines in all; None if that is not known."""
    down: float | None
    """The same for what it receives."""


@dataclass(frozen=True)
class TopologyLink:
    """The way from one member to another."""

    source: int
    target: int
    medium: str
    """`wired`, `wireless`, `virtual` or `local`; `unknown` if this node is at neither end."""
    bytes_per_second: float | None
    """What one member can send to the other; None if that is not known."""
    round_trip: float | None
    """Seconds; None if it is not known."""
    measured_at: float | None = None
    """When these figures were measured, perhaps in an earlier run, or last seen to hold, in seconds since 1970. None:
    the ranks have not measured together."""


@dataclass(frozen=True)
class Topology:
    """The members of a group, their machines and sites, and the links between them."""

    nodes: tuple[TopologyNode, ...]
    hosts: tuple[TopologyHost, ...]
    sites: tuple[tuple[int, ...], ...]
    """The ranks of each site. Links between sites are shared by all their members."""
    links: tuple[TopologyLink, ...]
    between_sites: dict[tuple[int, int], float]
    """Bytes per second that all members of one site together can send to another one."""
    measured_at: float | None
    """When the ranks measured the links together, perhaps in an earlier run, in seconds since 1970: the oldest figure
    of all. None: they have not, and the links are those that this node has used itself."""
    is_earlier: bool = False
    """Whether the figures are those of earlier runs: the ranks have not measured in this one."""

    def __str__(self) -> str:
        lines = []
        for number, ranks in enumerate(self.sites):
            here = [host for host in self.hosts if host.site == number]
            lines.append(f"site {number}: {_counted(len(ranks), 'rank')} on {_counted(len(here), 'machine')}")
            for host in here:
                both = f"sends {spell_rate(host.up)}, receives {spell_rate(host.down)}"
                lines.append(f"  {host.name}: rank {', '.join(map(str, host.ranks))}; {both}")
        for (one, other), rate in self.between_sites.items():
            lines.append(f"site {one} to site {other}: {spell_rate(rate)}")
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from covey.runtime.group.topology import topology_html  # only notebooks ask

        return topology_html(self)


def topology(engine: DescribedEngine) -> Topology:
    """Return the network between the live members of a group."""
    attempt = engine.attempt
    planner = attempt.planner
    network = None if planner is None else planner.network
    if planner is None or network is None:
        return _as_seen(engine)
    return _as_agreed(engine, attempt, network, planner)


def _as_agreed(engine: DescribedEngine, attempt: Attempt, network: Network, planner: AttemptPlanner) -> Topology:
    times = planner.times()
    known = known_members.members(engine)
    by_host = known_members.hosts(engine, attempt.ranks)
    slots, ranks = range(attempt.size), attempt.ranks
    sites: dict[int, list[int]] = {}
    for slot in slots:
        sites.setdefault(network.sites[slot], []).append(ranks[slot])
    hosts = []
    for name, here in by_host.items():
        slot = attempt.slot_of(engine.roster.ranks[here[0]])
        up, down = (value if math.isfinite(value) else None for value in (network.up[slot], network.down[slot]))
        hosts.append(TopologyHost(name, here, network.sites[slot], up, down))
    own = {link.rank: link.medium for link in known_members.links(engine)}
    links = tuple(
        TopologyLink(
            ranks[i],
            ranks[j],
            _medium(engine, own, ranks[i], ranks[j]),
            network.rates[i][j],
            network.round_trips[i][j],
            times[i][j],
        )
        for i in slots
        for j in slots
        if i != j
    )
    between = {
        (a, b): rate for a, row in enumerate(network.trunks) for b, rate in enumerate(row) if a != b
    }  # fmt: skip
    names = _by_rank(by_host)
    nodes = tuple(
        TopologyNode(rank, known[rank].name, names[rank], network.sites[slot]) for slot, rank in enumerate(ranks)
    )
    by_site = tuple(map(tuple, sites.values()))
    return Topology(nodes, tuple(hosts), by_site, links, between, oldest(times), planner.is_earlier)


def _as_seen(engine: DescribedEngine) -> Topology:
    """Return what this node knows by itself: all members at one site, and its own links."""
    known, live = known_members.members(engine), engine.live
    by_host = known_members.hosts(engine, live)
    names = _by_rank(by_host)
    nodes = tuple(TopologyNode(rank, known[rank].name, names[rank], 0) for rank in live)
    hosts = tuple(TopologyHost(name, ranks, 0, None, None) for name, ranks in by_host.items())
    links = tuple(
        TopologyLink(engine.roster.rank, link.rank, link.medium, link.bytes_per_second, link.round_trip)
        for link in (known_members.links(engine) if engine.roster.node is not None else ())
    )
    return Topology(nodes, hosts, (live,), links, {}, None)


def _by_rank(by_host: dict[str, tuple[int, ...]]) -> dict[int, str]:
    return {rank: name for name, ranks in by_host.items() for rank in ranks}


def _medium(engine: DescribedEngine, own: dict[int, str], one: int, other: int) -> str:
    if engine.roster.rank in (one, other):
        return own.get(other if one == engine.roster.rank else one, "unknown")
    roster = engine.roster
    return "local" if roster.host(engine.roster.ranks[one]) == roster.host(engine.roster.ranks[other]) else "unknown"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
