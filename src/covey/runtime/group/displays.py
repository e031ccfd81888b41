"""What notebooks show of a group and of the network between its ranks. A snapshot, read without asking other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.html import Mark, Shade, table
from covey.base.text import spell_rate
from covey.runtime.group import members as known_members

if TYPE_CHECKING:
    from covey.base.html import Cell
    from covey.runtime.group.members import DescribedEngine
    from covey.runtime.group.topology import Topology

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
