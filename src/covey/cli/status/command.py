"""The `covey status` command: finds nodes, asks each for its state, and shows the answers."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from covey.base.config import check_timeout, group_config
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.cli.layout import room
from covey.cli.status.asking import measured_networks
from covey.cli.status.picture import as_json as to_json
from covey.cli.status.picture import picture, tellers, with_events
from covey.cli.status.view import local_view, nothing_found, view
from covey.cli.terminal import is_lively, say, working
from covey.net.host.runs import local_runs
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions
from covey.runtime.events import decode_last
from covey.runtime.metrics.inspection import EVENTS
from covey.runtime.peers.visit import visiting
from covey.wire import messages

if TYPE_CHECKING:
    from covey.cli.status.network import RunNetwork
    from covey.cli.status.picture import Picture
    from covey.net.host.runs import LocalRunFound
    from covey.runtime.events import Event
    from covey.runtime.peers.visit import Visit

SEARCH_SECONDS: Final = 1.5
PATIENCE_SECONDS: Final = 3.0
"""How long to look while no node answers."""
NODE_ANSWER_SECONDS: Final = 1.0
OVERVIEW_SECONDS: Final = 5.0
"""How long to wait for the next overview before looking again whether Ctrl-C was pressed."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def status(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch, one object a line.")] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Show what runs do, every second, until Ctrl-C: a line each, outside of a terminal."
        ),
    ] = False,
    as_graph: Annotated[
        bool, typer.Option("--graph", help="Draw machines, sites and the speeds of links, as the ranks measured them.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write that drawing to a file, as SVG.", show_default=False)
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Seconds to look for nodes.",
            show_default=f"{SEARCH_SECONDS:g}, or {PATIENCE_SECONDS:g} while no node answers",
        ),
    ] = None,
) -> None:
    """Show the nodes of the cluster by run, the links between them, its agents, and the runs of covey run -n here.

    Exits with 0 if there is a node, an agent or a run here, and with 1 if there is none.
    """
    env = effective_environment()
    config = group_config(env)
    if wait is not None:
        check_timeout(wait)
    console = Console(highlight=False)
    if watch:
        return _watch(cluster, console, as_json=as_json)
    try:
        found = ClusterOptions(cluster).find(env)
    except ConfigError:
        if cluster is not None or not (here := local_runs()):
            raise
        return _show_alone(here, console, as_json=as_json)
    with visiting(found, config, announce=False) as visit:
        with working(f"looking for nodes of {found.name} ...", quiet=as_json):
            look_around(visit, wait)
        if as_graph or svg is not None:
            return _draw(visit, console, svg, is_shown=as_graph)
        seen = take(visit, has_events=as_json)
    here = local_runs() if cluster is None else []
    if as_json:
        typer.echo(json.dumps(to_json(seen) | {"local": [run._asdict() for run in here]}))
    else:
        if seen.runs or seen.silent or seen.refused or seen.agents:
            console.print(view(seen, room()), soft_wrap=True)
        if seen.is_empty:
            say(nothing_found(seen.cluster), err=True)
        if here:
            console.print(local_view(here, room()), soft_wrap=True)
    raise typer.Exit(1 if seen.is_empty and not here else 0)


def _show_alone(here: list[LocalRunFound], console: Console, *, as_json: bool) -> None:
    """Show the runs of a machine that is in no cluster."""
    if as_json:
        typer.echo(json.dumps({"cluster": None, "runs": [], "local": [run._asdict() for run in here]}))
    else:
        console.print(local_view(here, room()), soft_wrap=True)


def look_around(visit: Visit, seconds: float | None = None) -> None:
    """Search for running nodes for `seconds`; by default, SEARCH_SECONDS, or PATIENCE_SECONDS while none is found."""
    visit.look(SEARCH_SECONDS if seconds is None else seconds)
    if seconds is None and not visit.members():
        visit.look(PATIENCE_SECONDS - SEARCH_SECONDS, until=lambda visit: bool(visit.members()))


def take(visit: Visit, *, has_events: bool) -> Picture:
    """Ask every node for its state, and one of each run for its last events; combine the answers."""
    seen = visit.members()
    answers = visit.ask_all([state.card for state in seen], messages.Ask(), NODE_ANSWER_SECONDS)
    mesh = visit.mesh
    drawn = picture(mesh.cluster.name, seen, answers, dict(mesh.problems.refusals), visit.agents())
    return with_events(drawn, last_events(visit, tellers(seen, answers))) if has_events else drawn


def _draw(visit: Visit, console: Console, path: Path | None, *, is_shown: bool) -> None:
    """Show the links of all runs, or write them to a file; exit with 1 if there is no run."""
    from covey.cli.status.drawing import svg
    from covey.cli.status.graph import graph  # most calls do not draw

    found = networks(visit)
    for name, network in found.items():
        if is_shown:
            console.print(graph(name, network, room()), soft_wrap=True)
    if not found:
        say(nothing_found(visit.mesh.cluster.name), err=True)
        raise typer.Exit(1)
    if path is not None:
        drawn = [(name, network) for name, network in found.items() if network is not None]
        if not drawn:
            raise ConfigError("no run of the cluster has measured its links yet, so there is nothing to draw")
        path.write_text(svg(drawn))


def networks(visit: Visit) -> dict[str, RunNetwork | None]:
    """Return what the nodes of each run have measured of their links; None for a run that has not measured."""
    cards = [state.card for state in visit.members()]
    return measured_networks(
        visit, cards, visit.ask_all(cards, messages.Ask(), NODE_ANSWER_SECONDS), NODE_ANSWER_SECONDS
    )


def last_events(visit: Visit, to_ask: dict[str, messages.Card]) -> dict[str, list[Event]]:
    """Return the last events of each run, by name; none of a run whose node does not answer."""
    answers = visit.ask_all(list(to_ask.values()), messages.Inspect(EVENTS), NODE_ANSWER_SECONDS)
    told: dict[str, list[Event]] = {}
    for run, answer in zip(to_ask, answers, strict=True):
        if isinstance(answer, messages.Inspected) and answer.what == EVENTS and answer.pages:
            with contextlib.suppress(RemoteProtocolError):
                told[run] = decode_last(answer.body)
    return told


def _watch(cluster: str | None, console: Console, *, as_json: bool) -> None:
    """Show overviews as they come: a table in a terminal, else a line or an object of JSON each second."""
    from covey.cli.status.live import as_object, line, table
    from covey.watch.collector import open_collector

    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # SIGTERM, too, ends in good order
    live = Live(console=console, screen=False, auto_refresh=False) if is_lively(console) and not as_json else None
    with (
        contextlib.suppress(KeyboardInterrupt),
        open_collector(cluster=cluster) as collector,
        live or contextlib.nullcontext(),
    ):
        serial = 0
        while True:
            seen = collector.next_after(serial, OVERVIEW_SECONDS)
            if seen is None:
                continue
            serial = seen.serial
            if as_json:
                print(json.dumps(as_object(seen), allow_nan=False), flush=True)
            elif live is not None:
                live.update(table(seen, room()), refresh=True)
            else:
                print(line(seen), flush=True)
