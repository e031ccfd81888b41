"""The live view of the demo on a terminal: charts of loss and members, the step in numbers, one row per node."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from covey.lab.demo.progress import LossPoint, NodeRow, Progress

TEAM, ALONE, COMPUTE, SYNC = "cyan", "yellow", "green", "magenta"
STATE_STYLES = {"starting": "dim", "waiting": "yellow", "training": "green", "done": "blue"}
EIGHTHS = " ▁▂▃▄▅▆▇█"
BAR_CELLS = 9
MARGIN = 8
"""Columns left of the chart, for its labels."""
STORY_LINES = 5
NODE_COLUMNS = ("node", "pid", "rank", "loss", "samples/s", "compute", "sync", "ms a step", "state")
ONLY_IF_WIDE = frozenset({"compute", "sync"})
WIDE_TABLE = 78
"""Terminal width from which the table of nodes shows all its columns."""

STRIPS = {"training": ("━", "green"), "done": ("━", "green"), "waiting": ("┄", "yellow"), "starting": ("·", "yellow")}
"""How a node's strip is drawn in each state; a lost node leaves a gap."""
LOST, BACK = ("✕", "bold red"), ("◆", "bold magenta")


class Axis(NamedTuple):
    """The frame of the loss chart."""

    steps: int
    floor: float
    ceiling: float
    mark: float
    """A loss to draw a line at."""


def screen(
    team: Progress, alone: Progress | None, *, mark: float, ceiling: float, width: int, height: int
) -> RenderableType:
    """Return the whole view for a terminal of that size; `alone` is the one-node run once it has begun."""
    now = alone or team
    steps = max(team.steps if alone is None else team.last.step, 1)
    losses = [point.loss for run in (team, alone) if run for point in run.curve]
    axis = Axis(steps, min([1.6, *(loss - 0.05 for loss in losses)]), ceiling, mark)
    width = min(width, 110)
    chart_height = min(max(height - 2 * team.size - STORY_LINES - 6, 4), 12)
    return Group(
        chart(team.curve, alone.curve if alone else [], axis, width=width - MARGIN, height=chart_height),
        strips(team, steps, width=width - MARGIN),
        _legend(team, alone),
        _progress_line(now, "one node alone" if alone else team.name, width),
        _step_line(now),
        *(_story_line(words) for words in team.story[-STORY_LINES:]),
        _node_table(team, alone, width),
    )


def line(run: Progress) -> str:
    """Return the state of a run in one line of plain text."""
    compute, sync = (1e3 * seconds for seconds in run.step_seconds)
    return (
        f"{run.last.seconds:5.1f} s  step {run.last.step:>5}/{run.steps}  held-out loss {run.last.loss:.3f}  "
        f"{compute + sync:.1f} ms a step (compute {compute:.1f}, sync {sync:.1f})  "
        f"{run.samples_per_second:,.0f} samples/s{f'  {run.saving}' if run.saving else ''}"
    )


def chart(team: Sequence[LossPoint], alone: Sequence[LossPoint], axis: Axis, *, width: int, height: int) -> Text:
    """Draw the loss over steps: the team's as an area, the single node's as dots, the mark as a line."""
    cells = [[(" ", "")] * width for _ in range(height)]  # row 0 is the bottom
    mark_row = int(_level(axis.mark, axis) * height)
    cells[mark_row] = [("┄", "dim")] * width
    for column, loss in enumerate(_columns(team, axis, width)):
        filled = _level(loss, axis) * height
        for row in range(height):
            eighths = max(round(8 * min(filled - row, 1.0)), row == 0)
            if eighths > 0:
                cells[row][column] = (EIGHTHS[eighths], TEAM)
    for column, loss in enumerate(_columns(alone, axis, width)):
        cells[int(_level(loss, axis) * height)][column] = ("•", f"bold {ALONE}")

    lines = []
    for row in reversed(range(height)):
        label = {height - 1: axis.ceiling, mark_row: axis.mark, 0: axis.floor}.get(row)
        lead = f"{label:5.2f} │ " if label is not None else "      │ "
        lines.append(Text.assemble((lead, "dim"), *cells[row]))
    return Text("\n").join(lines)


def strips(run: Progress, steps: int, *, width: int) -> Text:
    """Draw under the chart, on the same axis, when each node was training, lost, joining, and back."""
    lines = []
    for node, row in enumerate(run.rows):
        cells = _strip(row, steps, reached=run.reached, width=width)
        lines.append(Text.assemble((f"{f'node {node}':>7}", "dim"), " ", *cells))
    return Text("\n").join(lines)


