"""`covey trust`: the machines to which this one sends files and programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.charter import machine_of
from covey.cli.layout import Column, room, table
from covey.cli.terminal import confirm, say
from covey.net.audit import audit_log
from covey.net.keys import clusters, trust
from covey.net.keys.identity import id_text, is_whole_id, machine_name, meant_ids, resolve_id, short_id, stored_machine

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.trust import TrustedMachine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(name="trust")
def trust_command(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name, its id, or four or more letters of its id.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Stop trusting the machine.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether the id is right.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Trust the key of a machine: files and programs may go there, and its name means this key.

    Without NODE, the trusted machines are listed.

    `covey run --on` asks the first time; this command trusts a machine before that. Where the owner has a
    list of approved machines (`covey allow`), these are trusted, and no others.

    A name is what the machine calls itself, which proves nothing: compare the id with what `covey up` prints there.
    """
    found = clusters.find_saved(cluster)
    book = trust.trusted(found)
    if node is None:
        if undo:
            raise ConfigError("use `covey trust`, `covey trust NODE` or `covey trust NODE --undo`")
        return _list(book, as_json=as_json)
    if undo:
        return _undo(found, node, book)
    machine, name = _find(found, node, book)
    label = f"{name} ({id_text(machine)})"
    if machine in book:
        return say(f"{label} is trusted already.")
    if found.charter is not None and found.charter.allowed is not None:
        raise ConfigError(
            f"the owner approves machines; on {found.charter.machine} run `covey allow {short_id(machine)}`"
        )
    if not is_whole_id(node):
        say(f"The machine that calls itself {name} has the id {id_text(machine)}.", err=True)
        confirm("Is that the id that `covey up` prints there?", yes=yes, refusal=f"the id of {label} is to be compared")
    trust.remember(found, {machine: name})
    audit_log.note(found.name, "trusted", node=machine, name=name, reason="for files and programs")
    say(f"{label} is trusted: files and programs may go there.")


def _find(found: Cluster, node: str, book: dict[bytes, TrustedMachine]) -> tuple[bytes, str]:
    """Return the id and the name of a machine that this one has met, or of a whole id.

    Raises:
        ConfigError: the name is not known, means several machines, or is that of a trusted machine with another key.
    """
    names: dict[bytes, str] = {}
    for each, name in clusters.known(found.name).items():
        machine = machine_of(found, each)
        names.setdefault(machine, machine_name(name, machine))
    if is_whole_id(node):
        machine = resolve_id(node, {})
        return machine, names.get(machine) or machine_name("node", machine)
    bound = meant_ids(node, {each: known.name for each, known in book.items()})
    if len(bound) == 1:
        return bound[0], book[bound[0]].name
    meant = meant_ids(node, names)
    if len(meant) == 1:
        return meant[0], names[meant[0]]
    listed = (
        ", ".join(f"{names[each]} ({id_text(each)})" for each in (meant or sorted(names))[:10]) or "none was met yet"
    )
    if meant:
        raise ConfigError(f"{node!r} means several machines: {listed}; write the id of one of them")
    raise ConfigError(f"{node!r} is no machine known here ({listed}); write the id that `covey up` prints there")


def _undo(found: Cluster, node: str, book: dict[bytes, TrustedMachine]) -> None:
    meant = meant_ids(node, {each: known.name for each, known in book.items()})
    if len(meant) != 1:
        listed = ", ".join(f"{known.name} ({id_text(each)})" for each, known in book.items())
        what = "means several trusted machines" if meant else "is no trusted machine"
        raise ConfigError(f"{node!r} {what}; write the id of one of these: {listed}")
    machine, known = meant[0], book[meant[0]]
    if machine == stored_machine():
        raise ConfigError("this machine itself is always trusted")
    trust.forget(found, machine)
    audit_log.note(found.name, "distrusted", node=machine, name=known.name)
    if known.by_owner:
        assert found.charter is not None
        raise ConfigError(
            f"{known.name} ({id_text(machine)}) is approved by the owner; on {found.charter.machine} run "
            f"`covey allow {short_id(machine)} --undo`"
        )
    say(f"{known.name} ({id_text(machine)}) is trusted no more.")


def _list(book: dict[bytes, TrustedMachine], *, as_json: bool) -> None:
    here = stored_machine()
    if as_json:
        rows = [
            {"id": each.hex(), "name": known.name, "by_owner": known.by_owner, "has_had_files": known.has_had_files}
            for each, known in book.items()
        ]
        return typer.echo(json.dumps(rows))
    machines = sorted(book, key=lambda each: (book[each].name, each))
    columns = [
        Column("MACHINE", [book[each].name or "-" for each in machines]),
        Column(
            "TRUSTED",
            ["itself" if each == here else "by the owner" if book[each].by_owner else "here" for each in machines],
        ),
        Column("FILES", ["sent" if book[each].has_had_files else "not yet" for each in machines], leave_out=2),
        Column("WHOLE ID", [id_text(each) for each in machines], leave_out=1),
    ]
    typer.echo(table(columns, room()))
