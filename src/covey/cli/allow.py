"""`covey allow`: edits the list of machines that the owner approves for a cluster."""

from __future__ import annotations

import enum
import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.errors import ConfigError
from covey.cli.charter import SPREAD_ANSWER_SECONDS, among, as_rows, label, machine_of, named, spread, tell_result
from covey.cli.layout import Column, room, table
from covey.cli.terminal import confirm, say
from covey.net.audit import audit_log
from covey.net.keys import charter, clusters, owner
from covey.net.keys.identity import id_text, is_whole_id, machine_name, meant_ids, own_machine, resolve_id, short_id
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.net.keys.clusters import Cluster
    from covey.net.keys.owner import OwnerKey

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class OnOff(enum.StrEnum):
    """Whether machines need the owner's approval."""

    ON = "on"
    OFF = "off"


@app.command()
def allow(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name, its id, or four or more letters of its id.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    ask: Annotated[
        OnOff | None, typer.Option("--ask", help="on: only approved machines may join. off: all with the secret.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the node off the list again.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the machines that are approved.")] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask before the list is switched on, or whether the id of NODE is right."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Approve machines that wait to be in a cluster. Without NODE: show the waiting machines, and ask about each.

    `covey allow --ask on` makes the list; it begins with the machines that are known here. From then on, a machine with
    the secret that is not on the list is refused until it is approved here, on the machine with the owner key.

    Approval binds the name that is shown to the key of the machine, for all members: `covey run --on` and `covey up
    --allow` mean this key by that name.
    """
    if (node is not None) + (ask is not None) + listed > 1 or (undo and node is None):
        raise ConfigError(
            "use `covey allow`, `covey allow NODE [--undo]`, `covey allow --list` or `covey allow --ask on|off`"
        )
    found = clusters.find_saved(cluster)
    if listed:
        return _list(found, as_json=as_json)
    private = owner.require(found, "approving machines")
    if ask is not None:
        return _switch(found, private, is_on=ask is OnOff.ON, yes=yes, as_json=as_json)
    _, allowed = charter.lists(found)
    if allowed is None:
        return _say_that_the_list_is_off(found, node, as_json=as_json)
    if node is None:
        return _show_waiting(found, private, as_json=as_json)
    names = _names(found)
    if undo:
        machine = machine_of(found, named(found, node, {each: names.get(each, "") for each in allowed} | names))
        if machine not in allowed:
            raise ConfigError(f"{label(machine, names)} is not on the list; `covey allow --list` shows it")
        if machine == own_machine():
            raise ConfigError("this machine itself stays on the list; `covey allow --ask off` ends the list")
        return _amend(
            found, private, allowed - {machine}, f"{label(machine, names)} is off the list.", {}, as_json=as_json
        )
    names |= clusters.waiting(found.name)
    try:
        meant = resolve_id(node, {})  # a whole id means one machine
    except ConfigError:  # a name or the start of an id may mean several nodes, which running nodes know
        names |= {each.id: each.name for each in _waiting(found, quiet=as_json)}
        meant = resolve_id(node, names)
    machine = machine_of(found, meant)
    name = names.get(machine) or names.get(meant, "")
    if not is_whole_id(node):
        say(f"The machine that calls itself {name or '(unknown)'} has the id {id_text(machine)}.", err=True)
        refusal = f"the id of {label(machine, names)} is to be compared with what `covey up` prints there"
        confirm("Is that the machine to approve?", yes=yes, refusal=refusal)
    _tell_same_name(found, machine, name)
    clusters.forget_waiting(found.name, [machine])
    headline = f"{label(machine, names)} may be in {found.name!r}."
    _amend(found, private, allowed | {machine}, headline, {machine: name}, as_json=as_json)


def _tell_same_name(found: Cluster, machine: bytes, name: str) -> None:
    """Say that an approved machine has the same name as another one: they are told apart by their ids."""
    host = machine_name(name, machine).rpartition("-")[0] if name else ""
    others = {each: other for each, other in charter.bound_names(found).items() if each != machine}
    for other in meant_ids(host, others) if host else []:
        say(f"{others[other]} ({id_text(other)}) has the same name; `covey run --on` needs the id for both.", err=True)


_OFF: Final = "Every machine with the secret of {!r} may join, unless it is denied."


def _say_that_the_list_is_off(found: Cluster, node: str | None, *, as_json: bool) -> None:
    """Say that there is nothing to approve; ConfigError if a node was named."""
    text = f"{_OFF.format(found.name)} `covey allow --ask on` makes a list of approved machines."
    if node is not None:
        raise ConfigError(f"there is no list of approved machines. {text}")
    if as_json:
        return typer.echo("[]")
    say(text)


def _switch(found: Cluster, private: OwnerKey, *, is_on: bool, yes: bool, as_json: bool) -> None:
    names, allowed = _names(found), charter.lists(found)[1]
    if not is_on:
        headline = f"Every machine with the secret of {found.name!r} may join again, unless it is denied."
        return _amend(found, private, None, headline, {}, as_json=as_json)
    bound: dict[bytes, str] = {}
    if allowed is None:
        bound = {machine_of(found, each): name for each, name in names.items()} | names
        allowed = frozenset({own_machine(), *(machine_of(found, each) for each in names)}) - found.denied
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise ConfigError("there is no terminal to ask on; add --yes if you mean to switch the list on")
        typer.echo(f"Only these machines will be in {found.name!r}:\n\n{_table(allowed, names)}\n")
        typer.confirm("Switch the list on?", abort=True)
    headline = f"Only approved machines may be in {found.name!r} now."
    _amend(found, private, allowed, headline, bound, as_json=as_json)


def _amend(
    found: Cluster,
    private: OwnerKey,
    allowed: frozenset[bytes] | None,
    headline: str,
    names: Mapping[bytes, str],
    *,
    as_json: bool,
) -> None:
    """Change the list; `names` are what the machines that are approved now call themselves."""
    bound = {machine: machine_name(name, machine) for machine, name in names.items() if name}
    changed = charter.amend(found, private, lambda now: (now[0], allowed), bound)
    audit_log.note(found.name, "list-changed", reason=headline)
    if not as_json:
        say(headline)
    obeying, others = spread(changed, quiet=as_json)
    if as_json:
        heard, unheard = ([card.id.hex() for card in cards] for cards in (obeying, others))
        listed = None if allowed is None else sorted(each.hex() for each in allowed)
        return typer.echo(json.dumps({"allowed": listed, "heard": heard, "not_heard": unheard}))
    tell_result(obeying, others)


def _waiting(found: Cluster, *, quiet: bool) -> list[messages.Waiting]:
    """Return the waiting machines, from the notes of this machine and from running nodes."""
    waiting = {id: messages.Waiting(id, name, "", "") for id, name in clusters.waiting(found.name).items()}
    with among(found, quiet=quiet) as visit:
        cards = [state.card for state in visit.members()]
        for answer in visit.ask_all(cards, messages.Ask(), SPREAD_ANSWER_SECONDS):
            if isinstance(answer, messages.Tell):
                waiting |= {each.id: each for each in answer.waiting}
        waiting |= {each.id: each for each in visit.mesh.rules.waiting()}
    denied, allowed = charter.lists(found)
    answered = denied | found.denied | (allowed or frozenset())
    return [each for each in waiting.values() if each.id not in answered]


def _show_waiting(found: Cluster, private: OwnerKey, *, as_json: bool) -> None:
    waiting = _waiting(found, quiet=as_json)
    if as_json:
        rows = [{"id": w.id.hex(), "name": w.name, "host": w.host_name, "address": w.ip} for w in waiting]
        return typer.echo(json.dumps(rows))
    if not waiting:
        return typer.echo(f"No machine waits for approval in {found.name!r}.")
    typer.echo(table(_waiting_columns(waiting), room()))
    if not sys.stdin.isatty():
        return typer.echo("`covey allow ID` approves one of them.")
    approved = {w.id: w.name for w in waiting if typer.confirm(f"May {w.name} ({id_text(w.id)}) be in {found.name!r}?")}
    clusters.forget_waiting(found.name, [w.id for w in waiting])
    if approved:
        allowed = charter.lists(found)[1] or frozenset()
        _amend(found, private, allowed | set(approved), f"{len(approved)} approved.", approved, as_json=False)


def _waiting_columns(waiting: list[messages.Waiting]) -> list[Column]:
    return [
        Column("NODE", [each.name for each in waiting]),
        Column("ID", [short_id(each.id) for each in waiting]),
        Column("HOST", [each.host_name or "-" for each in waiting], leave_out=2, wraps=True),
        Column("ADDRESS", [each.ip or "-" for each in waiting], leave_out=1),
    ]


def _list(found: Cluster, *, as_json: bool) -> None:
    _, allowed = charter.lists(found)
    names = _names(found)
    if as_json:
        return typer.echo(json.dumps(as_rows(allowed or (), names)))  # while there is a list, this machine is on it
    if allowed is None:
        return say(_OFF.format(found.name))
    typer.echo(_table(allowed, names))


def _names(found: Cluster) -> dict[bytes, str]:
    """Return names of nodes by id: those that the owner bound to keys, and what other nodes call themselves."""
    bound = {each: name for each, name in charter.bound_names(found).items() if name}
    return clusters.known(found.name) | bound


def _table(nodes: frozenset[bytes], names: dict[bytes, str]) -> str:
    here = own_machine()
    listed = sorted(nodes)
    columns = [
        Column("NAME", [names.get(each, "this machine" if each == here else "-") for each in listed]),
        Column("ID", [short_id(each) for each in listed]),
        Column("WHOLE ID", [each.hex() for each in listed], leave_out=1),
    ]
    return table(columns, room())
