"""The picture of a cluster as people see it: a table of nodes for each run, and one of the ways between them."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from covey.cli.status.picture import Node, Picture, Run, Way

MOST_IN_TABLE: Final = 6
"""Nodes of a run whose ways to each other are shown one by one."""
MOST_REASONS: Final = 8
"""Lines about what a run waits for; `covey doctor` tells more."""
CLOCK_SECONDS: Final = 1.0
"""A clock that is off by more than this is worth a word."""


def view(picture: Picture) -> RenderableType:
    """Return the whole picture, to be printed by rich."""
    parts: list[RenderableType] = []
    for run in picture.runs:
        parts += [_headline(picture.cluster, run), *_waits(run), _nodes(run)]
        if ways := _ways(run):
            parts += [Text(), ways]
        parts.append(Text())
    parts += [Text(f"{problem}", style="yellow") for problem in picture.silent]
    parts += [Text(f"not taken: {who}: {why}", style="yellow") for who, why in sorted(picture.refused.items())]
    if not picture.is_empty and isinstance(parts[-1], Text) and not parts[-1].plain:
        parts.pop()
    return Group(*parts)


def nobody(cluster: str) -> str:
    """Return what to say if nobody was found."""
    return f"no node of cluster {cluster!r} is running or answering; `covey doctor` looks for reasons"


def _headline(cluster: str, run: Run) -> Text:
    count = f"{len(run.nodes)} node{'s' * (len(run.nodes) != 1)}"
    line = Text.assemble("run ", (run.name, "bold"), f" in {cluster}: ", (run.state, _style(run.state)))
    return line.append(f" for {duration(run.since)}, {count}")


def _waits(run: Run) -> list[RenderableType]:
    """Return what a run waits for, one thing a line."""
    lines = (f"  waits: {line}" if number == 0 else f"  {line}" for number, line in enumerate(run.waits))
    return [Text(line, style="yellow") for line in itertools.islice(lines, MOST_REASONS)]


def _nodes(run: Run) -> Table:
    columns: dict[str, list[str]] = {
        "rank": ["" if node.rank is None else str(node.rank) for node in run.nodes],
        "node": [node.name for node in run.nodes],
        "id": [node.short_id for node in run.nodes],
        "host": [node.host for node in run.nodes],
        "pid": [str(node.pid) for node in run.nodes],
        "address": [f"{node.address} {node.interface}" for node in run.nodes],
        "covey": [node.version for node in run.nodes],
    }
    if all(node.name.startswith(f"{node.host}-") for node in run.nodes):
        del columns["host"]  # a node is mostly called after it
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name == "rank" else "left", no_wrap=name != "node", overflow="fold")
    table.add_column("", overflow="fold")
    for node, *facts in zip(run.nodes, *columns.values(), strict=True):
        table.add_row(*map(Text, facts), _notes(node, run))
    return table


def _notes(node: Node, run: Run) -> Text:
    notes = [("leader", "bold")] * node.is_leader + [("tie-breaker", "bold")] * node.is_tie_breaker
    if node.state != run.state:
        notes.append((node.state, _style(node.state)))
    if node.clock_offset is not None and abs(node.clock_offset) > CLOCK_SECONDS:
        notes.append((f"clock {node.clock_offset:+.1f} s", "yellow"))
    return Text(", ").join(Text(note, style) for note, style in notes)


def _ways(run: Run) -> RenderableType | None:
    """Return how the nodes reach each other: one by one, or of many the kinds and times."""
    told = [node for node in run.nodes if node.peers]
    if not told:
        return None
    return _summary(told) if len(run.nodes) > MOST_IN_TABLE else _matrix(run.nodes, told)


def _matrix(nodes: tuple[Node, ...], told: list[Node]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("from", overflow="fold")
    for node in nodes:
        table.add_column(Text(f"to {_label(node)}"), overflow="fold")
    for node in told:
        ways = {way.id: way for way in node.peers}
        cells = (_cell(ways[other.id]) if other.id in ways else "" for other in nodes)
        table.add_row(*map(Text, (_label(node), *cells)))
    return table


def _summary(told: list[Node]) -> Text:
    ways = sorted(((way.lane, node, way) for node in told for way in node.peers), key=lambda each: each[0])
    lines = []
    for lane, group in itertools.groupby(ways, key=lambda each: each[0]):
        members = [(node, way) for _, node, way in group]
        times = [(way.round_trip, node, way) for node, way in members if way.round_trip is not None]
        line = f"{lane or 'no lane yet'}: {len(members)} ways"
        if times:
            longest, source, way = max(times, key=lambda each: each[0])
            target = next((node for node in told if node.id == way.id), None)
            between = f" ({_label(source)} to {_label(target)})" if target is not None else ""
            middle = statistics.median(time for time, *_ in times)
            line += f", round trip {milliseconds(middle)} (median), at most {milliseconds(longest)}{between}"
        lines.append(line)
    return Text("\n".join(lines))


def _label(node: Node) -> str:
    return node.name if node.rank is None else f"{node.rank}"


def _cell(way: Way) -> str:
    return " ".join(filter(None, (way.lane, milliseconds(way.round_trip) if way.round_trip is not None else "")))


def _style(state: str) -> str:
    return {"running": "green", "joining": "cyan"}.get(state, "yellow")


def milliseconds(seconds: float) -> str:
    """Return a short time with two or three digits."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
