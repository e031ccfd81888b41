"""Formats the picture of a cluster for a terminal: for each run, a table of its nodes and one of their links."""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Final

from rich.text import Text

from covey.base.text import duration
from covey.cli.layout import Column, fits, lay_out, wrap
from covey.cli.terminal import plural

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.cli.status.picture import Picture, PicturedNode, Run, Way
    from covey.net.host.runs import LocalRunFound
    from covey.runtime.events import Event

MOST_IN_TABLE: Final = 6
"""Up to this many nodes, every link is shown; beyond, a summary."""
MOST_REASONS: Final = 8
"""How many reasons for a wait are shown; `covey doctor` shows all."""
MOST_EVENTS: Final = 8
"""How many of a run's last events are shown."""
NOTED_CLOCK_SECONDS: Final = 1.0
"""A clock that differs by more than this is noted."""


def view(picture: Picture, width: int | None) -> Text:
    """Return the whole picture, in lines of at most `width` letters; None does not limit them."""
    blocks = [
        [
            *_headline(picture.cluster, run, width),
            *_releases(run, width),
            *_waits(run, width),
            *_nodes(run, width),
            *_links(run, width),
            *_events(run, width),
        ]
        for run in picture.runs
    ]
    if picture.agents:
        blocks.append(_agents(picture, width))
    problems = [*picture.silent, *(f"{name} was refused: {why}" for name, why in sorted(picture.refused.items()))]
    if problems:
        blocks.append([Text(line, "yellow") for each in problems for line in _wrapped(each, width)])
    return Text("\n").join(itertools.chain.from_iterable(_apart(blocks)))


def _apart(blocks: list[list[Text]]) -> Iterable[list[Text]]:
    for number, block in enumerate(blocks):
        yield block if number == 0 else [Text(), *block]


def _agents(picture: Picture, width: int | None) -> list[Text]:
    """Return the machines that start programs for `covey run --on`."""
    agents = picture.agents
    columns = [
        Column("agent", [agent.name for agent in agents]),
        Column("host", [agent.host for agent in agents], leave_out=2),
        Column("address", [agent.address for agent in agents], leave_out=1),
        Column("covey", [agent.version for agent in agents], leave_out=3),
    ]
    hint = "no run of the cluster is running" if not picture.runs else ""
    return [*_texts(lay_out(columns, width, "dim")), *(Text(line) for line in _wrapped(hint, width) if line)]


def nothing_found(cluster: str) -> str:
    """Return the message for a cluster without nodes."""
    return f"no node of cluster {cluster!r} is running or answering; `covey doctor` looks for the cause"


def local_view(runs: list[LocalRunFound], width: int | None) -> Text:
    """Return the runs that have all their ranks on this machine, and how to look at one."""
    columns = [
        Column("run here", [run.name for run in runs]),
        Column("ranks", [str(run.size) for run in runs], is_right=True),
        Column("process", [str(run.pid) for run in runs], is_right=True),
    ]
    hint = f"covey trace {runs[0].name} shows what its ranks do"
    return Text("\n").join([*_texts(lay_out(columns, width, "dim")), *(Text(line) for line in _wrapped(hint, width))])


def _headline(cluster: str, run: Run, width: int | None) -> list[Text]:
    """Return the state of a run and its number of nodes; waiting and refused nodes are counted apart."""
    members = _members(run)
    refused = sum(node.state == "refused" for node in run.nodes)
    counts = [plural(len(members), "node")]
    if silent := sum(node.state == "silent" for node in members):
        counts.append(f"{silent} of them silent")
    if waiting := len(run.nodes) - len(members) - refused:
        counts.append(f"{waiting} more waiting to join")
    if refused:
        counts.append(f"{refused} more refused")
    text = f"run {run.name} in {cluster}: {run.state} for {duration(run.since)}, {', '.join(counts)}"
    lines = [Text(line) for line in _wrapped(text, width)]
    for line in lines:
        line.highlight_words([f"run {run.name}"], "bold")
        line.highlight_words([f"{run.state} for"], _style(run.state))
    return lines


def _releases(run: Run, width: int | None) -> list[Text]:
    """Return which machines have which release of covey, if they have several, and what the run speaks."""
    hosts: dict[str, set[str]] = {}
    for node in run.nodes:
        hosts.setdefault(node.version or "unknown", set()).add(node.host)
    if len(hosts) < 2:
        return []
    said = "; ".join(f"covey {release} on {', '.join(sorted(found))}" for release, found in sorted(hosts.items()))
    spoken = f"; the run speaks protocol {run.protocol}" if run.protocol else ""
    return [Text(line) for line in _wrapped(f"  releases: {said}{spoken}", width)]


def _members(run: Run) -> list[PicturedNode]:
    is_joining = run.state == "joining"
    return [node for node in run.nodes if (node.state != "refused" if is_joining else node.rank is not None)]


def _waits(run: Run, width: int | None) -> list[Text]:
    """Return what a run waits for, one reason a line."""
    reasons = [f"  {'waits: ' * (number == 0)}{reason}" for number, reason in enumerate(run.waits[:MOST_REASONS])]
    return [Text(line, "yellow") for reason in reasons for line in _wrapped(reason, width)]


