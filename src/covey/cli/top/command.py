"""The `covey top` command: shows runs in the terminal, or a line a second where there is none."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Final

import typer

from covey.base.text import printable
from covey.cli.top.loop import TopLoop, print_lines
from covey.cli.top.screen import TopScreen
from covey.cli.top.state import ViewState

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FIRST_PICTURE_SECONDS: Final = 3.0
"""How long the first look may take before the picture is shown without it."""


@app.command()
def top(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Only this run, by its name; by default, all that can be seen.")
    ] = "",
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
) -> None:
    """Watch runs in the terminal: ranks and their waits, machines, links, events and output, every second.

    Keys act: ? lists them, q leaves. Watching changes nothing in a run, and needs nothing of its program; what that
    reports with group.report(step=..., loss=...) is shown as a curve.

    Without a terminal, one line a second is printed.
    """
    from covey.watch.actions import Actions
    from covey.watch.collector import open_collector
    from covey.watch.far_output import outputs_of

    with open_collector(run, cluster) as collector:
        collector.next_after(0, FIRST_PICTURE_SECONDS)
        if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            return print_lines(collector, ViewState(), lambda line: print(printable(line), flush=True))
        encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
        screen = TopScreen(
            sys.stdout.fileno(),
            sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None,
            has_colours=not os.environ.get("NO_COLOR"),
            has_letters=encoding.startswith("utf"),
        )
        TopLoop(collector, Actions(collector, "from covey top"), outputs_of(collector), screen, ViewState()).run()
