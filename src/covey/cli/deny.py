"""`covey deny`: keeps nodes out of a cluster, although they have the secret."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.charter import as_rows, label, machine_of, named, spread, tell_result
from covey.cli.layout import Column, room, table
from covey.cli.terminal import say
from covey.net.audit import audit_log
from covey.net.keys import charter, clusters, owner
from covey.net.keys.identity import own_ids, resolve_id, short_id

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.owner import OwnerKey

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def deny(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name, its id, or four or more letters of its id.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the node in again.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the nodes that are kept out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Keep a node, and all others of its machine, out of a cluster.

    On the machine with the owner key (where `covey init` was run), this holds for the whole cluster: running members
    are told, end their links with the node and continue without it. On any other machine, it holds there only.

    It does not stop an attacker with the cluster's secret, who can make a new node. Against an attacker,
    `covey secret rotate` changes the secret, and `covey allow --ask on` lets only approved machines in.
    """
    if listed == (node is not None) or (undo and listed):
        raise ConfigError("use `covey deny NODE`, `covey deny NODE --undo` or `covey deny --list`")
    found = clusters.find_saved(cluster)
    names = clusters.known(found.name)
    by_owner, _ = charter.lists(found)
    denied = {node_id: names.get(node_id, "") for node_id in found.denied | by_owner}
    if node is None:
        return _list(found, denied, as_json=as_json)
    private = owner.held(found)
    node_id = resolve_id(node, denied) if undo else named(found, node, names)
    if undo:
        return _undo(found, node_id, names, private, as_json=as_json)
    node_id = machine_of(found, node_id)
    if node_id in own_ids():
        raise ConfigError(
            f"{label(node_id, names)} is this machine itself; to leave a cluster, use `covey clusters --forget`"
        )
    name = names.get(node_id, "")
    if private is None:
        clusters.update(found.name, lambda now: replace(now, denied=now.denied | {node_id}))
        audit_log.note(found.name, "denied", node=node_id, name=name, reason="on this machine")
        if as_json:
            return typer.echo(json.dumps({"id": node_id.hex(), "everywhere": False}))
        return say(
            f"Nodes of this machine refuse {label(node_id, names)} in {found.name!r} from now on (running nodes within "
            "two seconds). To keep it out of the whole cluster, deny it on the machine with the owner key.\n"
            "This stops mistakes, not an attacker with the cluster's secret: for that, run `covey secret rotate`."
        )
    changed = charter.amend(found, private, lambda now: (now[0] | {node_id}, now[1]))
    audit_log.note(found.name, "denied", node=node_id, name=name, reason="in the whole cluster")
    headline = (
        f"{label(node_id, names)} is denied in {found.name!r}.\n"
        "This stops mistakes, not an attacker with the cluster's secret: for that, run `covey secret rotate`, or let "
        "only approved machines in with `covey allow --ask on`."
    )
    _tell(changed, node_id, headline, as_json=as_json)


def _undo(found: Cluster, node_id: bytes, names: dict[bytes, str], private: OwnerKey | None, *, as_json: bool) -> None:
    by_owner, _ = charter.lists(found)
    if node_id not in found.denied | by_owner:
        raise ConfigError(f"{label(node_id, names)} is not denied in {found.name!r}; see `covey deny --list`")
    if node_id in found.denied:
        clusters.update(found.name, lambda now: replace(now, denied=now.denied - {node_id}))
        audit_log.note(found.name, "allowed", node=node_id, name=names.get(node_id, ""), reason="on this machine")
    if node_id in by_owner:
        key = private if private is not None else owner.require(found, "letting this node in again")
        changed = charter.amend(found, key, lambda now: (now[0] - {node_id}, now[1]))
        audit_log.note(found.name, "allowed", node=node_id, name=names.get(node_id, ""), reason="in the whole cluster")
        return _tell(changed, node_id, f"{label(node_id, names)} may be in {found.name!r} again.", as_json=as_json)
    if as_json:
        return typer.echo(json.dumps({"id": node_id.hex(), "everywhere": False}))
    say(f"{label(node_id, names)} may be in {found.name!r} again, as far as this machine is concerned.")


def _tell(changed: Cluster, node_id: bytes, headline: str, *, as_json: bool) -> None:
    if not as_json:
        say(headline)
    obeying, others = spread(changed, quiet=as_json)
    if as_json:
        heard, unheard = ([card.id.hex() for card in cards] for cards in (obeying, others))
        return typer.echo(json.dumps({"id": node_id.hex(), "everywhere": True, "heard": heard, "not_heard": unheard}))
    tell_result(obeying, others)


def _list(found: Cluster, denied: dict[bytes, str], *, as_json: bool) -> None:
    by_owner, _ = charter.lists(found)
    if as_json:
        rows = [row | {"everywhere": bytes.fromhex(row["id"]) in by_owner} for row in as_rows(denied, denied)]
        return typer.echo(json.dumps(rows))
    if not denied:
        return typer.echo(f"No node is denied in {found.name!r} on this machine.")
    typer.echo(table(_columns(denied, by_owner), room()))


def _columns(denied: dict[bytes, str], by_owner: frozenset[bytes]) -> list[Column]:
    nodes = sorted(denied)
    return [
        Column("NODE", [denied[each] or "-" for each in nodes]),
        Column("ID", [short_id(each) for each in nodes]),
        Column("DENIED", ["in the whole cluster" if each in by_owner else "on this machine" for each in nodes]),
        Column("WHOLE ID", [each.hex() for each in nodes], leave_out=1),
    ]
