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

from covey.cli.demo import processes, text, view
from covey.cli.demo.progress import Point, Progress
from covey.cli.demo.reports import ROUND
from covey.cli.demo.summary import as_data, checks, summary
from covey.cli.terminal import is_lively

ALONE_PATIENCE = 1.5
"""How many times the team's `--seconds` one node alone gets for the same samples."""
PAINT_EVERY = 0.1
SAY_EVERY = 1.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes that train together.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help=f"Training steps, rounded up to a multiple of {ROUND}.")] = 400,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Stop training after this long, whatever --steps says.")
    ] = 12.0,
    seed: Annotated[int, typer.Option(min=0, help="Where parameters and batches come from.")] = 0,
    no_loss: Annotated[bool, typer.Option("--no-loss", help="Kill no process on the way.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of a live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Watch a few processes on this machine train one model together, lose one and get it back.

    They learn to write from a book, a character at a time: each takes its own
    batches, covey averages the gradients, and all of them keep the same
    parameters to the last bit. On the way one is killed: the others finish
    the step they are in and go on, and when it is started again they give it
    their state. Kill others yourself, if you like. Then one node alone takes
    the batches of all, undisturbed, to see where the loss should be.
    Exits with 1 if anything is not as it should be.
    """
    console = Console(stderr=as_json)
    show = _Show(console, live=is_lively(console) and not plain, silent=as_json and not console.is_terminal)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, _leave)
    victim = ranks // 2 if ranks > 1 and not no_loss else None
    plan = processes.Plan(ranks, ranks, -(-steps // ROUND), seconds, seed, victim)
    try:
        team, alone = _train_both(show, plan)
    except KeyboardInterrupt:
        console.print("stopped", style="yellow")
        raise typer.Exit(130) from None
    if as_json:
        data = as_data(team, alone, victim=victim, mark=show.mark, cores=_cores())
        print(msgspec.json.encode(data).decode())
    else:
        console.print()
        console.print(summary(team, alone, victim=victim, mark=show.mark, cores=_cores()))
    if not all(check.holds for check in checks(team, alone, victim=victim)):
        raise typer.Exit(1)


def _train_both(show: _Show, plan: processes.Plan) -> tuple[Progress, Progress | None]:
    with show:
        team = Progress(plan.nodes, plan.rounds * ROUND)
        show.begin(team, None)
        _train(plan, team, show)
        if plan.nodes == 1:
            return team, None
        alone = Progress(1, team.last.step)
        show.begin(team, alone)
        rounds, seconds = team.last.step // ROUND, ALONE_PATIENCE * plan.seconds
        _train(plan._replace(nodes=1, rounds=rounds, seconds=seconds, victim=None), alone, show)
        return team, alone


def _train(plan: processes.Plan, progress: Progress, show: _Show) -> None:
    with closing(processes.reports(plan)) as reports:
        for node, report in reports:
            progress.record(node, report)
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
        self._sentences = 0
        """How much of the story was said."""

    def __enter__(self) -> _Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, team: Progress, alone: Progress | None) -> None:
        """Turn to the run of one node alone, or to the team's while there is no other."""
        self._team, self._alone = team, alone
        if alone is None:
            self._say(f"{team.name} read {self._title}")
        elif self._live is None:
            self._say("one node alone now takes the batches of all, undisturbed")
        self.refresh(now=self._live is not None)

    def refresh(self, *, now: bool = False) -> None:
        """Show how things stand, unless they were shown a moment ago."""
        if self._live is None:
            for words in self._team.story[self._sentences :]:
                self._say(words)
            self._sentences = len(self._team.story)
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
