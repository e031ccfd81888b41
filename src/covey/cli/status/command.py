"""The `covey status` command: look around, ask everyone, show."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from covey.base.config import check_timeout, group_config
from covey.cli.status.picture import as_json as to_json
from covey.cli.status.picture import picture
from covey.cli.status.view import nobody, view
from covey.runtime.places import ClusterOptions
from covey.runtime.visit import visiting
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.cli.status.picture import Picture
    from covey.runtime.visit import Visit

LOOK_SECONDS: Final = 1.5
PATIENCE_SECONDS: Final = 3.0
"""How long to look if nobody is there."""
ANSWER_SECONDS: Final = 1.0
WATCH_SECONDS: Final = 2.0
PLAIN_WIDTH: Final = 140
"""Columns where there is no terminal to ask."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one object a line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds to look around.", show_default=f"{LOOK_SECONDS}, or 3 while nobody answers"
        ),
    ] = None,
) -> None:
    """Show who is in the cluster, in which runs, and how they reach each other.

    Exits with 0 if somebody is there, and with 1 if nobody is.
    """
    config = group_config(os.environ)
    if wait is not None:
        check_timeout(wait)
    found = ClusterOptions(cluster).find(os.environ)
    console = _console()
    with visiting(found, config, announce=False) as visit:
        with _spinner(f"looking around in {found.name} ...", quiet=as_json):
            look_around(visit, wait)
        if watch:
            return _watch(visit, console, as_json=as_json)
        seen = take(visit)
    if as_json:
        typer.echo(json.dumps(to_json(seen)))
    else:
        console.print(view(seen))
        if seen.is_empty:
            typer.echo(nobody(seen.cluster), err=True)
    raise typer.Exit(1 if seen.is_empty else 0)


def look_around(visit: Visit, seconds: float | None = None) -> None:
    """Wait until those who are there were met: for `seconds`, or as long as it mostly takes."""
    visit.look(LOOK_SECONDS if seconds is None else seconds)
    if seconds is None and not visit.members():
        visit.look(PATIENCE_SECONDS - LOOK_SECONDS, until=lambda visit: bool(visit.members()))


def take(visit: Visit) -> Picture:
    """Ask everyone how things stand, and put it together."""
    seen = visit.members()
    answers = visit.ask_all([state.card for state in seen], messages.Ask(), ANSWER_SECONDS)
    gathering = visit.gathering
    return picture(gathering.cluster.name, seen, answers, dict(gathering.refusals))


def _watch(visit: Visit, console: Console, *, as_json: bool) -> None:
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # leave in good order then, too
    live = Live(console=console, screen=False, auto_refresh=False) if console.is_terminal and not as_json else None
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            seen = take(visit)
            shown = nobody(seen.cluster) if seen.is_empty else view(seen)
            if as_json:
                print(json.dumps(to_json(seen)), flush=True)
            elif live is not None:
                live.update(shown, refresh=True)
            else:
                console.print(time.strftime("%H:%M:%S"), shown, "", sep="\n", markup=False)
                sys.stdout.flush()
            visit.look(WATCH_SECONDS)


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


@contextlib.contextmanager
def _spinner(text: str, *, quiet: bool) -> Iterator[None]:
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal and not quiet else contextlib.nullcontext():
        yield
