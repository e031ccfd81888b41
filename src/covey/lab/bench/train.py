"""`covey bench train`: how much faster machines train together than one alone, over lines of several speeds.

The machines are network namespaces of this one, a core each; `tc tbf` shapes their lines. The bound is exact DDP over a
line that nothing shapes, which also has the loss of one machine with the whole batch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from covey.base.errors import ConfigError
from covey.cli.layout import Column
from covey.cli.status.drawing import DARK, STYLE
from covey.cli.terminal import FittedTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.testing.netns import Lan

WAYS: Final = ("alone", "bound", "gloo", "ddp", "ddp int8", "diloco", "together")
UNSHAPED: Final = ("alone", "bound")
"""Ways for which the line does not matter: they are measured once for each model and seed."""
TRAINED_MODELS: Final = ("mlp", "attention", "lora")
BATCH_OF_EACH: Final = {"mlp": 128, "attention": 16, "lora": 128}
TRIAL_START_SECONDS: Final = 120.0
"""For interpreters to start, ranks to join, and the copies to be judged."""
NAMES: Final = {
    "alone": "one alone", "bound": "bound: exact DDP, unshaped", "gloo": "gloo DDP", "ddp": "covey DDP",
    "ddp int8": "covey DDP int8", "diloco": "covey DiLoCo int8, every 20", "together": "train_together",
}  # fmt: skip
COLOURS: Final = {
    "alone": "#94a3b8", "bound": "#0f172a", "gloo": "#c2410c", "ddp": "#2563eb", "ddp int8": "#7c3aed",
    "diloco": "#a16207", "together": "#0f766e",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainTrial:
    """What is measured; checked when built."""

    models: tuple[str, ...] = ("mlp",)
    lines: tuple[int, ...] = (100,)
    """Mbit/s."""
    seeds: tuple[int, ...] = (0,)
    ways: tuple[str, ...] = WAYS
    seconds: float = 60.0
    size: int = 2

    def __post_init__(self) -> None:
        for what, given, known in (("model", self.models, TRAINED_MODELS), ("way", self.ways, WAYS)):
            if unknown := [name for name in given if name not in known]:
                raise ConfigError(f"unknown {what} {', '.join(unknown)}; choose from {', '.join(known)}")
        if self.seconds <= 0 or not 2 <= self.size <= 16 or any(line <= 0 for line in self.lines):
            raise ConfigError("seconds and lines must be above 0, and -n from 2 to 16")


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
    """What one rank does."""

    way: str
    model: str
    seed: int
    seconds: float
    """Of training, without the start; the lowest rank ends the run."""
    rank: int
    size: int
    batch: int
    """Of each rank; for `together`, a part of it of the loader's batch."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class TrainCourse:
    """How a model's loss on held-out text fell in one run."""

    model: str
    way: str
    line: int
    """Mbit/s; 0 if nothing shapes it."""
    seed: int
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


def measure(trial: TrainTrial, say: Callable[[str], None]) -> list[TrainCourse]:
    """Return the course of each run; `say` is told what runs."""
    from covey.testing.netns import Lan, permitted

    if reason := permitted():
        raise ConfigError(f"covey bench train needs network namespaces: {reason}")
    found = []
    for model in trial.models:
        for seed in trial.seeds:
            cases = [(way, 0) for way in trial.ways if way in UNSHAPED]
            cases += [(way, line) for line in trial.lines for way in trial.ways if way not in UNSHAPED]
            for way, line in cases:
                say(f"{model}, seed {seed}: {NAMES[way]}" + (f", {line} Mbit/s" if line else ""))
                size = 1 if way == "alone" else trial.size
                with Lan(hosts=size, rate=f"{line}mbit" if line else "", prefix="covey-train") as lan:
                    points = _run(lan, trial, model, way, seed)
                found.append(TrainCourse(model=model, way=way, line=line, seed=seed, points=points))
    return found


