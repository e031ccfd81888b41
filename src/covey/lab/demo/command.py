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

from covey.cli.terminal import is_lively
from covey.compress.policy import make_policy
from covey.lab.demo import model, processes, view
from covey.lab.demo.progress import LossPoint, Progress
from covey.lab.demo.reports import ROUND
from covey.lab.demo.summary import as_data, checks, summary

ALONE_PATIENCE = 1.5
"""The single node gets this many times `--seconds` for the same samples."""
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial parameters and the batches.")] = 0,
    compress: Annotated[
        str, typer.Option(metavar="CODEC", help="Send gradients in fewer bytes, like int8 or topk(0.01).")
    ] = "",
    no_loss: Annotated[bool, typer.Option("--no-loss", help="Do not kill a process during training.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of a live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")] = False,
) -> None:
    """Show a few processes on this machine that train one model together, lose one of them and get it back.

    They train a model that writes text character by character, from a book. Each process takes its own batches, covey
    averages the gradients, and the parameters stay equal on all of them, bit by bit.

    During the training one process is killed. The others finish the current step and continue. When the process is
    restarted, it gets its state from them. You can kill further processes yourself.

    Afterwards a single node trains on the batches of all, undisturbed, for comparison of the loss.

    Exits with 1 if a check at the end fails.
    """
    console = Console(stderr=as_json)
    show = _Show(console, live=is_lively(console) and not plain, silent=as_json and not console.is_terminal)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, _leave)
    victim = ranks // 2 if ranks > 1 and not no_loss else None
    if compress and make_policy(compress).rules[0][1] is None:
        compress = ""
    plan = processes.DemoRun(ranks, ranks, -(-steps // ROUND), seconds, seed, victim, compress)
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
        console.print(summary(team, alone, victim=victim, mark=show.mark, cores=_cores(), seconds=seconds))
    if not all(check.holds for check in checks(team, alone, victim=victim)):
        raise typer.Exit(1)


def _train_both(show: _Show, plan: processes.DemoRun) -> tuple[Progress, Progress | None]:
    with show:
        team = Progress(plan.nodes, plan.rounds * ROUND, codec=plan.compress)
        show.begin(team, None)
        _train(plan, team, show)
        if plan.nodes == 1:
            return team, None
        alone = Progress(1, team.last.step)
        show.begin(team, alone)
        rounds, seconds = team.last.step // ROUND, ALONE_PATIENCE * plan.seconds
        _train(plan._replace(nodes=1, rounds=rounds, seconds=seconds, victim=None, compress=""), alone, show)
        return team, alone


def _train(plan: processes.DemoRun, progress: Progress, show: _Show) -> None:
    with closing(processes.reports(plan)) as reports:
        for node, report in reports:
            progress.record(node, report)
            show.refresh()
    show.refresh(now=True)


class _Show:
    """Shows progress: as a live view, as a line a second, or not at all."""

    def __init__(self, console: Console, *, live: bool, silent: bool) -> None:
        book = model.load()
        self.mark = model.pair_loss(book.training, book.held_out, len(book.alphabet))
        self._title, self._ceiling = book.title, math.log(len(book.alphabet))
        self._console, self._silent = console, silent
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop") if live else None
        self._due_at = 0.0
        self._said: LossPoint | None = None
        self._sentences = 0
        """How many lines of the story were printed."""

    def __enter__(self) -> _Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, team: Progress, alone: Progress | None) -> None:
        """Show the run of the single node, or that of the team if `alone` is None."""
        self._team, self._alone = team, alone
        if alone is None:
            self._say(f"{team.name} read {self._title}")
        elif self._live is None:
            self._say("one node alone now takes the batches of all, undisturbed")
        self.refresh(now=self._live is not None)

    def refresh(self, *, now: bool = False) -> None:
        """Show the current state, unless it was shown a moment ago."""
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
    """End as Ctrl-C does, so that the ranks end and their folder is removed."""
    raise SystemExit(128 + signum)


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
