"""`covey enroll`: puts this machine into a cluster."""

from __future__ import annotations

import getpass
import sys
from dataclasses import replace
from typing import Annotated

import typer

from covey.base.errors import ConfigError
from covey.cli.init import run_command
from covey.cli.terminal import say
from covey.net.audit import audit_log
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity
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

    `covey init` printed the code on the first machine; `covey init --show` prints it again. The code also names the
    cluster's owner: this machine takes a new secret only with the owner's signature.
    """
    secret, seeds, owner, relays = decode_join_code(_ask(code))
    path = clusters.cluster_path(secret.name)
    old = clusters.load(secret.name) if path.exists() else None
    is_same = old is not None and (
        old.owner == owner if old.owner and owner else old.secret == secret  # the owner may have changed the secret
    )
    if old is not None and not is_same and not force:
        raise ConfigError(
            f"this machine is in another cluster {secret.name!r}, with another key. --force replaces it: this machine "
            "then no longer meets machines that have the old key"
        )
    if old is not None and is_same:
        joined = "stays in"
        kept = replace(old, seeds=seeds or old.seeds, owner=owner or old.owner, relays=relays or old.relays)
        if old.secret != secret:  # nodes that run here may meet nodes that still have the old secret
            kept, joined = clusters.with_secret(kept, secret, kept.serial, clusters.GRACE), "has the new secret of"
        clusters.save(kept)
    else:
        denied = old.denied if old is not None else frozenset()  # denied nodes stay denied under a new key
        clusters.save(Cluster(secret, seeds, denied, owner, relays=relays))
        joined = "is now in"
    audit_log.note(secret.name, "secret-enrolled", reason=f"this machine {joined} the cluster")
    ensure_identity()
    say(f"This machine {joined} the cluster {secret.name!r}. On each machine: {run_command(secret.name)}")
    if clusters.default_name() != secret.name:
        say(f"To make it the default cluster: covey clusters --default {secret.name}")


def _ask(code: str | None) -> str:
    """Return the code from the argument, standard input or a prompt; warn about the argument."""
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
