"""`covey clusters`: lists the clusters of this machine, sets the default one, and leaves one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.layout import Column, room, table
from covey.cli.terminal import say
from covey.net.audit import audit_log
from covey.net.keys import clusters as files
from covey.net.keys import owner

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def clusters(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    default: Annotated[
        str | None, typer.Option("--default", metavar="NAME", help="Make this the default cluster.")
    ] = None,
    forget: Annotated[
        str | None, typer.Option("--forget", metavar="NAME", help="Take this machine out of a cluster.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before forgetting.")] = False,
) -> None:
    """List the clusters that this machine is in."""
    if as_json + (default is not None) + (forget is not None) > 1 or (yes and forget is None):
        raise ConfigError("use one of --json, --default NAME and --forget NAME [--yes] at a time")
    if default is not None:
        files.set_default(default)
        typer.echo(f"{default!r} is the default cluster now.")
    elif forget is not None:
        _forget(forget, yes=yes)
    else:
        _list(as_json=as_json)


def _forget(name: str, *, yes: bool) -> None:
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"forgetting {name!r} deletes its key from this machine; add --yes if you mean it")
        if owner.held(files.load(name)) is not None:
            say(f"This machine holds the owner key of {name!r}: without it, no machine can change the secret.")
        typer.confirm(
            f"Delete the key of {name!r} from this machine? If no other machine has it, it is lost.", abort=True
        )
    files.remove(name)
    audit_log.note(name, "secret-removed")
    typer.echo(f"This machine has left the cluster {name!r}.")


def _list(*, as_json: bool) -> None:
    default, found = files.default_name(), files.list_clusters()
    if as_json:
        rows = [
            {
                "name": cluster.name,
                "default": cluster.name == default,
                "seeds": cluster.seeds,
                "denied": sorted(node_id.hex() for node_id in cluster.denied),
                "file": str(files.cluster_path(cluster.name)),
            }
            for cluster in found
        ]
        return typer.echo(json.dumps(rows))
    if not found:
        return say(files.NO_CLUSTER)
    typer.echo(table(_columns(found, default), room()))


def _columns(found: list[Cluster], default: str | None) -> list[Column]:
    return [
        Column("CLUSTER", [cluster.name for cluster in found]),
        Column("DEFAULT", ["yes" if cluster.name == default else "-" for cluster in found]),
        Column("SEEDS", [" ".join(cluster.seeds) or "-" for cluster in found], wraps=True),
        Column("DENIED", [str(len(cluster.denied)) for cluster in found], leave_out=1),
        Column("FILE", [str(files.cluster_path(cluster.name)) for cluster in found], leave_out=2),
    ]
