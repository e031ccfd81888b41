"""`covey ps`: lists the programs that agents of the cluster have started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.config import group_config
from covey.base.errors import CoveyError
from covey.cli.layout import Column, room, table
from covey.cli.terminal import say, working
from covey.net.host.settings_files import effective_environment
from covey.net.keys import trust
from covey.net.keys.identity import id_text
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.agent.callers import AgentCaller, Terminal
    from covey.agent.requests import JobReport
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.trust import TrustedMachine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", help="Also list programs that have ended.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the programs that run on machines of the cluster, started with `covey run --on`."""
    from covey.agent.callers import calling

    env = effective_environment()
    chosen = ClusterOptions(cluster).find(env)
    with (
        calling(chosen, group_config(env)) as terminal,
        working("looking for agents ...", quiet=as_json),
    ):
        found = reports(terminal, trust.trusted(chosen), quiet=as_json)
    shown = [(agent, each) for agent, listed in found for each in listed if everything or each.code is None]
    if as_json:
        return typer.echo(json.dumps([_as_row(agent.name, each) for agent, each in shown]))
    if not shown:
        return say(f"No program runs on {', '.join(agent.name for agent, _ in found)}." if found else _NO_AGENT)
    columns = [
        Column("RUN", [each.run for _, each in shown]),
        Column("MACHINE", [agent.name for agent, _ in shown]),
        Column("STATE", [_state(each) for _, each in shown]),
        Column("PROCESSES", [str(each.processes) for _, each in shown], leave_out=2),
        Column("RAN FOR", [_lasted(each.seconds) for _, each in shown], leave_out=3),
        Column("STARTED BY", [each.started_by for _, each in shown], leave_out=1),
    ]
    typer.echo(table(columns, room()))


_NO_AGENT = "No agent was found: run `covey up` on the machines that should start programs."


def trusted_reports(terminal: Terminal, cluster: Cluster) -> list[tuple[AgentCaller, list[JobReport]]]:
    """Return the agents of trusted machines that this machine may use, and their programs; name the others."""
    book = trust.trusted(cluster)
    found = reports(terminal, book)
    for agent, listed in found:
        if agent.machine not in book and listed:
            say(
                f"{agent.name} is not a machine that this one trusts, and is left out; "
                f"`covey trust {id_text(agent.machine)}` here changes that",
                err=True,
            )
    return [(agent, listed) for agent, listed in found if agent.machine in book]


def reports(
    terminal: Terminal, book: Mapping[bytes, TrustedMachine], *, quiet: bool = False
) -> list[tuple[AgentCaller, list[JobReport]]]:
    """Return all agents that this machine may use, and their programs, the oldest first."""
    from covey.agent.callers import AGENT_SEARCH_SECONDS

    terminal.visit.look(AGENT_SEARCH_SECONDS)
    found = []
    for agent in terminal.agents(book):
        try:
            found.append((agent, [each for page in agent.stream("programs") for each in page]))
        except CoveyError as error:
            if not quiet:
                say(str(error), err=True)
    return found


def _state(report: JobReport) -> str:
    return "running" if report.code is None else f"ended with {report.code}"


def _lasted(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return (
        f"{hours // 24} d"
        if hours > 48
        else f"{hours} h"
        if hours
        else f"{minutes} min"
        if minutes
        else f"{seconds:.0f} s"
    )


def _as_row(machine: str, report: JobReport) -> dict[str, object]:
    return {
        "run": report.run,
        "machine": machine,
        "code": report.code,
        "processes": report.processes,
        "seconds": round(report.seconds, 1),
        "started_by": report.started_by,
        "words": list(report.words),
        "folder": report.folder,
    }
