"""`covey data`: lists the data sets of this machine and of machines with agents, and removes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from covey.base.config import group_config, split_list
from covey.base.errors import ConfigError, CoveyError
from covey.base.text import size_text
from covey.cli.layout import Column, room, table
from covey.cli.terminal import confirm, say, working
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, trust
from covey.net.keys.identity import own_machine
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.agent.callers import AgentCaller
    from covey.agent.data_sets import DataReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

THIS_MACHINE: Final = "here"
PUSHED: Final = "pushed from here"


@app.command()
def data(
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Remove this data set.", show_default=False)
    ] = None,
    on: Annotated[
        str,
        typer.Option(metavar="all|here|A,B", help="On these machines; all: here and on all that are trusted."),
    ] = "all",
    yes: Annotated[bool, typer.Option("--yes", help="With --remove: do not ask.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the data sets that covey push has sent: on this machine, and on trusted machines where covey up runs.

    Removing never touches a folder from which a data set was pushed.
    """
    names = split_list(on)
    if not names:
        raise ConfigError("--on names no machine; write --on all, --on here, or --on north,south")
    rows: list[dict[str, Any]] = _here() if names in (("all",), (THIS_MACHINE,)) else []
    if names == (THIS_MACHINE,) or (names == ("all",) and cluster is None and not clusters.list_clusters()):
        if remove is not None:
            return _remove_all(remove, rows, {}, yes=yes, as_json=as_json)
        return _show(rows, as_json=as_json)
    from covey.agent.callers import calling
    from covey.agent.push import listed

    env = effective_environment()
    chosen = ClusterOptions(cluster).find(env)
    with calling(chosen, group_config(env)) as terminal:
        with working("looking for agents ...", quiet=as_json):
            agents = _agents(terminal, names, trust.trusted(chosen))
            found = listed(agents)
        for agent, answer in found.items():
            if isinstance(answer, CoveyError):
                say(str(answer), err=True)
            else:
                rows += [_row(agent.name, each) for each in answer]
        if remove is not None:
            return _remove_all(remove, rows, {agent.name: agent for agent in found}, yes=yes, as_json=as_json)
    _show(rows, as_json=as_json)


def _agents(terminal: Any, names: tuple[str, ...], book: Mapping[bytes, Any]) -> list[AgentCaller]:
    """Return the agents of trusted machines that are meant, other than this one."""
    from covey.agent.callers import AGENT_SEARCH_SECONDS

    if names == ("all",):
        terminal.visit.look(AGENT_SEARCH_SECONDS)
        own = own_machine()
        return [each for each in terminal.agents(book) if each.machine in book and each.machine != own]
    return list(terminal.find(names, book).trusted)


def _here() -> list[dict[str, Any]]:
    """Return what this machine has pushed, and what it has got."""
    from covey.agent.data_store import DataStore, pushed_here

    pushed = [
        {
            "name": each.name,
            "machine": THIS_MACHINE,
            "bytes": each.size,
            "bytes_there": each.size,
            "files": each.files,
            "digest": each.digest,
            "state": PUSHED,
            "came_from": None,
            "path": each.path,
        }
        for each in pushed_here()
    ]
    return pushed + [_row(THIS_MACHINE, each) for each in DataStore().reports()]


def _row(machine: str, report: DataReport) -> dict[str, Any]:
    state = "incomplete" if not report.is_complete else "in use" if report.is_used else "complete"
    return {
        "name": report.name,
        "machine": machine,
        "bytes": report.size,
        "bytes_there": report.there,
        "files": report.files,
        "digest": report.digest.hex(),
        "state": state,
        "came_from": report.came_from or None,
        "path": report.path,
    }


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    rows = sorted(rows, key=lambda row: (row["name"], row["machine"] != THIS_MACHINE, row["machine"]))
    if as_json:
        return typer.echo(json.dumps(rows))
    if not rows:
        return say("There is no data set: `covey push FOLDER` sends one to machines where `covey up` runs.")
    columns = [
        Column("NAME", [row["name"] for row in rows]),
        Column("MACHINE", [row["machine"] for row in rows]),
        Column("SIZE", [size_text(row["bytes"]) for row in rows]),
        Column("FILES", [str(row["files"]) for row in rows], leave_out=2),
        Column("STATE", [_state(row) for row in rows]),
        Column("CAME FROM", [row["came_from"] or "" for row in rows], leave_out=1),
    ]
    typer.echo(table(columns, room()))


def _state(row: dict[str, Any]) -> str:
    if row["state"] != "incomplete":
        return str(row["state"])
    return f"incomplete, {100 * row['bytes_there'] // max(1, row['bytes'])} %"


def _remove_all(
    name: str, rows: list[dict[str, Any]], agents: Mapping[str, AgentCaller], *, yes: bool, as_json: bool
) -> None:
    """Remove a data set wherever the rows have it, once the person has agreed."""
    from covey.agent.data_store import DataStore, forget_pushed

    meant = [row for row in rows if row["name"] == name]
    if not meant:
        raise ConfigError(f"no data set {name!r} was found; `covey data` lists them")
    where = list(dict.fromkeys(row["machine"] for row in meant))
    what = f"the data set {name!r} ({size_text(meant[0]['bytes'])}) on {', '.join(where)}"
    confirm(f"Remove {what}?", yes=yes, refusal=f"this removes {what}")
    outcomes = []
    for machine in where:
        freed, problem = 0, None
        try:
            if machine != THIS_MACHINE:
                freed = agents[machine].call("remove_data", name)
            else:
                forget_pushed(name)
                if any(row["state"] != PUSHED for row in meant if row["machine"] == THIS_MACHINE):
                    freed = DataStore().remove(name)
        except CoveyError as error:
            problem = str(error)
        outcomes.append({"machine": machine, "bytes": freed, "problem": problem})
    if as_json:
        typer.echo(json.dumps({"name": name, "removed": outcomes}))
    for each in [] if as_json else outcomes:
        if each["problem"] is None:
            size = size_text(int(each["bytes"] or 0))
            what = (
                f"is removed; that frees {size}" if each["bytes"] else "is forgotten; the files that were pushed stay"
            )
            say(f"{each['machine']}: {name} {what}")
        else:
            say(f"error: {each['problem']}", err=True)
    if any(each["problem"] for each in outcomes):
        raise typer.Exit(1)
