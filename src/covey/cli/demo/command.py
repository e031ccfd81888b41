"""`covey demo`, the command."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import closing
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from covey.cli.demo import crew, text, view
from covey.cli.demo.progress import Point, Progress
from covey.cli.demo.reports import ROUND
from covey.cli.demo.summary import as_data, summary

ALONE_PATIENCE = 3.0
"""How many times the team's `--seconds` one rank alone gets for the same samples."""
PAINT_EVERY = 0.1
SAY_EVERY = 1.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes that train together.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help=f"Training steps, rounded up to a multiple of {ROUND}.")] = 600,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Stop training after this long, whatever --steps says.")
    ] = 12.0,
    seed: Annotated[int, typer.Option(min=0, help="Where parameters and batches come from.")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of a live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Watch a few processes on this machine train one model together.

    They learn to write from a book, a character at a time: each takes its own
    batches, covey averages the gradients, and all of them keep the same
    parameters to the last bit. Then one rank alone takes as many samples.
    """
    console = Console(stderr=as_json)
    show = _Show(console, live=console.is_terminal and not plain, silent=as_json and not console.is_terminal)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, _leave)
    try:
        team, alone = _train_both(show, ranks, -(-steps // ROUND), seconds, seed)
    except KeyboardInterrupt:
        console.print("stopped", style="yellow")
        raise typer.Exit(130) from None
    if as_json:
        print(msgspec.json.encode(as_data(team, alone, mark=show.mark, cores=_cores())).decode())
    else:
        console.print()
        console.print(summary(team, alone, mark=show.mark, cores=_cores()))
    if not team.identical:
        raise typer.Exit(1)


def _train_both(show: _Show, ranks: int, rounds: int, seconds: float, seed: int) -> tuple[Progress, Progress | None]:
    with show:
        team = Progress(ranks, rounds * ROUND)
        show.begin(team, None)
        _train(team, show, rounds=rounds, seconds=seconds, seed=seed)
        if ranks == 1:
            return team, None
        rounds_alone = team.last.step * ranks // ROUND
        alone = Progress(1, rounds_alone * ROUND)
        show.begin(team, alone)
        _train(alone, show, rounds=rounds_alone, seconds=ALONE_PATIENCE * seconds, seed=seed)
        return team, alone


def _train(progress: Progress, show: _Show, *, rounds: int, seconds: float, seed: int) -> None:
    with closing(crew.reports(progress.size, rounds=rounds, seconds=seconds, seed=seed)) as reports:
        for rank, report in reports:
            progress.record(rank, report)
            show.refresh()
    show.refresh(now=True)


class _Show:
    """Tells what goes on while it goes on: a live view, or a line a second, or nothing."""

    def __init__(self, console: Console, *, live: bool, silent: bool) -> None:
        book = text.load()
        self.mark = text.pair_loss(book.training, book.held_out, len(book.alphabet))
        self._title, self._ceiling = book.title, math.log(len(book.alphabet))
        self._console, self._silent = console, silent
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if live else None
        self._due_at = 0.0
        self._said: Point | None = None

    def __enter__(self) -> _Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, team: Progress, alone: Progress | None) -> None:
        """Turn to the run of one rank alone, or to the team's while there is no other."""
        self._team, self._alone = team, alone
        if alone is None:
            self._say(f"{team.name} read {self._title}")
        elif self._live is None:
            self._say(f"one rank alone now takes as many samples, in {alone.steps:,} steps")
        self.refresh(now=self._live is not None)

    def refresh(self, *, now: bool = False) -> None:
        """Show how things stand, unless they were shown a moment ago."""
        if self._silent or (not now and time.monotonic() < self._due_at):
            return
        run = self._alone or self._team
        if self._live:
            width, height = self._console.size
            self._live.update(
                view.screen(self._team, self._alone, mark=self.mark, ceiling=self._ceiling, width=width, height=height),
                refresh=True,
            )
            self._due_at = time.monotonic() + PAINT_EVERY
        elif run.last.step and run.last != self._said:
            self._say(view.line(run))
            self._said = run.last
            self._due_at = time.monotonic() + SAY_EVERY

    def _say(self, words: str) -> None:
        if not self._silent:
            self._console.print(words, soft_wrap=True, highlight=False)


def _leave(signum: int, _: object) -> None:
    """End as Ctrl-C does, so that the ranks and their folder go, too."""
    raise SystemExit(128 + signum)


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
