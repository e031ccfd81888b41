"""`covey init`: makes a cluster and shows its join code."""

from __future__ import annotations

import getpass
import json
import secrets
import sys
from dataclasses import replace
from typing import Annotated, Final

import typer

from covey.base.config import split_relays
from covey.base.errors import ConfigError
from covey.cli.pair import Machines, run_command, show_codes
from covey.cli.terminal import say
from covey.net.audit import audit_log
from covey.net.discovery.interfaces import current_seeds
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, owner
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity
from covey.wire.secret import (
    KEY_BYTES,
    MAX_RELAYS,
    ClusterSecret,
    check_cluster_name,
    encode_join_code,
    from_passphrase,
    new_passphrase,
)

DEFAULT_NAME: Final = "home"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def init(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help=f"Its name; {DEFAULT_NAME!r} if you give none.")
    ] = None,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Make the secret from a passphrase, asked for or read from stdin.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the join code of an existing cluster.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a cluster of that name; its other machines need the new code.")
    ] = False,
    relay: Annotated[
        str | None,
        typer.Option("--relay", metavar="A,B", help="host:port of relays, for the join code: see `covey relay`."),
    ] = None,
    machines: Machines = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the join code.")] = False,
) -> None:
    """Make a cluster, and show a code of six digits with which other machines of this network join it.

    Type `covey enroll` on each of them while this command shows the code; Ctrl-C ends it. `covey pair` shows a code
    again, and `covey init --show` the join code, for machines on other networks. Outside of a terminal, this command
    prints the join code instead, unless --machines is given.

    This machine gets the owner key, too: `covey secret rotate` works here. Other machines take a new secret only with
    the owner's signature.

    The same passphrase under the same name makes the same cluster on every machine, with no code to carry and no owner.
    """
    if show and (passphrase or force or machines):
        raise ConfigError("--show only prints the join code; leave --passphrase, --force and --machines out")
    if as_json and machines:
        raise ConfigError("--json prints the join code; for codes of six digits as JSON: covey pair --json")
    relays = _relays(relay)
    if show:
        shown = clusters.find_saved(cluster)
        headline = f"The cluster {shown.name!r} has this join code:"
        return _print_code(
            replace(shown, relays=relays or shown.relays),
            current_seeds(effective_environment()),
            headline,
            as_json=as_json,
        )
    name = check_cluster_name(cluster or DEFAULT_NAME)
    replaced = clusters.cluster_path(name).exists()
    if replaced and not force:
        raise ConfigError(
            f"this machine is in a cluster {name!r} already: `covey init --show {name}` prints its join code. "
            "--force makes a new key instead; machines that have the old one then need the new code"
        )
    secret = _ask_passphrase(name) if passphrase else ClusterSecret(name, secrets.token_bytes(KEY_BYTES))
    denied = clusters.load(name).denied if replaced else frozenset()
    seeds = current_seeds(effective_environment())  # raises if no interface is usable, before anything is changed
    # A passphrase makes the same cluster on every machine, so no machine is its owner.
    made = Cluster(secret, denied=denied, owner=b"" if passphrase else owner.make(name), relays=relays)
    if passphrase:
        owner.forget(name)
    clusters.save(made)
    audit_log.note(name, "secret-created", reason="--force replaced the old one" if replaced else "")
    ensure_identity()
    headline = f"Made the cluster {name!r}."
    if replaced:
        headline = f"The cluster {name!r} has a new key; the old one is gone. Enroll its other machines again."
    is_asked = machines is not None or (sys.stdin.isatty() and sys.stdout.isatty())
    if as_json or passphrase or not is_asked:
        return _print_code(made, seeds, f"{headline} Its join code:", as_json=as_json)
    say(headline)
    show_codes(made, machines or 0)


def _relays(text: str | None) -> tuple[str, ...]:
    """Return the relays for a join code; ConfigError if they cannot be in one."""
    relays = split_relays(text or "")
    if len(relays) > MAX_RELAYS:
        raise ConfigError(f"a join code holds at most {MAX_RELAYS} relays, not {len(relays)}")
    return relays


def _ask_passphrase(name: str) -> ClusterSecret:
    if not sys.stdin.isatty():
        return from_passphrase(name, sys.stdin.readline(), random=secrets.token_bytes)
    say(f"Five or more words, or twenty or more characters; for example: {new_passphrase(secrets.token_bytes)}")
    text = getpass.getpass("Passphrase: ")
    secret = from_passphrase(name, text, random=secrets.token_bytes)
    if getpass.getpass("Once more: ") != text:
        raise ConfigError("the two passphrases differ; nothing was changed")
    return secret


def _print_code(cluster: Cluster, seeds: tuple[str, ...], headline: str, *, as_json: bool) -> None:
    code = encode_join_code(cluster.secret, seeds, cluster.owner, cluster.relays[:MAX_RELAYS])
    if as_json:
        path = str(clusters.cluster_path(cluster.name))
        return typer.echo(json.dumps({"cluster": cluster.name, "join_code": code, "seeds": seeds, "file": path}))
    show_code(headline, code)
    typer.echo(
        "\nOn each other machine:  covey enroll  (it asks for the code)\n"
        f"Then on all of them:    {run_command(cluster.name)}\n"
        f"The code again:         covey init --show {cluster.name}"
    )


def show_code(headline: str, code: str) -> None:
    """Print a join code on one line, to be copied, with a warning to keep it secret."""
    say(headline)
    typer.echo(f"\n    {code}\n")
    say("The join code is the cluster's key: every machine that has it can join. Treat it like a password.")