def _run(lan: Lan, trial: TrainTrial, model: str, way: str, seed: int) -> list[tuple[float, int, float]]:
    """Run the ranks of one way until the lowest one has its time; return its course."""
    env = {"BENCH_GLOO": f"tcp://{lan.hosts[0].ip4}:29511", "GLOO_SOCKET_IFNAME": "eth0", "COVEY_SECRET": "5a" * 32}
    ranks = []
    for rank, host in enumerate(lan.hosts):
        order = TrainOrder(
            way=way,
            model=model,
            seed=seed,
            seconds=trial.seconds,
            rank=rank,
            size=len(lan.hosts),
            batch=BATCH_OF_EACH[model],
        )
        command = [sys.executable, "-m", "covey.lab.bench.train_worker", order.as_json()]
        if rank:  # nothing reads what the others say: it must not fill a pipe
            command = ["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", *command]
        ranks.append(host.popen(command, env=env))
    try:
        out, err = ranks[0].communicate(timeout=trial.seconds + TRIAL_START_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(ranks[0].pid, signal.SIGKILL)
        _, err = ranks[0].communicate()
        raise ConfigError(f"{way} did not end in time: {err[-2000:]}") from None
    if ranks[0].returncode:
        raise ConfigError(f"{way} failed: {err[-2000:]}")
    return [(float(at), int(samples), float(loss)) for at, samples, loss in json.loads(out.splitlines()[-1])]


@dataclass(frozen=True)
class TrainRow:
    """What the runs of one way over one line brought, as medians over seeds."""

    model: str
    line: int
    way: str
    seconds: float
    """Until the loss that one machine alone ends with; infinity if it is not reached."""
    of_bound: float
    """The time of the bound, divided by that."""
    against_alone: float
    at_equal_samples: float
    """The loss where the shorter run ends, divided by that of the bound after as many samples."""


def rows(courses: Sequence[TrainCourse]) -> list[TrainRow]:
    """Return a row for each model, line and way for which the runs of one alone and of the bound are there."""
    by_seed: dict[tuple[str, int, str], dict[int, TrainCourse]] = {}
    for course in courses:
        by_seed.setdefault((course.model, course.line, course.way), {})[course.seed] = course
    found = []
    for (model, line, way), runs in by_seed.items():
        figures = []
        for seed, course in runs.items():
            single = by_seed.get((model, 0, "alone"), {}).get(seed)
            bound = by_seed.get((model, 0, "bound"), {}).get(seed)
            if single is None or bound is None or not (single.points and bound.points and course.points):
                continue
            target = single.points[-1][2]
            taken = course.seconds_to(target)
            last = min(course.points[-1][1], bound.points[-1][1])
            pair = course.loss_at(last), bound.loss_at(last)
            equal = pair[0] / pair[1] if pair[0] is not None and pair[1] is not None else math.nan
            figures.append((taken, bound.seconds_to(target) / taken, single.points[-1][0] / taken, equal))
        if figures:
            found.append(TrainRow(model, line, way, *(statistics.median(each) for each in zip(*figures, strict=True))))
    return sorted(found, key=lambda row: (row.model, row.line, WAYS.index(row.way)))


def table(found: Sequence[TrainRow]) -> FittedTable:
    """Return the rows as a table."""
    cells = [
        (
            row.model,
            f"{row.line} Mbit/s" if row.line else "-",
            NAMES[row.way],
            f"{row.seconds:.1f} s" if math.isfinite(row.seconds) else "not reached",
            f"{row.against_alone:.2f}x" if row.against_alone else "-",
            f"{row.of_bound:.2f}" if row.of_bound else "-",
            f"{row.at_equal_samples:.3f}",
        )
        for row in found
    ]
    titles = ("model", "line", "way", "to the loss", "against alone", "of the bound", "loss, equal samples")
    columns = zip(*cells, strict=True) if cells else [()] * len(titles)
    return FittedTable(
        [Column(*each, is_right=place > 2) for place, each in enumerate(zip(titles, columns, strict=True))]
    )


def as_json(courses: Iterable[TrainCourse]) -> list[dict[str, Any]]:
    """Return everything as plain values."""
    return [vars(course) for course in courses]


def from_json(plain: Iterable[dict[str, Any]]) -> list[TrainCourse]:
    """Return what `as_json` made plain."""
    return [TrainCourse(**{**each, "points": [tuple(point) for point in each["points"]]}) for each in plain]


PANEL: Final = (300, 230)
PANEL_MARGIN: Final = (56, 96)


def draw(courses: Sequence[TrainCourse]) -> str:
    """Return an SVG: for each model and line, how the losses of the first seed fell with time."""
    first = min(course.seed for course in courses)
    panels = sorted({(course.model, course.line) for course in courses if course.line})
    lines = sorted({line for _, line in panels})
    models = list(dict.fromkeys(model for model, _ in panels))
    width = PANEL_MARGIN[0] + len(lines) * (PANEL[0] + PANEL_MARGIN[0])
    height = PANEL_MARGIN[1] + len(models) * (PANEL[1] + 70)
    ways = [way for way in WAYS if any(course.way == way for course in courses)]
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
        across, down = 28 + place % 4 * 230, 60 + place // 4 * 18
        kind = way.replace(" ", "-")
        parts.append(f'<line class="line {kind}" x1="{across}" x2="{across + 24}" y1="{down}" y2="{down}"/>')
        parts.append(f'<text class="note" x="{across + 30}" y="{down + 4}">{escape(NAMES[way])}</text>')
    for model, line in panels:
        shown = [
            each
            for each in courses
            if each.model == model and each.seed == first and each.line in (0, line) and each.points
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
        parts.append(f'<polyline class="line {course.way.replace(" ", "-")}" points="{points}"/>')
    return parts