def _nodes(run: Run, width: int | None) -> list[Text]:
    nodes = run.nodes
    columns = [
        Column("rank", ["" if node.rank is None else str(node.rank) for node in nodes], is_right=True),
        Column("node", [node.name for node in nodes]),
        Column("id", [node.short_id for node in nodes], leave_out=4),
        Column("host", [node.host for node in nodes], leave_out=2),
        Column("pid", [str(node.pid) for node in nodes], leave_out=3),
        Column("address", [f"{node.address} {node.interface}".strip() for node in nodes], leave_out=1),
        Column("covey", [node.version for node in nodes], leave_out=5),
        Column("", [_notes(node, run) for node in nodes], wraps=True),
    ]
    if all(node.name.startswith(f"{node.host}-") for node in nodes):
        columns = [column for column in columns if column.title != "host"]  # which the names begin with
    return _texts(lay_out(columns, width, "dim"))


def _texts(lines: Iterable[list[tuple[str, str]]]) -> list[Text]:
    return [Text.assemble(*line) for line in lines]


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, width)


def _notes(node: PicturedNode, run: Run) -> tuple[str, str]:
    notes, style = ["leader"] * node.is_leader + ["tie-breaker"] * node.is_tie_breaker, "bold"
    if node.state != run.state:
        notes.append(node.state)
        style = _style(node.state)
    if node.clock_offset is not None and abs(node.clock_offset) > NOTED_CLOCK_SECONDS:
        notes.append(f"clock {node.clock_offset:+.1f} s")
        style = "yellow"
    return ", ".join(notes), style


def _links(run: Run, width: int | None) -> list[Text]:
    """Return a table with every link; a summary by kind of lane, if there are many nodes or too few columns."""
    members = _members(run)
    told = [node for node in members if node.peers]
    if len(members) < 2 or not told:
        return []
    if len(members) <= MOST_IN_TABLE:
        titles = [f"to {_label(node)}" for node in members]
        links = [{way.id: _cell(way) for way in node.peers} for node in told]
        columns = [Column("from", [_label(node) for node in told])]
        columns += [
            Column(title, [each.get(node.id, "") for each in links])
            for title, node in zip(titles, members, strict=True)
        ]
        if fits(columns, width):
            return [Text(), *_texts(lay_out(columns, width, "dim")), *_relayed(told, width)]
    return [Text(), *(Text(line) for text in _summary(told) for line in _wrapped(text, width)), *_relayed(told, width)]


def _relayed(told: list[PicturedNode], width: int | None) -> list[Text]:
    """Return a line for each relay that links go through: the two ends of a link may name it differently."""
    relays = collections.Counter(way.relay for node in told for way in node.peers if way.relay)
    lines = [f"relayed by {relay}: {plural(count, 'link')}" for relay, count in sorted(relays.items())]
    return [Text(part, "yellow") for line in lines for part in _wrapped(line, width)]


def _summary(told: list[PicturedNode]) -> list[str]:
    ways = sorted(((way.lane, node, way) for node in told for way in node.peers), key=lambda each: each[0])
    lines = []
    for lane, group in itertools.groupby(ways, key=lambda each: each[0]):
        members = [(node, way) for _, node, way in group]
        times = [(way.round_trip, node, way) for node, way in members if way.round_trip is not None]
        line = f"{lane or 'no lane yet'}: {plural(len(members), 'link')}"
        if times:
            longest, source, way = max(times, key=lambda each: each[0])
            target = next((node for node in told if node.id == way.id), None)
            between = f" ({_label(source)} to {_label(target)})" if target is not None else ""
            middle = statistics.median(time for time, *_ in times)
            line += f", round trip {milliseconds(middle)} (median), at most {milliseconds(longest)}{between}"
        lines.append(line)
    return lines


def _events(run: Run, width: int | None) -> list[Text]:
    """Return the last events of a run, one a line, oldest first."""
    shown = run.events[-MOST_EVENTS:]
    if not shown:
        return []
    columns = [
        Column("at", [time.strftime("%H:%M:%S", time.localtime(event.time)) for event in shown]),
        Column("event", [event.kind for event in shown]),
        Column("", [_what(event) for event in shown], wraps=True),
    ]
    return [Text(), *_texts(lay_out(columns, width, "dim"))]


def _what(event: Event) -> str:
    """Return what an event is about: its members, what it says, and how long a recovery took."""
    about = ", ".join(event.names) or ", ".join(f"rank {rank}" for rank in event.ranks)
    parts = [about or f"generation {event.generation}", event.text]
    if event.phases:
        parts.append(f"recovered in {max(event.phases.values()):.0f} ms")
    return ": ".join(filter(None, parts))


def _label(node: PicturedNode) -> str:
    return node.name if node.rank is None else f"{node.rank}"


def _cell(way: Way) -> str:
    taken = milliseconds(way.round_trip) if way.round_trip is not None else ""
    return " ".join(filter(None, (way.lane, taken, "relayed" * bool(way.relay))))


def _style(state: str) -> str:
    return {"running": "green", "joining": "cyan"}.get(state, "yellow")


def milliseconds(seconds: float) -> str:
    """Return a short time with two or three digits."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
