"""`covey status --watch`: overviews as a table, as one line each, or as JSON."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from covey.cli.layout import NO_VALUE, Column, lay_out, wrap
from covey.cli.terminal import plural

if TYPE_CHECKING:
    from covey.watch.overview import Overview, RankSeen, RunSeen

SENTENCE_STYLES: Final = {"fine": "green", "note": "", "warning": "yellow", "error": "red"}
TABLE_RANKS: Final = 32
"""Rows of a table; of more ranks, those that are not well come first, and the others are counted."""


def as_object(overview: Overview) -> dict[str, Any]:
    """Return an overview as plain values for JSON; numbers that JSON has not are named by strings."""
    found: dict[str, Any] = _plain(asdict(overview))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def line(overview: Overview) -> str:
    """Return an overview in one line."""
    parts = [time.strftime("%H:%M:%S", time.localtime(overview.taken))]
    parts += [_headline(run) for run in overview.runs if run.state != "ended"]
    return "  ".join([*parts, overview.sentence.text])


def _headline(run: RunSeen) -> str:
    live = sum(rank.state not in ("lost", "left", "joining") for rank in run.ranks)
    words = [run.name, run.state, plural(live, "rank")]
    if run.step is not None:
        words.append(f"step {run.step}")
    words += [f"{name} {value:.4g}" for name, value in run.reports.items() if name != "samples"][:4]
    if run.compute_seconds is not None and run.sync_seconds is not None:
        words.append(f"compute {_time(run.compute_seconds)} sync {_time(run.sync_seconds)}")
    return ", ".join(words)


def table(overview: Overview, width: int | None) -> Text:
    """Return an overview for a terminal of this width."""
    lines = [Text(each, SENTENCE_STYLES[overview.sentence.level]) for each in _wrapped(overview.sentence.text, width)]
    for run in overview.runs:
        lines += [Text(), *(Text(each, "bold") for each in _wrapped(_headline(run), width))]
        if run.sentence.text and run.sentence.text != overview.sentence.text:
            lines += [Text(each, SENTENCE_STYLES[run.sentence.level]) for each in _wrapped(run.sentence.text, width)]
        lines += _ranks(run, overview, width)
        lines += [
            Text(each, "dim")
            for event in run.happenings[-3:]
            for each in _wrapped(
                f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {event.kind} {event.text}", width
            )
        ]
    return Text("\n").join(lines)


def _ranks(run: RunSeen, overview: Overview, width: int | None) -> list[Text]:
    machines = {machine.id: machine.name for machine in overview.machines}
    ranks = (
        sorted(run.ranks, key=lambda rank: rank.state == "active")[:TABLE_RANKS]
        if len(run.ranks) > TABLE_RANKS
        else run.ranks
    )
    columns = [
        Column("rank", [NO_VALUE if rank.rank < 0 else str(rank.rank) for rank in ranks], is_right=True),
        Column("machine", [machines.get(rank.machine, "") for rank in ranks], leave_out=2),
        Column("state", [rank.state for rank in ranks]),
        Column("step", [NO_VALUE if rank.step is None else str(rank.step) for rank in ranks], is_right=True),
        Column("compute", [_time(rank.compute) for rank in ranks], is_right=True, leave_out=3),
        Column("sync", [_time(rank.sync) for rank in ranks], is_right=True, leave_out=3),
        Column("doing", [_doing(rank) for rank in ranks], leave_out=1, wraps=True),
    ]
    lines = [Text.assemble(*each) for each in lay_out(columns, width, "dim")]
    return [*lines, Text(f"and {len(run.ranks) - len(ranks)} more", "dim")] if len(ranks) < len(run.ranks) else lines


def _doing(rank: RankSeen) -> str:
    if rank.state in ("lost", "left", "silent", "stopped"):
        return rank.reason
    waits = f", waits for {', '.join(map(str, rank.waits_for[:8]))}" if rank.waits_for else ""
    return f"{rank.operation} {_time(rank.operation_age)}{waits}" if rank.operation else ""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NO_VALUE
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _wrapped(text: str, width: int | None) -> list[str]:
    return [text] if width is None else wrap(text, width)
