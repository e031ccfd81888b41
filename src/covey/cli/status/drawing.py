"""Draws the links of runs: as a tree for a terminal, and as an SVG with a box for each site. Pure.

The width of a text is not known here, so it is taken to be that of wide fonts: texts are wrapped and shortened by it.
SVG pictures follow the reader's choice of light or dark colours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.sax.saxutils import escape

from rich.text import Text

from covey.base.text import duration, spell_rate
from covey.cli.layout import Column, lay_out, wrap
from covey.cli.terminal import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.status.network import NetworkHost, RunNetwork
    from covey.plan.network import Matrix

STYLE: Final = """
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #334155; }
    .title { font-size: 20px; font-weight: 600; fill: #0f172a; }
    .heading { font-size: 14px; font-weight: 600; fill: #0f172a; }
    .note, .tick { font-size: 12px; fill: #64748b; }
    .page { fill: #ffffff; }
    .grid { stroke: #e2e8f0; stroke-width: 1; }
    .axis { stroke: #94a3b8; stroke-width: 1; }
    .line { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
    .opponent { stroke-dasharray: 6 5; stroke-width: 1.75; }
    .dot { stroke-width: 1.5; }
"""
DARK: Final = """
      text { fill: #cbd5e1; }
      .title, .heading { fill: #f8fafc; }
      .note, .tick { fill: #94a3b8; }
      .page { fill: #0f172a; }
      .grid { stroke: #1e293b; }
      .axis { stroke: #475569; }
"""


MOST_PAIRS: Final = 8
"""Up to this many members, the speed of every pair is shown."""
BAR: Final = 10
"""Letters of the bar of the fastest machine."""
NOT_MEASURED: Final = (
    "run {}: its links are not measured; three or more ranks on several machines measure them at their third large "
    "all_reduce"
)
HOST_WIDTH, HOST_HEIGHT, HEADING, PICTURE_MARGIN, GAP, LINE = 270, 62, 30, 24, 24, 18
"""Sizes in pixels: a machine, the heading of a site, the margin, the space between sites, a line of text."""
ARROW: Final = 130
"""The space between two sites, with what passes between them."""
LEAST_WIDTH: Final = 2 * HOST_WIDTH
COLUMNS: Final = 4
"""Machines beside each other."""
ROWS: Final = 6
"""Machines of a site below each other, if there is room for them beside each other."""
LETTER, SMALL_LETTER, CELL = 6.8, 6.4, 64
"""The widths of letters and of a number of the table."""


def graph(run: str, found: RunNetwork | None, width: int | None) -> Text:
    """Return the links of a run, in lines of at most `width` letters; without a terminal (None), in ASCII."""
    if found is None:
        text = NOT_MEASURED.format(run)
        return Text("\n".join(wrap(text, width) if width else [text]), "yellow")
    lines = [Text(line) for line in _headline(run, found, width)]
    lines += [Text.assemble(*line) for line in lay_out(_tree(found, is_ascii=width is None), width, "dim")]
    if len(found.network.trunks) > 2:
        lines += [Text.assemble(*line) for line in lay_out(_matrix("site", found.network.trunks), width, "dim")]
    else:
        for (one, other), rate in trunks(found).items():
            lines.append(Text(f"site {one} to site {other}: {spell_rate(rate)}"))
    if len(found.network.hosts) <= MOST_PAIRS:
        lines += [Text.assemble(*line) for line in lay_out(_matrix("rank", found.network.rates), width, "dim")]
    return Text("\n").join(lines)


def _headline(run: str, found: RunNetwork, width: int | None) -> list[str]:
    counts = f"{plural(len(found.hosts), 'machine')} at {plural(len(found.network.trunks), 'site')}"
    text = f"run {run}: {counts}, measured {duration(found.age)} ago"
    texts = [text, f"plan of large all_reduces: {found.plan}"] if found.plan else [text]
    return [line for each in texts for line in (wrap(each, width) if width else [each])]


def _tree(found: RunNetwork, *, is_ascii: bool) -> list[Column]:
    """Return sites and their machines, with a bar for the slower direction of each."""
    middle, last, block = ("|- ", "`- ", "#") if is_ascii else ("├─ ", "└─ ", "█")
    fastest = max((slower(host) for host in found.hosts), default=1.0)
    rows: list[tuple[str, str, str, str, str, str, str]] = []
    for site in range(len(found.network.trunks)):
        hosts = [host for host in found.hosts if host.site == site]
        rows.append((f"site {site}", "", "", "", "", "", ""))
        for host in hosts:
            length = max(1, round(BAR * slower(host) / fastest))
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
    has_ages = any(cell not in ("", duration(found.age)) for cell in cells[6])  # else the headline has said it
    columns = [
        Column("machine", cells[0]),
        Column("ranks", cells[1], leave_out=1, wraps=True),
        Column("sends", cells[2], is_right=True),
        Column("receives", cells[3], is_right=True),
        Column("", cells[4], leave_out=3),
        Column("medium", cells[5], leave_out=2),
    ]
    return [*columns, Column("age", cells[6], is_right=True, leave_out=1)] if has_ages else columns


def _matrix(what: str, rates: Matrix) -> list[Column]:
    """Return what each rank or site sends to each other one, in Mbit/s."""
    places = range(len(rates))
    cells = [[mbit(rates[one][other]) if one != other else "" for one in places] for other in places]
    return [
        Column("Mbit/s", [f"{what} {place} to" for place in places]),
        *(Column(str(other), cells[other], is_right=True, leave_out=9) for other in places),
    ]


def mbit(rate: float) -> str:
    """Return a speed in Mbit/s, in three digits."""
    return f"{rate * 8 / 1e6:.3g}" if math.isfinite(rate) else "?"


def slower(host: NetworkHost) -> float:
    """Return the speed of a machine in its slower direction."""
    speed = min(host.up, host.down)
    return speed if math.isfinite(speed) else 1.0


def trunks(found: RunNetwork) -> dict[tuple[int, int], float]:
    """Return what each site sends to each other one."""
    rows = found.network.trunks
    return {(a, b): rate for a, row in enumerate(rows) for b, rate in enumerate(row) if a != b}


class _Box(NamedTuple):
    """Where a site is."""

    site: int
    x: int
    y: int
    columns: int
    rows: int

    @property
    def width(self) -> int:
        return self.columns * HOST_WIDTH

    @property
    def height(self) -> int:
        return HEADING + self.rows * HOST_HEIGHT


def svg(runs: Sequence[tuple[str, RunNetwork]]) -> str:
    """Return the links of runs as one picture, which follows the reader's choice of light or dark."""
    parts: list[str] = []
    top, widest = 0, 0
    for name, found in runs:
        drawn, width, height = _run(name, found, top)
        parts += drawn
        top, widest = top + height, max(widest, width)
    style = f"<style>{STYLE}\n    @media (prefers-color-scheme: dark) {{{DARK}    }}\n</style>"
    size = f'width="{widest}" height="{top}" viewBox="0 0 {widest} {top}"'
    page = f'<rect class="page" width="{widest}" height="{top}"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', style, page, *parts, "</svg>", ""])


def _run(name: str, found: RunNetwork, top: int) -> tuple[list[str], int, int]:
    """Return the elements of one run, and the width and height of its picture."""
    boxes, right = _placed(found, ARROW if len(found.network.trunks) == 2 else GAP)
    has_arrows = len(boxes) == 2 and boxes[0].y == boxes[1].y
    right = max(right, PICTURE_MARGIN + LEAST_WIDTH)
    letters = int((right - PICTURE_MARGIN) / SMALL_LETTER)
    counts = f"{plural(len(found.hosts), 'machine')} at {plural(len(found.network.trunks), 'site')}"
    notes = wrap(f"{counts}, measured {duration(found.age)} ago", letters)
    notes += wrap(found.plan, letters) if found.plan else []
    parts = [
        f'<text class="title" x="{PICTURE_MARGIN}" y="{top + 34}">{escape(_short(f"run {name}", letters // 2))}</text>'
    ]
    for number, line in enumerate(notes):
        parts.append(f'<text class="note" x="{PICTURE_MARGIN}" y="{top + 56 + number * LINE}">{escape(line)}</text>')
    top_of_boxes = 56 + len(notes) * LINE
    fastest = max((slower(host) for host in found.hosts), default=1.0)
    for box in boxes:
        parts += _site(box, top + top_of_boxes, found, fastest)
    bottom = top_of_boxes + max(box.y + box.height for box in boxes)
    if has_arrows:
        parts += _arrows(boxes[0], top + top_of_boxes, found)
    elif len(boxes) > 1:
        drawn, width, height = _table(found, top + bottom + GAP)
        parts += drawn
        right, bottom = max(right, width), bottom + GAP + height
    return parts, right + PICTURE_MARGIN, bottom + GAP


def _placed(found: RunNetwork, gap: int) -> tuple[list[_Box], int]:
    """Return where the sites are, in rows, and where the last one ends to the right."""
    boxes: list[_Box] = []
    x, y, used, right = PICTURE_MARGIN, 0, 0, 0
    for site in range(len(found.network.trunks)):
        number = sum(host.site == site for host in found.hosts)
        columns = min(COLUMNS, max(1, math.ceil(number / ROWS)))
        if used and used + columns > COLUMNS:
            x, y, used = PICTURE_MARGIN, max(box.y + box.height for box in boxes) + GAP, 0
        box = _Box(site, x, y, columns, math.ceil(number / columns))
        boxes.append(box)
        x, used, right = x + box.width + gap, used + columns, max(right, x + box.width)
    return boxes, right


def _site(box: _Box, top: int, found: RunNetwork, fastest: float) -> list[str]:
    x, y = box.x, top + box.y
    parts = [
        f'<rect class="grid" fill="none" rx="8" x="{x}" y="{y}" width="{box.width}" height="{box.height}"/>',
        f'<text class="heading" x="{x + 12}" y="{y + 22}">site {box.site}</text>',
    ]
    for number, host in enumerate(host for host in found.hosts if host.site == box.site):
        left = x + number // box.rows * HOST_WIDTH + 12
        at = y + HEADING + number % box.rows * HOST_HEIGHT
        length = max(6.0, (HOST_WIDTH - 24) * slower(host) / fastest)
        both = f"sends {spell_rate(host.up)}, receives {spell_rate(host.down)}"
        parts += [
            f'<text x="{left}" y="{at + 16}">{escape(_called(host))}<title>{escape(host.name)}</title></text>',
            f'<text class="tick" x="{left}" y="{at + 32}">{both}</text>',
            f'<rect x="{left}" y="{at + 40}" width="{length:.0f}" height="6" rx="3" fill="#2563eb"/>',
        ]
    return parts


def _called(host: NetworkHost) -> str:
    """Return a line about a machine that is not wider than the machine's place; its name is shortened first."""
    most = int((HOST_WIDTH - 24) / LETTER)
    ranks = ", ".join(map(str, host.ranks))
    rest = _short(f": {'rank' if len(host.ranks) == 1 else 'ranks'} {ranks}", most // 2)
    rest += "" if host.medium == "unknown" else f", {host.medium}"
    return _short(host.name, most - len(rest)) + rest


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(1, most - 1)]}\u2026"


def _arrows(first: _Box, top: int, found: RunNetwork) -> list[str]:
    """Draw what passes between two sites."""
    left, parts = first.x + first.width, []
    for (one, other), rate in trunks(found).items():
        y = top + (40 if one < other else 72)
        tip, back = (left + ARROW, -7) if one < other else (left, 7)
        parts += [
            f'<line class="axis" x1="{left}" y1="{y}" x2="{left + ARROW}" y2="{y}"/>',
            f'<path class="axis" fill="none" d="M{tip + back} {y - 4} L{tip} {y} L{tip + back} {y + 4}"/>',
            f'<text class="tick" text-anchor="middle" x="{left + ARROW // 2}" y="{y - 6}">{spell_rate(rate)}</text>',
        ]
    return parts


def _table(found: RunNetwork, top: int) -> tuple[list[str], int, int]:
    """Write what passes between more than two sites; return the right edge and the height, too."""
    places, first = range(len(found.network.trunks)), PICTURE_MARGIN + 90
    parts = [f'<text class="heading" x="{PICTURE_MARGIN}" y="{top + 14}">between sites, Mbit/s</text>']
    for one in places:
        y, x = top + 38 + (one + 1) * LINE, first + (one + 1) * CELL
        parts.append(f'<text class="tick" text-anchor="end" x="{x}" y="{top + 38}">to {one}</text>')
        parts.append(f'<text class="tick" x="{PICTURE_MARGIN}" y="{y}">from site {one}</text>')
        for other in places:
            if one != other:
                shown = mbit(found.network.trunks[one][other])
                parts.append(f'<text text-anchor="end" x="{first + (other + 1) * CELL}" y="{y}">{shown}</text>')
    return parts, first + len(places) * CELL, 38 + len(places) * LINE
