"""`covey push`: sends a data set or a model file once to machines with agents, where `covey.data` finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from covey.base.config import group_config, split_list
from covey.base.errors import ConfigError
from covey.base.text import size_text
from covey.cli import consent
from covey.cli.terminal import plural, say, working
from covey.net.host.settings_files import effective_environment
from covey.net.keys import trust
from covey.net.keys.identity import own_machine
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.agent.callers import FoundAgents
    from covey.agent.data_folder import DataFolder
    from covey.agent.push import DataWanted, Pushed
    from covey.agent.requests import FileEntry

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Elsewhere(NamedTuple):
    """A data set that this machine does not have, as a person is asked about it."""

    folder: str
    size: int
    entries: tuple[FileEntry, ...]


@app.command()
def push(
    what: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A folder or a file; or the name of a data set that another machine has."),
    ],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What programs call it: covey.data(NAME).", show_default="that of PATH"),
    ] = None,
    to: Annotated[
        str, typer.Option(metavar="all|A,B", help="Send it to these machines, or to all that are trusted.")
    ] = "all",
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Also send these files, which may hold secrets; may be given repeatedly."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask before files are sent to a machine for the first time.")
    ] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send a data set or a model file to machines where covey up runs. Programs there find it with covey.data(NAME).

    Only chunks that a machine does not have are sent, from any machine that has them, and each is checked. After an
    interruption, the same command sends the rest.
    """
    from covey.agent import push as pushing
    from covey.agent.callers import calling
    from covey.agent.data_sets import check_data_name
    from covey.runtime.progress_bar import ProgressBar

    path = Path(what)
    is_here = path.exists()
    called = check_data_name(name or (path.resolve().name if is_here else what))
    names = split_list(to)
    if not names:
        raise ConfigError("--to names no machine; write --to all, or --to north,south")
    env = effective_environment()
    chosen = ClusterOptions(cluster).find(env)
    folder = _read(path, called, tuple(include or ()), is_quiet=as_json) if is_here else None
    try:
        with calling(chosen, group_config(env)) as terminal:
            book = trust.trusted(chosen)
            with working(f"looking for agents of {chosen.name} ...", quiet=as_json):
                found = terminal.find(None if names == ("all",) else names, book)
                found = _without_own(found)
                trusted = [each for each in terminal.agents(book) if each.machine in book]
                reports = pushing.listed(trusted)
            if folder is None:
                wanted = pushing.found_elsewhere(called, reports)
                shown: DataFolder | _Elsewhere = _Elsewhere(f"the data set {called!r}", wanted.size, ())
            else:
                manifest, shown = folder.manifest, folder
                wanted = pushing.DataWanted(called, manifest.digest, manifest.size, len(manifest.encoded), folder)
                consent.tell_left_out(folder, found.left_out)
            agents = consent.ask_to_send(chosen, found, book, shown, yes=yes)
            holders = [agent for agent, answer in reports.items() if _has(answer, wanted)]
            with ProgressBar(called, 0, wanted=False if as_json else None) as bar:
                outcomes = pushing.push(terminal, wanted, agents, holders, bar)
    finally:
        if folder is not None:
            folder.close()
    _tell(wanted, outcomes, as_json=as_json)
    if any(each.problem for each in outcomes):
        raise typer.Exit(1)


def _read(path: Path, name: str, includes: tuple[str, ...], *, is_quiet: bool) -> DataFolder:
    """Read what is pushed, and let programs of this machine find it."""
    from covey.agent import data_store
    from covey.agent.data_folder import folder_size, read_data
    from covey.runtime.progress_bar import ProgressBar

    with ProgressBar("reading", folder_size(path), wanted=False if is_quiet else None) as bar:
        folder = read_data(path, includes, data_store.digests_file(name), bar.show)
    data_store.remember_pushed(name, folder.path, folder.manifest)
    return folder


def _without_own(found: FoundAgents) -> FoundAgents:
    """Leave the agent of this machine out: programs here find the files where they are."""
    own = own_machine()
    left = type(found)(*([each for each in agents if each.machine != own] for agents in found))
    if not left.trusted and not left.new:
        raise ConfigError("no agent of another machine was found: run `covey up` on the machines that are to get it")
    return left


def _has(answer: object, wanted: DataWanted) -> bool:
    return isinstance(answer, list) and any(each.digest == wanted.digest and each.is_complete for each in answer)


def _tell(wanted: DataWanted, outcomes: Sequence[Pushed], *, as_json: bool) -> None:
    if as_json:
        machines = [
            {
                "machine": each.machine,
                "id": each.id.hex(),
                "was_there": each.was_there,
                "bytes_from_here": each.from_here,
                "bytes_from_others": each.from_others,
                "seconds": round(each.seconds, 3),
                "problem": each.problem or None,
            }
            for each in outcomes
        ]
        head = {"name": wanted.name, "digest": wanted.digest.hex(), "bytes": wanted.size}
        return typer.echo(json.dumps({**head, "machines": machines}))
    size = size_text(wanted.size)
    for each in outcomes:
        if each.problem:
            text = each.problem if each.problem.startswith(f"{each.machine}:") else f"{each.machine}: {each.problem}"
            say(f"error: {text}", err=True)
        elif each.was_there:
            say(f"{each.machine}: has {wanted.name} ({size}) already")
        else:
            sent, rest = size_text(each.from_here), size_text(each.from_others)
            others = f", {rest} from other machines" if each.from_others else ""
            say(f"{each.machine}: has {wanted.name} ({size}); {sent} were sent from here{others}")
    good = [each for each in outcomes if not each.problem]
    if good:
        say(f'Programs on {plural(len(good), "machine")} find it with covey.data("{wanted.name}").')
