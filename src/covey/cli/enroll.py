"""`covey enroll`: put this machine into a cluster."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.init import run_command
from covey.net import audit, clusters
from covey.net.clusters import Cluster
from covey.net.identity import ensure_identity
from covey.wire.secret import decode_join_code

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def enroll(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="The join code; - reads it from stdin. Without it you are asked."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a cluster of the same name that has another key.")
    ] = False,
) -> None:
    """Put this machine into a cluster, with its join code.

    `covey init` printed the code on the first machine; `covey init --show` prints it again.
    """
    secret, seeds = decode_join_code(_ask(code))
    path = clusters.cluster_path(secret.name)
    old = clusters.load(secret.name) if path.exists() else None
    if old is not None and old.secret != secret and not force:
        raise ConfigError(
            f"this machine is in another cluster {secret.name!r}, with another key. --force replaces it: this machine "
            "then no longer meets those that have the old key"
        )
    is_new = old is None or old.secret != secret
    old_seeds = () if is_new or old is None else old.seeds
    denied = old.denied if old is not None else frozenset()  # who was kept out stays out, whatever the key
    clusters.save(Cluster(secret, seeds or old_seeds, denied))
    audit.note(secret.name, "secret-enrolled", reason="" if is_new else "again, with the same secret")
    ensure_identity()
    joined = "is now in" if is_new else "stays in"
    typer.echo(f"This machine {joined} the cluster {secret.name!r}. On each machine: {run_command(secret.name)}")
    if clusters.default_name() != secret.name:
        typer.echo(f"To mean it where no cluster is named: covey clusters --default {secret.name}")


def _ask(code: str | None) -> str:
    """Return the code from where it is safest to take it."""
    if code == "-":
        return sys.stdin.read(4096)
    if code is not None:
        typer.echo(
            "warning: the join code was typed as an argument, where the shell's history and `ps` show it to others; "
            "next time run `covey enroll` and paste it when asked",
            err=True,
        )
        return code
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; `covey enroll -` reads the join code from stdin")
    return getpass.getpass("Join code (not shown): ")
