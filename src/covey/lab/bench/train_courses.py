"""What `covey bench train` makes of the runs that it has measured: rows, a table, a page, a picture. Pure."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from xml.sax.saxutils import escape

from covey.base.errors import ConfigError
from covey.cli.layout import Column
from covey.cli.status.drawing import DARK, STYLE
from covey.cli.terminal import FittedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WAYS: Final = ("alone", "bound", "gloo", "ddp", "ddp int8", "diloco", "torchft", "hivemind", "together")
UNSHAPED: Final = ("alone", "bound")
"""Ways for which the line does not matter: they are measured once for each model and seed."""
NAMES: Final = {
    "alone": "one alone", "bound": "bound: exact, unshaped", "gloo": "gloo DDP", "ddp": "covey DDP",
    "ddp int8": "covey DDP int8", "diloco": "covey DiLoCo int8, every 20", "torchft": "torchft DiLoCo, every 20",
    "hivemind": "hivemind, local updates", "together": "train_together",
}  # fmt: skip
COLOURS: Final = {
    "alone": "#94a3b8", "bound": "#0f172a", "gloo": "#c2410c", "ddp": "#2563eb", "ddp int8": "#7c3aed",
    "diloco": "#a16207", "torchft": "#be185d", "hivemind": "#4d7c0f", "together": "#0f766e",
}  # fmt: skip
MACHINES: Final = {
    "equal": "{} equal", "uneven": "3, one at half speed", "loss": "3, one at half speed; one lost and back",
}  # fmt: skip


class TrainCase(NamedTuple):
    """One run."""

    model: str
    machines: str
    """A key of MACHINES."""
    way: str
    line: int
    """Mbit/s; 0 if nothing shapes it."""
    seed: int
    size: int = 2
    """The number of machines."""
    seconds: float = 60.0
    """Seconds of training."""

    @property
    def text(self) -> str:
        """The run in words."""
        line = f", {self.line} Mbit/s" if self.line else ""
        return f"{self.model}, seed {self.seed}, {MACHINES[self.machines].format(self.size)}: {NAMES[self.way]}{line}"


@dataclass(frozen=True, kw_only=True)
class TrainCourse:
    """How a model's loss on held-out text fell in one run."""

    case: TrainCase
    points: list[tuple[float, int, float]]
    """Seconds, samples of all ranks, and loss."""

    def seconds_to(self, loss: float) -> float:
        """Return when the loss was reached, between two points; infinity if it was not."""
        before = (0.0, math.log(256))
        for at, _, found in self.points:
            if found <= loss:
                return before[0] + (at - before[0]) * (before[1] - loss) / max(1e-9, before[1] - found)
            before = (at, found)
        return math.inf

    def loss_at(self, samples: int) -> float | None:
        """Return the loss after so many samples, between two points; None if there were fewer."""
        before = (0, math.log(256))
        for _, count, found in self.points:
            if count >= samples:
                return before[1] + (found - before[1]) * (samples - before[0]) / max(1, count - before[0])
            before = (count, found)
        return None


@dataclass(frozen=True)
class TrainRow:
    """What the runs of one way over one line brought, as medians over seeds."""

    model: str
    machines: str
    """In words."""
    line: int
    way: str
    seeds: int
    seconds: float
    """Until the loss that one machine alone ends with; infinity if it is not reached."""
    of_bound: float
    """The time of the bound, divided by that."""
    against_alone: float
    at_equal_samples: float
    """The loss where the shorter run ends, divided by that of the bound after as many samples."""

    @property
    def cells(self) -> tuple[str, ...]:
        """What a table shows of it; see TITLES."""
        return (
            self.model,
            self.machines,
            f"{self.line} Mbit/s" if self.line else "-",
            NAMES[self.way],
            str(self.seeds),
            f"{self.seconds:.1f} s" if math.isfinite(self.seconds) else "not reached",
            f"{self.against_alone:.2f}x" if self.against_alone else "-",
            f"{self.of_bound:.2f}" if self.of_bound else "-",
            f"{self.at_equal_samples:.3f}",
        )


TITLES: Final = (
    *("model", "machines", "line", "way", "seeds", "to the loss", "against alone", "of the bound"),
    "loss, equal samples",
)


def rows(courses: Iterable[TrainCourse]) -> list[TrainRow]:
    """Return a row for each model, line and way for which the runs of one alone and of the bound are there."""
    by_seed: dict[TrainCase, dict[int, TrainCourse]] = {}
    for course in courses:
        by_seed.setdefault(course.case._replace(seed=0), {})[course.case.seed] = course
    found = []
    for case, runs in by_seed.items():
        like = case._replace(line=0, machines="uneven" if case.machines == "loss" else case.machines)
        figures = []
        for seed, course in runs.items():
            single = by_seed.get(like._replace(way="alone"), {}).get(seed)
            bound = by_seed.get(like._replace(way="bound"), {}).get(seed)
            if single is None or bound is None or not (single.points and bound.points and course.points):
                continue
            target = single.points[-1][2]
            taken = course.seconds_to(target)
            last = min(course.points[-1][1], bound.points[-1][1])
            pair = course.loss_at(last), bound.loss_at(last)
            equal = pair[0] / pair[1] if pair[0] is not None and pair[1] is not None else math.nan
            figures.append((taken, bound.seconds_to(target) / taken, single.points[-1][0] / taken, equal))
        if figures:
            machines = MACHINES[case.machines].format(case.size)
            medians = (statistics.median(each) for each in zip(*figures, strict=True))
            found.append(TrainRow(case.model, machines, case.line, case.way, len(figures), *medians))
    return sorted(found, key=lambda row: (row.model, row.machines, row.line, WAYS.index(row.way)))


