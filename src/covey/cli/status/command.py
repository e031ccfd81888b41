"""The `covey status` command: finds nodes, asks each for its state, and shows the answers.

With `--watch` it shows overviews as a table, as one line each, or as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from covey.base.config import check_timeout, group_config
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.cli.layout import NO_VALUE, Column, lay_out, room, wrap
from covey.cli.status.network import measured_networks
from covey.cli.status.picture import as_json as to_json
from covey.cli.status.picture import picture, tellers, with_events
from covey.cli.status.view import local_view, nothing_found, view
from covey.cli.terminal import is_lively, plural, say, working
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
    from covey.watch.overview import Overview, RankSeen, RunSeen

SENTENCE_STYLES: Final = {"fine": "green", "note": "", "warning": "yellow", "error": "red"}
TABLE_RANKS: Final = 32
"""Rows of a table; of more ranks, those that are not well come first, and the others are counted."""
SEARCH_SECONDS: Final = 1.5
PATIENCE_SECONDS: Final = 3.0
"""How long to look while no node answers."""
NODE_ANSWER_SECONDS: Final = 1.0
OVERVIEW_SECONDS: Final = 5.0
"""How long to wait for the next overview before looking again whether Ctrl-C was pressed."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
    from covey.cli.status.drawing import (
        graph,  # most calls do not draw
        svg,
    )

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
    from covey.cli.status.command import as_object, line, table
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
