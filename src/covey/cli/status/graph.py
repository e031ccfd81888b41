"""Draws the links of a run: for a terminal as a tree of sites and machines, and as an SVG. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from rich.text import Text

from covey.base.text import spell_rate
from covey.cli.bench.plot import DARK, STYLE
from covey.cli.layout import Column, lay_out, wrap
from covey.cli.status.view import duration
from covey.cli.terminal import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.status.network import NetworkHost, RunNetwork

MOST_PAIRS: Final = 8
"""Up to this many members, the speed of every pair is shown."""
BAR: Final = 10
"""Letters of the bar of the fastest machine."""
NOT_MEASURED: Final = (
    "run {}: its links are not measured; three or more ranks on several machines measure them at their third large "
    "all_reduce"
)
SITE_WIDTH, HOST_HEIGHT, TOP, LEFT, GAP = 270, 62, 86, 24, 120
"""Of the picture, in pixels."""


def graph(run: str, found: RunNetwork | None, width: int | None) -> Text:
    """Return the links of a run, in lines of at most `width` letters; without a terminal (None), in ASCII."""
    if found is None:
        text = NOT_MEASURED.format(run)
        return Text("\n".join(wrap(text, width) if width else [text]), "yellow")
    lines = [Text(line) for line in _headline(run, found, width)]
    lines += [Text.assemble(*line) for line in lay_out(_tree(found, is_ascii=width is None), width, "dim")]
    for (one, other), rate in _trunks(found).items():
        lines.append(Text(f"site {one} to site {other}: {spell_rate(rate)}"))
    if len(found.network.hosts) <= MOST_PAIRS:
        lines += [Text.assemble(*line) for line in lay_out(_pairs(found), width, "dim")]
    return Text("\n").join(lines)


def _headline(run: str, found: RunNetwork, width: int | None) -> list[str]:
    counts = f"{plural(len(found.hosts), 'machine')} at {plural(len(found.network.trunks), 'site')}"
    text = f"run {run}: {counts}, measured {duration(found.age)} ago"
    texts = [text, f"plan of large sums: {found.plan}"] if found.plan else [text]
    return [line for each in texts for line in (wrap(each, width) if width else [each])]


def _tree(found: RunNetwork, *, is_ascii: bool) -> list[Column]:
    """Return sites and their machines, with a bar for the slower direction of each."""
    middle, last, block = ("|- ", "`- ", "#") if is_ascii else ("├─ ", "└─ ", "█")
    fastest = max((_slower(host) for host in found.hosts), default=1.0)
    rows: list[tuple[str, str, str, str, str, str, str]] = []
    for site in range(len(found.network.trunks)):
        hosts = [host for host in found.hosts if host.site == site]
        rows.append((f"site {site}", "", "", "", "", "", ""))
        for host in hosts:
            length = max(1, round(BAR * _slower(host) / fastest))
            rows.append(
                (
                    (last if host is hosts[-1] else middle) + host.name,
                    ", ".join(map(str, host.ranks)),
                    spell_rate(host.up),
                    spell_rate(host.down),
                    block * length,
                    "" if host.medium == "unknown" else host.medium,
                    duration(host.age),
                )
            )
    cells = list(zip(*rows, strict=True))
    return [
        Column("machine", cells[0]),
        Column("ranks", cells[1], leave_out=2, wraps=True),
        Column("sends", cells[2], is_right=True),
        Column("receives", cells[3], is_right=True),
        Column("", cells[4], leave_out=3),
        Column("medium", cells[5], leave_out=1),
        Column("age", cells[6], is_right=True, leave_out=2),
    ]


def _pairs(found: RunNetwork) -> list[Column]:
    """Return what each member sends to each other one, in Mbit/s."""
    slots = range(len(found.network.hosts))
    names = [f"rank {slot} to" for slot in slots]
    cells = [[_mbit(found.network.rates[one][other]) if one != other else "" for one in slots] for other in slots]
    return [
        Column("Mbit/s", names),
        *(Column(str(other), cells[other], is_right=True, leave_out=9) for other in slots),
    ]


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:.3g}" if math.isfinite(rate) else "?"


def _slower(host: NetworkHost) -> float:
    slower = min(host.up, host.down)
    return slower if math.isfinite(slower) else 1.0


def _trunks(found: RunNetwork) -> dict[tuple[int, int], float]:
    rows = found.network.trunks
    return {(a, b): rate for a, row in enumerate(rows) for b, rate in enumerate(row) if a != b}


def svg(runs: Sequence[tuple[str, RunNetwork]]) -> str:
    """Return the links of runs as one picture, which follows the reader's choice of light or dark."""
    parts, top, widest = [], 0, 400
    for name, found in runs:
        drawn, width, height = _svg_run(name, found, top)
        parts += drawn
        top, widest = top + height, max(widest, width)
    style = f"<style>{STYLE}\n    @media (prefers-color-scheme: dark) {{{DARK}    }}\n</style>"
    size = f'width="{widest}" height="{top}" viewBox="0 0 {widest} {top}"'
    page = f'<rect class="page" width="{widest}" height="{top}"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, page, *parts, "</svg>", ""])


def _svg_run(name: str, found: RunNetwork, top: int) -> tuple[list[str], int, int]:
    """Return the elements of one run, and the width and height of its picture."""
    fastest = max((_slower(host) for host in found.hosts), default=1.0)
    sites = range(len(found.network.trunks))
    parts = [
        f'<text class="title" x="{LEFT}" y="{top + 34}">run {escape(name)}</text>',
        f'<text class="note" x="{LEFT}" y="{top + 56}">measured {duration(found.age)} ago; {escape(found.plan)}</text>',
    ]
    tallest = max(sum(host.site == site for host in found.hosts) for site in sites)
    for site in sites:
        x, y = LEFT + site * (SITE_WIDTH + GAP), top + TOP
        hosts = [host for host in found.hosts if host.site == site]
        height = HOST_HEIGHT * len(hosts) + 30
        parts.append(f'<rect class="grid" fill="none" rx="8" x="{x}" y="{y}" width="{SITE_WIDTH}" height="{height}"/>')
        parts.append(f'<text class="heading" x="{x + 12}" y="{y + 22}">site {site}</text>')
        for number, host in enumerate(hosts):
            at = y + 30 + number * HOST_HEIGHT
            length = max(2.0, (SITE_WIDTH - 24) * _slower(host) / fastest)
            ranks, medium = ", ".join(map(str, host.ranks)), "" if host.medium == "unknown" else f", {host.medium}"
            parts += [
                f'<text x="{x + 12}" y="{at + 16}">{escape(host.name)}: rank {ranks}{escape(medium)}</text>',
                f'<text class="tick" x="{x + 12}" y="{at + 32}">sends {spell_rate(host.up)}, receives '
                f"{spell_rate(host.down)}</text>",
                f'<rect x="{x + 12}" y="{at + 40}" width="{length:.0f}" height="6" rx="3" fill="#2563eb"/>',
            ]
    for (one, other), rate in _trunks(found).items():
        if abs(one - other) == 1:
            left = LEFT + min(one, other) * (SITE_WIDTH + GAP) + SITE_WIDTH
            y = top + TOP + (40 if one < other else 76)
            arrow = "&#8594;" if one < other else "&#8592;"
            parts.append(f'<line class="axis" x1="{left}" y1="{y}" x2="{left + GAP}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{left + 4}" y="{y - 6}">{arrow} {spell_rate(rate)}</text>')
    width = LEFT + len(sites) * (SITE_WIDTH + GAP)
    return parts, width, TOP + HOST_HEIGHT * tallest + 60