def table(found: Sequence[TrainRow]) -> FittedTable:
    """Return the rows as a table for a terminal."""
    columns = zip(*(row.cells for row in found), strict=True) if found else [()] * len(TITLES)
    return FittedTable(
        [Column(*each, is_right=place > 3) for place, each in enumerate(zip(TITLES, columns, strict=True))]
    )


def markdown(found: Sequence[TrainRow]) -> str:
    """Return the rows as a table for a page."""
    lines = [
        TITLES,
        *([tuple("--:" if place > 3 else "---" for place in range(len(TITLES)))]),
        *(r.cells for r in found),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_json(courses: Iterable[TrainCourse]) -> list[dict[str, Any]]:
    """Return everything as plain values."""
    return [{**course.case._asdict(), "points": course.points} for course in courses]


def from_text(text: bytes) -> list[TrainCourse]:
    """Return what `as_json` made plain, from a file.

    Raises:
        ConfigError: it is something else.
    """
    try:
        found = [
            TrainCourse(
                case=TrainCase(**{name: each[name] for name in TrainCase._fields}),
                points=[(float(at), int(samples), float(loss)) for at, samples, loss in each["points"]],
            )
            for each in json.loads(text)
        ]
        for course in found:
            if course.case.way not in WAYS or course.case.machines not in MACHINES:
                raise ValueError(f"{course.case.way} on {course.case.machines} machines")
        return found
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"this is no file of `covey bench train --add` ({error!r}); name another one") from error


PANEL: Final = (300, 230)
PANEL_MARGIN: Final = (56, 114)


def draw(courses: Sequence[TrainCourse]) -> str:
    """Return an SVG: for each model and line of equal machines, how the losses of the first seed fell with time."""
    courses = [course for course in courses if course.case.machines == "equal"]
    first = min((course.case.seed for course in courses), default=0)
    panels = sorted({(course.case.model, course.case.line) for course in courses if course.case.line})
    lines = sorted({line for _, line in panels})
    models = list(dict.fromkeys(model for model, _ in panels))
    width = PANEL_MARGIN[0] + len(lines) * (PANEL[0] + PANEL_MARGIN[0])
    height = PANEL_MARGIN[1] + len(models) * (PANEL[1] + 70)
    ways = [way for way in WAYS if any(course.case.way == way for course in courses)]
    style = "".join(f" .{way.replace(' ', '-')} {{ stroke: {COLOURS[way]}; }}" for way in ways)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="t">',
        '<title id="t">Loss on held-out text against time</title>',
        f"<style>{STYLE}{style} @media (prefers-color-scheme: dark) {{ {DARK} .bound {{ stroke: #f8fafc; }} }}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
        '<text class="title" x="28" y="38">Loss on held-out text against time</text>',
    ]
    for place, way in enumerate(ways):
        across, down = 28 + place % 4 * 250, 60 + place // 4 * 18
        kind = way.replace(" ", "-")
        parts.append(f'<line class="line {kind}" x1="{across}" x2="{across + 24}" y1="{down}" y2="{down}"/>')
        parts.append(f'<text class="note" x="{across + 30}" y="{down + 4}">{escape(NAMES[way])}</text>')
    for model, line in panels:
        shown = [
            each
            for each in courses
            if (each.case.model, each.case.seed) == (model, first) and each.case.line in (0, line) and each.points
        ]
        left = PANEL_MARGIN[0] + lines.index(line) * (PANEL[0] + PANEL_MARGIN[0])
        parts += _panel(shown, left, PANEL_MARGIN[1] + models.index(model) * (PANEL[1] + 70), f"{model}, {line} Mbit/s")
    return "\n".join([*parts, "</svg>", ""])


def _panel(shown: Sequence[TrainCourse], left: float, top: float, heading: str) -> list[str]:
    longest = max(course.points[-1][0] for course in shown)
    losses = [loss for course in shown for _, _, loss in course.points]
    low, high = min(losses), min(max(losses), 2 * min(losses))
    bottom = top + 26 + PANEL[1]
    parts = [f'<text class="heading" x="{left}" y="{top + 12}">{escape(heading)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        down, across = bottom - share * PANEL[1], left + share * PANEL[0]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL[0]}" y1="{down:.1f}" y2="{down:.1f}"/>')
        said = f"{low + share * (high - low):.2f}"
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 6}" y="{down + 4:.1f}">{said}</text>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{across:.1f}" y="{bottom + 18}">{share * longest:.0f} s</text>'
        )
    for course in shown:
        points = " ".join(
            f"{left + at / longest * PANEL[0]:.1f},{bottom - (loss - low) / max(1e-9, high - low) * PANEL[1]:.1f}"
            for at, _, loss in course.points
            if loss <= high
        )
        parts.append(f'<polyline class="line {course.case.way.replace(" ", "-")}" points="{points}"/>')
    return parts
