"""The `covey ui` command: serves the page of this machine's runs and its cluster, and opens it in a browser."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.terminal import say

if TYPE_CHECKING:
    from types import FrameType

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ui(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Show this run only.", show_default=False)] = "",
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Listen at this port of 127.0.0.1.", show_default="a free one")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the link, and open no browser.")] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Print a new link to the page that runs already, at --port or the last one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the link as JSON.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
) -> None:
    """Show machines and runs in a browser, until Ctrl-C: ranks and their waits, curves, links, output, machines that
    ask to join.

    The page is for this user on this machine. To see it from another one, forward a port: ssh -L 8765:127.0.0.1:8765
    HOST covey ui --port 8765. Each link can be used once, within five minutes; covey ui --link prints another.
    """
    from covey.ui.links import new_link

    if link:
        if run or no_browser:
            raise ConfigError("use --link alone, or with --port or --json")
        return _print(new_link(port), as_json=as_json)
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"--port {port} must be 1 to 65535")
    _serve(run, port or 0, cluster, is_browser_wanted=not (no_browser or as_json), as_json=as_json)


def _serve(run: str, port: int, cluster: str | None, *, is_browser_wanted: bool, as_json: bool) -> None:
    """Serve the page until a signal ends it."""
    from contextlib import ExitStack

    from covey.ui.links import LinkFile, opened
    from covey.ui.server import PageServer
    from covey.watch.actions import Actions
    from covey.watch.collector import open_collector
    from covey.watch.far_output import outputs_of
    from covey.watch.past import newest_rows

    is_over = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        is_over.set()

    with ExitStack() as stack:
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in before.items():
            stack.callback(signal.signal, number, handler)
        collector = stack.enter_context(open_collector(run, cluster))
        actions, outputs = Actions(collector, "from the page"), outputs_of(collector)
        page = stack.enter_context(PageServer(collector, actions, outputs, port, past=newest_rows))
        file = stack.enter_context(LinkFile(page.port, page.tickets.link_key))
        link = page.new_link()
        _print(link, as_json=as_json)
        if is_browser_wanted:
            stack.enter_context(opened(page.new_link(), file.folder))
        if not as_json:
            say("It can be used once, within five minutes; `covey ui --link` prints another. Ctrl-C ends the page.")
        is_over.wait()


def _print(link: str, *, as_json: bool) -> None:
    typer.echo(json.dumps({"link": link}) if as_json else f"Open  {link}")
