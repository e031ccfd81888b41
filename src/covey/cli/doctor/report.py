"""Formats facts and findings: as text for a terminal or a log, and as JSON for programs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from covey.base.text import duration
from covey.cli.doctor.facts import FACTS_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from covey.base.config import EffectiveSetting
    from covey.cli.doctor.facts import ConnectionTry, Facts, Machine, MetNode, NetworkFacts
    from covey.cli.doctor.finding import Finding, Weight

FINDING_STYLES: Final[dict[Weight, str]] = {"problem": "bold red", "warning": "bold yellow", "note": "bold cyan"}
ROOMY: Final = 84
"""Terminal width from which tables show all their columns."""
MOST_NODES: Final = 20
SOURCES_SHOWN: Final = 3


def as_json(facts: Facts, found: Sequence[Finding]) -> dict[str, Any]:
    """Return everything as plain values."""
    return {"format": FACTS_FORMAT, **msgspec.to_builtins(facts), "findings": msgspec.to_builtins(found)}


def as_text(facts: Facts, found: Sequence[Finding], *, has_facts: bool) -> RenderableType:
    """Return the findings, and perhaps the facts behind them, as text that adapts to the width of the terminal."""
    if not has_facts:
        return Group(_findings(found), Text(_summary(facts, found, "covey doctor -v prints the facts"), style="dim"))
    parts: list[RenderableType] = [_heading("Findings"), _indent(_findings(found))]
    parts += [_heading("This machine"), _indent(_machine(facts.machine))]
    parts += [_heading("Settings"), _indent(_settings(facts.machine))]
    parts += [_heading("Interfaces"), _indent(_interfaces(facts.interfaces))]
    if facts.search_problem:
        parts += [_heading("Nodes"), _indent(Text(f"no search was possible: {facts.search_problem}", style="yellow"))]
    if facts.looked:
        parts += [_heading(f"Nodes of cluster {facts.cluster!r}"), _indent(_nodes(facts))]
    parts.append(Text(_summary(facts, found, "at the top" if found else ""), style="dim"))
    return Group(*parts)


@dataclass(frozen=True)
class ByWidth:
    """Renders as one thing on a wide terminal, and as another on a narrow one."""

    wide: RenderableType
    narrow: RenderableType

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.wide if options.max_width >= ROOMY else self.narrow


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indent(inner: RenderableType) -> Padding:
    return Padding(inner, (0, 0, 0, 2))


def _grid(*widths: int) -> Table:
    """Return a table without lines, whose first columns have at least these widths."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        grid.add_column(min_width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _columns(*headings: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _machine(machine: Machine) -> Table:
    grid = _grid(9)
    grid.add_row("host", f"{machine.host_name}, {machine.system}")
    grid.add_row("versions", ", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    names = (f"{name} (default)" if name == machine.default_cluster else name for name in machine.clusters)
    grid.add_row("clusters", ", ".join(names) or "none on file")
    grid.add_row("node names", ", ".join(machine.identities) or "none yet")
    bad = [path for path in machine.paths if path.is_loose or not path.is_ours]
    state = "is not there yet" if not machine.paths else f"and all in it ({len(machine.paths)}) are private"
    grid.add_row("files", f"{machine.home} {state}" if not bad else Text(f"{machine.home} is open to others:"))
    for path in bad:
        grid.add_row("", Text(f"{path.mode} {path.owner} {path.path}", style="red"))
    return grid


def _settings(machine: Machine) -> RenderableType:
    """Return a table of the settings that were given, and a few lines with the rest."""
    given = [each for each in machine.settings if each.source != "default"]
    rest = [each for each in machine.settings if each.source == "default"]
    lines = [
        ("default", ", ".join(f"{each.name} {each.value}" for each in rest if each.value)),
        ("not set", ", ".join(each.name for each in rest if not each.value)),
    ]
    grid = _grid(7)
    for label, names in lines:
        grid.add_row(Text(label, style="dim"), Text(names, style="dim"))
    if not given:
        return grid
    return Group(ByWidth(_given(given, with_variable=True), _given(given, with_variable=False)), grid)


def _given(settings: Sequence[EffectiveSetting], *, with_variable: bool) -> Table:
    table = _columns("setting", "value", "from", *(["variable"] if with_variable else []))
    for column in table.columns:
        column.no_wrap = column.header != "value"
    for each in settings:
        variable = [Text(each.variable, style="dim")] if with_variable else []
        table.add_row(each.name, Text(each.value or '""'), each.source, *variable)
    return table


def _interfaces(interfaces: Sequence[NetworkFacts]) -> RenderableType:
    wide = _columns("name", "kind", "MTU", "sent", "back", "heard", "", right=("MTU", "sent", "back", "heard"))
    for column in wide.columns[:-1]:
        column.no_wrap = True
    narrow: list[RenderableType] = []
    for each in interfaces:
        name = Text(each.name, style="bold" if each.is_used else "dim")
        counts = [str(each.sent), str(each.came_back), str(each.heard)]
        wide.add_row(name, each.kind, str(each.mtu), *(counts if each.is_used else ["", "", ""]), _story(each))
        numbers = ", ".join(map(" ".join, zip(counts, ("sent", "back", "heard"), strict=True)))
        head = Text.assemble(name, f"  {each.kind}, MTU {each.mtu}", f", {numbers}" if each.is_used else "")
        narrow += [head, _indent(_story(each))]
    legend = Text("packets of multicast DNS: sent, returned to this machine, heard from other machines", style="dim")
    return Group(ByWidth(wide, Group(*narrow)), legend)


def _story(each: NetworkFacts) -> Text:
    story = Text(", ".join(each.addresses) or "no address")
    if not each.is_used:
        story.append(f"\nnot used: {each.reason}", style="dim")
    elif not each.has_multicast:
        story.append("\ncannot do multicast", style="yellow")
    if each.heard_from:
        story.append(f"\ncovey heard from {_some(each.heard_from)}", style="green")
    if each.foreign:
        story.append(f"\nanother secret at {_some(each.foreign)}", style="yellow")
    if each.dropped:
        story.append(f"\n{each.dropped} packets about covey were dropped", style="yellow")
    for error in each.errors:
        story.append(f"\n{error}", style="yellow")
    return story


def _nodes(facts: Facts) -> RenderableType:
    if not facts.nodes:
        return Text("no node was found", style="yellow")
    shown = [_node(node, facts.cluster) for node in facts.nodes[:MOST_NODES]]
    rest = len(facts.nodes) - MOST_NODES
    return Group(*shown, *([Text(f"and {rest} more: see --json")] if rest > 0 else []))


def _node(node: MetNode, cluster: str) -> RenderableType:
    head = Text(node.name, style="bold")
    without_run = "an agent (covey up)" if node.purpose == "agent" else "another covey doctor or status"
    doing = f"{node.state} {node.run!r}" if node.run else without_run
    where = "this machine" if node.is_here else node.host_name
    head.append(
        f"  {doing}; process {node.pid} on {where}, covey {node.version}, protocol {node.protocol}", style="not bold"
    )
    grid = _grid(7)
    found = {
        "same host": "on this machine",
        "multicast": "by multicast",
        "seed": "by a seed",
        "relay": "by a relay",
        "others": "by other nodes",
    }
    if node.wait is not None:
        wait = node.wait
        grid.add_row("waits", Text(f"{duration(node.since)}: {wait.text}"))
        for where, why in (*wait.seeds.items(), *wait.refused.items(), *wait.problems.items()):
            grid.add_row("", Text(f"{where}: {why}", style="yellow"))
    grid.add_row("found", ", ".join(found[each] for each in node.found_by))
    _add_ways(grid, "to it", node.ways_there, "", chosen=node.chosen_way)
    _add_ways(grid, "from it", node.ways_back, node.ways_back_problem)
    if node.relay:
        grid.add_row("relayed", f"by {node.relay}")
    measured = [f"round trip {_milliseconds(node.round_trip)}"] if node.round_trip >= 0 else []
    measured += [f"throughput {_rate(node.bytes_per_second)}"] if node.bytes_per_second else []
    measured += [f"path MTU {node.path_mtu}"] if node.path_mtu else []
    measured += [] if node.is_here else [f"clock {node.clock_offset:+.3f} s"]
    grid.add_row("measured", ", ".join(measured))
    return Group(head, _indent(grid))


def _add_ways(grid: Table, label: str, ways: Sequence[ConnectionTry], problem: str, chosen: str = "") -> None:
    if problem:
        grid.add_row(label, Text(problem, style="yellow"))
    for number, way in enumerate(ways):
        line = Text(f"{way.address} ", style="" if way.works else "yellow")
        line.append(f"({way.interface}) " if way.interface else "")
        line.append(_milliseconds(way.round_trip) if way.works else way.problem)
        if way.local_interface:
            line.append(f" from {way.local} ({way.local_interface})", style="dim")
        if way.address == chosen:
            line.append("  in use", style="green")
        grid.add_row(label if number == 0 else "", line)


def _findings(found: Sequence[Finding]) -> RenderableType:
    if not found:
        return Text("nothing is wrong", style="bold green")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=7, no_wrap=True)
    grid.add_column(overflow="fold")
    for number, finding in enumerate(found):
        if number:
            grid.add_row()
        grid.add_row(Text(finding.weight, style=FINDING_STYLES[finding.weight]), Text(finding.text))
        grid.add_row("", Text(f"-> {finding.remedy}", style="green"))
    return grid


def _summary(facts: Facts, found: Sequence[Finding], where: str) -> str:
    counts = [f"{sum(each.weight == weight for each in found)} {weight}" for weight in FINDING_STYLES]
    counted = ", ".join(
        count if count.startswith("1 ") else f"{count}s" for count in counts if not count.startswith("0")
    )
    return f"\n{counted or 'no findings'}{f' ({where})' if where else ''}; {facts.seconds:.1f} s"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SOURCES_SHOWN
    return ", ".join(names[:SOURCES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def _rate(bytes_per_second: float) -> str:
    """Return a throughput in bits per second, the unit of network speeds."""
    bits = bytes_per_second * 8
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}" if bits < 999.5 * scale else f"{bits / scale:.0f} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