def _strip(row: NodeRow, steps: int, *, reached: int, width: int) -> list[tuple[str, str]]:
    def column(step: int) -> int:
        return min(step * (width - 1) // steps, width - 1)

    cells = [(" ", "")] * width
    marks = []
    was_lost = False
    for (step, state), (until, _) in itertools.pairwise([*row.history, (reached, "")]):
        for at in range(column(step), column(until) + (state == row.state)):
            cells[at] = STRIPS.get(state, (" ", ""))
        if state == "lost" or (was_lost and state == "training"):
            marks.append((column(step), LOST if state == "lost" else BACK))
            was_lost = state == "lost"
    free = 0
    for at, mark in marks:  # each has a cell of its own, even where steps are narrow
        at = min(max(at, free), width - 1)
        cells[at] = mark
        free = at + 1
    return cells


def _columns(curve: Sequence[LossPoint], axis: Axis, width: int) -> list[float]:
    """Return the loss at each column that the curve has reached."""
    if not curve:
        return []
    at = np.arange(width) / (width - 1) * axis.steps
    reached = at[at <= curve[-1].step]
    return [float(loss) for loss in np.interp(reached, [p.step for p in curve], [p.loss for p in curve])]


def _level(loss: float, axis: Axis) -> float:
    """Return how high the loss stands in the chart, from 0 to just below 1."""
    return min(max((loss - axis.floor) / (axis.ceiling - axis.floor), 0.0), 0.999)


def _legend(team: Progress, alone: Progress | None) -> Text:
    legend = Text(" " * MARGIN, no_wrap=True, overflow="ellipsis")
    legend.append("loss  ", "dim").append("█ ", TEAM).append(f"{team.name} ")
    legend.append(f"{team.last.loss:.2f}" if team.curve else "", style="bold")
    if alone:
        legend.append("  • ", style=f"bold {ALONE}").append("one node ")
        legend.append(f"{alone.last.loss:.2f}" if alone.curve else "", style="bold")
    if team.losses:
        legend.append("  ").append(*LOST).append(" lost  ", style="dim").append(*BACK).append(" back", style="dim")
    legend.append("  ┄ letter pairs", style="dim")
    return legend


def _story_line(words: str) -> Text:
    text = Text(words, no_wrap=True, overflow="ellipsis")
    text.highlight_words(["is killed"], "bold red")
    text.highlight_words([" continue without ", " continues without "], "bold green")
    text.highlight_words(["is back"], "bold magenta")
    if words.startswith("step"):
        text.stylize("dim", 0, 10)
    else:
        text.stylize("dim")
    return text


def _progress_line(run: Progress, label: str, width: int) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    bar = ProgressBar(run.steps, run.last.step, width=max(width - 60, 4), complete_style=TEAM, finished_style=TEAM)
    rate = f"{run.samples_per_second:,.0f} samples/s" if run.last.step else "starting"
    line.add_row(Text(label, style="bold"), f"step {run.last.step:>5} of {run.steps}", bar, rate)
    return line


def _step_line(run: Progress) -> Text:
    if not run.last.step:
        return Text("processes start and connect", style="dim")
    compute, sync = run.step_seconds
    return Text.assemble(
        f"a step {1e3 * (compute + sync):5.1f} ms = ",
        (f"compute {1e3 * compute:.1f}", COMPUTE),
        " + ",
        (f"sync {1e3 * sync:.1f}", SYNC),
        f"   {run.gradient_bytes / 1000:.0f} kB of gradients over {run.lane}" if run.lane else "",
        (f"   {run.saving}" if run.saving else "", TEAM),
        no_wrap=True,
        overflow="ellipsis",
    )


def _node_table(team: Progress, alone: Progress | None, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    longest = max(row.compute + row.sync for run in (team, alone) if run for row in run.rows)
    rows = [[str(node), *_row_cells(row, longest)] for node, row in enumerate(team.rows)]
    rows += [["alone", *_row_cells(alone.rows[0], longest)]] if alone else []
    shown = [at for at, name in enumerate(NODE_COLUMNS) if width >= WIDE_TABLE or name not in ONLY_IF_WIDE]
    for at in shown:
        name = NODE_COLUMNS[at]
        table.add_column(name, justify="left" if name in ("ms a step", "state") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _row_cells(row: NodeRow, longest: float) -> list[RenderableType]:
    state = Text(row.state, style=STATE_STYLES.get(row.state, "red"))
    pid = str(row.pid or "")
    rank = str(row.seat[1]) if row.seat and row.state in ("training", "done") else ""
    if row.loss is None or row.state in ("lost", "killed"):
        return [pid, rank, "", "", "", "", "", state]
    numbers = f"{row.loss:.2f}", f"{row.samples_per_second:,.0f}", f"{1e3 * row.compute:.1f}", f"{1e3 * row.sync:.1f}"
    computing, whole = (round(BAR_CELLS * seconds / longest) for seconds in (row.compute, row.compute + row.sync))
    bar = Text.assemble(("█" * computing, COMPUTE), ("█" * (whole - computing), SYNC))
    return [pid, rank, *numbers, bar, state]
