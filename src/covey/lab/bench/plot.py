"""Draws a benchmark as one SVG: latency and bandwidth by size, a line per contender. Pure; no plotting library.

The picture carries its own light and dark colours and follows the reader's setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from covey.cli.status.drawing import DARK, STYLE
from covey.lab.bench.sweep import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.lab.bench.report import Measurement

WIDTH: Final = 960
PANEL_WIDTH: Final = 372
PANEL_HEIGHT: Final = 250
ROW_HEIGHT: Final = 350
TOP: Final = 116
LEFT_EDGES: Final = (72, 556)

LINE_COLOURS: Final = {
    "covey": ("#0f766e", "#2dd4bf"),
    "covey shm": ("#0f766e", "#2dd4bf"),
    "covey unix": ("#7c3aed", "#a78bfa"),
    "covey tcp": ("#2563eb", "#60a5fa"),
    "covey secure": ("#15803d", "#86efac"),
    "gloo": ("#c2410c", "#fb923c"),
    "mpi": ("#be185d", "#f472b6"),
    "mpi-tcp": ("#a16207", "#facc15"),
}
"""Light and dark variant for each contender; opponents are also dashed, so colour is never the only difference."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic axis: values from `low` to `high` onto pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)


def draw(measurements: Sequence[Measurement], subtitle: str) -> str:
    """Return the SVG text: one row of two panels for each operation and number of ranks that moves bytes."""
    moved = [row for row in measurements if row.case.bytes]
    names = list(dict.fromkeys(row.contender.name for row in moved))
    rows: dict[str, list[Measurement]] = {}
    for row in moved:
        heading = f"{row.case.operation.name}, {row.case.ranks} ranks, {row.case.dtype}"
        rows.setdefault(heading, []).append(row)
    height = TOP + ROW_HEIGHT * max(1, len(rows))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' role="img" aria-labelledby="t d">',
        '<title id="t">covey bench</title>',
        f'<desc id="d">{escape("; ".join(rows) or "nothing that moves bytes")}: {escape(", ".join(names))}</desc>',
        f"<style>{STYLE}{_series_style(names, 0)}    @media (prefers-color-scheme: dark) {{{DARK}"
        f"{_series_style(names, 1)}    }}\n</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
        '<text class="title" x="28" y="38">covey bench</text>',
        f'<text class="note" x="28" y="60">{escape(subtitle)}</text>',
        *_legend(names),
    ]
    for i, (heading, found) in enumerate(rows.items()):
        top = TOP + i * ROW_HEIGHT
        parts += _panel(LEFT_EDGES[0], top, f"{heading}: median latency", found, names, is_latency=True)
        parts += _panel(LEFT_EDGES[1], top, "bus bandwidth", found, names, is_latency=False)
    return "\n".join([*parts, "</svg>", ""])


def decades(low: float, high: float) -> list[float]:
    """Return 1, 2 or 5 times powers of ten within low..high; only powers of ten if there would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9)]
        if len(ticks) <= 7:
            break
    return ticks


def _panel(
    left: float, top: float, heading: str, rows: Sequence[Measurement], names: Sequence[str], *, is_latency: bool
) -> list[str]:
    values = {row: row.p50 if is_latency else row.bus_bandwidth / 1e9 for row in rows}
    write = _format_latency if is_latency else _format_bandwidth
    sizes = sorted({row.case.bytes for row in rows})
    right, bottom = left + PANEL_WIDTH, top + 28 + PANEL_HEIGHT
    x = Scale(*_span(sizes, 1.0), left, right)
    y = Scale(*_span(values.values(), 1.25), bottom, top + 28)
    parts = [f'<text class="heading" x="{left - 44}" y="{top + 10}">{escape(heading)}</text>']
    for tick in decades(y.low, y.high):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 8}" y="{at + 4:.1f}">{write(tick)}</text>')
    last_at = -math.inf
    for size in sizes:
        at = x(size)
        if at - last_at >= 30:  # labels must not run into each other
            parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
            label = format_bytes(size).replace("iB", "").replace(" ", "")
            parts.append(f'<text class="tick" text-anchor="middle" x="{at:.1f}" y="{bottom + 20}">{label}</text>')
            last_at = at
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for name in names:
        points = [(x(row.case.bytes), y(values[row]), row) for row in rows if row.contender.name == name]
        if not points:
            continue
        kind = "line" if name.startswith("covey") else "line opponent"
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down, _ in points)
        parts.append(f'<polyline class="{kind} {_slug(name)}" points="{path}"/>')
        for across, down, row in points:
            hint = f"{name}, {format_bytes(row.case.bytes)}: {write(values[row])}"
            parts.append(
                f'<circle class="dot {_slug(name)}-dot" cx="{across:.1f}" cy="{down:.1f}" r="3.5">'
                f"<title>{escape(hint)}</title></circle>"
            )
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, at = [], 28
    for name in names:
        kind = "line" if name.startswith("covey") else "line opponent"
        parts.append(f'<line class="{kind} {_slug(name)}" x1="{at}" x2="{at + 28}" y1="84" y2="84"/>')
        parts.append(f'<circle class="dot {_slug(name)}-dot" cx="{at + 14}" cy="84" r="3.5"/>')
        parts.append(f'<text x="{at + 36}" y="88">{escape(name)}</text>')
        at += 36 + 8 * len(name) + 28
    return parts


def _series_style(names: Sequence[str], variant: int) -> str:
    page = ("#ffffff", "#0f172a")[variant]
    rules = []
    for name in names:
        colour, slug = LINE_COLOURS[name][variant], _slug(name)
        rules.append(
            f"{'  ' * variant}    .{slug} {{ stroke: {colour}; }} .{slug}-dot {{ fill: {colour}; stroke: {page}; }}\n"
        )
    return "".join(rules)


def _span(values: Iterable[float], margin: float) -> tuple[float, float]:
    """Return the axis ends for positive `values`; a single value gets room on both sides."""
    found = [float(value) for value in values]
    low, high = min(found) / margin, max(found) * margin
    return (low / 2, high * 2) if high <= low * margin * margin else (low, high)


def _format_latency(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _format_bandwidth(gigabytes: float) -> str:
    if gigabytes < 1e-3:
        return f"{gigabytes * 1e6:.3g} kB/s"
    return f"{gigabytes * 1e3:.3g} MB/s" if gigabytes < 1 else f"{gigabytes:.3g} GB/s"


def _slug(name: str) -> str:
    return name.replace(" ", "-")
