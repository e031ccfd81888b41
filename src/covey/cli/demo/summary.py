"""What the demo says at the end: several ranks against one, in numbers that can be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from covey.cli.demo.reports import PROMPT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from covey.cli.demo.progress import Point, Progress


def summary(team: Progress, alone: Progress | None, *, mark: float, cores: int) -> RenderableType:
    """Return the closing page: a comparison, what it means, whether the ranks agree, and a piece of writing."""
    scale = f"loss in nats a character: {team.curve[0].loss:.2f} is blind guessing, {mark:.2f} knows letter pairs"
    parts: list[RenderableType] = [_comparison(team, alone), Text(scale, style="dim"), Text()]
    if alone:
        parts += [Text(meaning(team, alone, cores=cores)), Text()]
    if team.lane:
        parts.append(Text(f"every step averaged {team.gradient_bytes / 1000:.0f} kB of gradients over {team.lane}"))
    answer = ("yes", "bold green") if team.identical else ("NO", "bold red")
    parts += [Text.assemble("parameters bit-identical on all ranks: ", answer), Text()]
    parts += [Text("The model writes:", style="bold"), Padding(written(team.writing), (0, 4))]
    return Group(*parts)


def meaning(team: Progress, alone: Progress, *, cores: int) -> str:
    """Say in a sentence or two what several ranks bought on this machine."""
    ratio = team.samples_per_second / alone.samples_per_second
    place = f"{team.size} ranks on {cores} core{'s' if cores > 1 else ''}"
    bound = f"; with fewer cores than ranks, {team.size}x is out of reach" if cores < team.size else ""
    return (
        f"{place} took {ratio:.1f}x as many samples a second as one{bound}. "
        f"What data-parallel training buys is the bigger batch: every step learns from {team.size}x as many samples."
    )


def written(writing: str) -> Text:
    """Return the prompt and what the model made of it, cut after the last whole word."""
    words = writing.rpartition(" ")[0] or writing
    return Text.assemble((PROMPT, "dim"), (" ".join(words.split()), "italic"), (" ...", "dim"))


def as_data(team: Progress, alone: Progress | None, *, mark: float, cores: int) -> dict[str, Any]:
    """Return the whole outcome as plain data, for `--json`."""
    return {
        "ranks": team.size,
        "cores": cores,
        "lane": team.lane,
        "gradient_bytes": team.gradient_bytes,
        "first_loss": team.curve[0].loss,
        "letter_pairs_loss": mark,
        "team": _point(team, team.last),
        "one_rank_same_steps": _point(alone, alone.at_step(team.last.step)) if alone else None,
        "one_rank_same_samples": _point(alone, _same_samples(team, alone)) if alone else None,
        "per_rank": [
            {
                "pid": row.pid,
                "batch_loss": row.loss,
                "samples_per_second": row.samples_per_second,
                "compute_seconds": row.compute,
                "sync_seconds": row.sync,
            }
            for row in team.rows
        ],
        "identical": team.identical,
        "writing": PROMPT + team.writing,
    }


def _comparison(team: Progress, alone: Progress | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("steps", "samples", "seconds", "samples/s", "held-out loss"):
        table.add_column(name, justify="right")
    lines = [(team.name, team, team.last)]
    if alone:
        for name, point in ("steps", alone.at_step(team.last.step)), ("samples", _same_samples(team, alone)):
            lines += [(f"one rank, same {name}", alone, point)] if point else []
        if alone.last.samples < team.last.samples:
            lines.append(("one rank, when its time was over", alone, alone.last))
    for name, run, point in lines:
        numbers = f"{point.step:,}", f"{point.samples:,}", f"{point.seconds:.1f}", f"{run.samples_per_second:,.0f}"
        table.add_row(name, *numbers, Text(f"{point.loss:.3f}", style="bold"))
    return table


def _same_samples(team: Progress, alone: Progress) -> Point | None:
    return alone.at_step(team.last.step * team.size)


def _point(run: Progress, point: Point | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {
        "steps": point.step,
        "samples": point.samples,
        "seconds": point.seconds,
        "samples_per_second": run.samples_per_second,
        "held_out_loss": point.loss,
    }
