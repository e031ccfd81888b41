"""`covey deny`: nodes that this machine keeps out, although they have the secret."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from covey.base.errors import ConfigError
from covey.net import audit, clusters
from covey.net.identity import resolve_id, short_id

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def deny(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Its name, its id, or four or more letters of its id.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the node in again.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the nodes that are kept out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print JSON.")] = False,
) -> None:
    """Keep a node out of a cluster.

    This stops mistakes: this machine does not talk to that node. It does not stop a person who has the cluster's key,
    who can make a new node any time. Against that, `covey secret rotate` changes the key.
    """
    if listed == (node is not None) or (as_json and not listed) or (undo and listed):
        raise ConfigError("use `covey deny NODE`, `covey deny NODE --undo` or `covey deny --list [--json]`")
    found = clusters.find_saved(cluster)
    names = clusters.known(found.name)
    denied = {node_id: names.get(node_id, "") for node_id in found.denied}
    if node is None:
        return _list(denied, found.name, as_json=as_json)
    node_id = resolve_id(node, denied if undo else names)
    label = f"{names[node_id]} ({short_id(node_id)})" if node_id in names else short_id(node_id)
    if undo:
        if node_id not in denied:
            raise ConfigError(f"{label} is not denied in {found.name!r}; `covey deny --list` shows who is")
        clusters.update(found.name, lambda now: replace(now, denied=now.denied - {node_id}))
        audit.note(found.name, "allowed", node=node_id, name=names.get(node_id, ""))
        return typer.echo(f"{label} may be in {found.name!r} again, as far as this machine is concerned.")
    clusters.update(found.name, lambda now: replace(now, denied=now.denied | {node_id}))
    audit.note(found.name, "denied", node=node_id, name=names.get(node_id, ""))
    typer.echo(
        f"Nodes started here from now on refuse {label} in {found.name!r}; deny it on the other machines too.\n"
        "This stops mistakes, not a person who has the cluster's key: for that, run `covey secret rotate`."
    )


def _list(denied: dict[bytes, str], cluster: str, *, as_json: bool) -> None:
    if as_json:
        return typer.echo(json.dumps([{"id": node_id.hex(), "name": denied[node_id]} for node_id in sorted(denied)]))
    if not denied:
        return typer.echo(f"No node is denied in {cluster!r} on this machine.")
    for node_id in sorted(denied):
        typer.echo(f"{node_id.hex()}  {denied[node_id]}".rstrip())
