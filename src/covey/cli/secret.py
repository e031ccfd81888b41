"""`covey secret`: give a cluster a new key, and hand it to those who are there."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import group_config
from covey.base.errors import ConfigError, CoveyError
from covey.cli.clusters import table
from covey.cli.init import current_seeds
from covey.cli.status.command import look_around
from covey.net import audit, clusters
from covey.net.identity import short_id
from covey.runtime.places import ClusterOptions
from covey.runtime.visit import visiting
from covey.wire import messages
from covey.wire.secret import encode_join_code

if TYPE_CHECKING:
    from covey.net.clusters import Cluster
    from covey.runtime.visit import Visit

KEEP_SECONDS: Final = 15.0
"""How long a node may take to write the key down: it may wait for a lock on its disk."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def secret() -> None:
    """Change a cluster's secret."""


@dataclass(frozen=True)
class Receiver:
    """A node that was sent the new key."""

    card: messages.Card
    problem: str
    """Why it did not keep it; empty if it did."""

    @property
    def kept(self) -> bool:
        return not self.problem


@app.command()
def rotate(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the secret is changed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; goes with --yes.")] = False,
) -> None:
    """Make a new secret for a cluster, and hand it to its nodes that run now and are not denied here.

    Whoever has only the old one is out: other machines need the new join code.

    Runs that go on now are not disturbed; they keep the old secret until they end.

    Exits with 0, or with 1 if a node that runs could not keep the new secret.
    """
    if as_json and not yes:
        raise ConfigError("--json cannot ask; add --yes if you mean to change the secret")
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; add --yes if you mean to change the secret")
    old = _saved(cluster)
    with visiting(old, group_config(os.environ), announce=False) as visit:
        look_around(visit)
        cards = [state.card for state in visit.members()]
        if not yes:
            _ask(old, cards)
        new = _change(old)
        receivers = _hand_out(visit, cards, new)
    _report(new, receivers, as_json=as_json)
    raise typer.Exit(0 if all(receiver.kept for receiver in receivers) else 1)


def _saved(name: str | None) -> Cluster:
    """Return the cluster to change, if its secret is in a file of this machine."""
    for variable in ("COVEY_SECRET", "COVEY_SECRET_FILE"):
        if variable in os.environ:
            raise ConfigError(f"the secret is given by {variable}: change it there, or unset {variable} first")
    return ClusterOptions(name).find(os.environ)


def _ask(cluster: Cluster, cards: list[messages.Card]) -> None:
    if cards:
        typer.echo(f"These nodes of {cluster.name!r} run now and will get the new secret:\n\n{_listed(cards)}\n")
    else:
        typer.echo(f"No node of {cluster.name!r} runs now: every other machine will need the new join code.")
    if cluster.denied:
        typer.echo(f"Those denied here ({', '.join(sorted(map(short_id, cluster.denied)))}) will not.")
    typer.confirm(f"Change the secret of {cluster.name!r}?", abort=True)


def _change(old: Cluster) -> Cluster:
    """Save a new key here first: whatever happens to the others, it is not lost."""
    new = clusters.rotated(old)

    def change(now: Cluster) -> Cluster:
        if now.secret != old.secret:
            raise ConfigError(f"the secret of {old.name!r} was changed by another process just now; look again")
        return replace(now, secret=new.secret)

    clusters.update(old.name, change)
    audit.note(old.name, "secret-rotated")
    return new


def _hand_out(visit: Visit, cards: list[messages.Card], new: Cluster) -> list[Receiver]:
    answers = visit.ask_all(cards, messages.NewSecret(new.secret.key), KEEP_SECONDS)
    receivers = []
    for card, answer in zip(cards, answers, strict=True):
        if isinstance(answer, messages.SecretKept):
            receivers.append(Receiver(card, answer.problem))
        else:
            receivers.append(Receiver(card, str(answer) if isinstance(answer, CoveyError) else "no answer"))
    return receivers


def _report(new: Cluster, receivers: list[Receiver], *, as_json: bool) -> None:
    seeds = current_seeds()
    code = encode_join_code(new.secret, seeds)
    if as_json:
        nodes = [
            {
                "id": receiver.card.id.hex(),
                "name": receiver.card.name,
                "host": receiver.card.host_name,
                "kept": receiver.kept,
                "problem": receiver.problem,
            }
            for receiver in receivers
        ]
        return typer.echo(json.dumps({"cluster": new.name, "join_code": code, "seeds": seeds, "nodes": nodes}))
    kept = [receiver.card for receiver in receivers if receiver.kept]
    failed = [receiver for receiver in receivers if not receiver.kept]
    typer.echo(f"The cluster {new.name!r} has a new secret. It is saved on this machine.")
    if kept:
        typer.echo(f"\nThese nodes keep it, too:\n\n{_listed(kept)}")
    if failed:
        rows: list[tuple[object, ...]] = [(r.card.name, short_id(r.card.id), r.problem) for r in failed]
        typer.echo(f"\nThese nodes did NOT keep it:\n\n{table([('NODE', 'ID', 'WHY'), *rows])}")
    typer.echo(
        f"\nThe new join code:\n\n    {code}\n\n"
        "The join code is the cluster's key: whoever has it is in. Treat it like a password.\n\n"
        f"Every other machine of {new.name!r} needs it:  covey enroll --force\n"
        "Runs that go on now keep the old secret until they end."
    )


def _listed(cards: list[messages.Card]) -> str:
    rows: list[tuple[object, ...]] = [
        (card.name, short_id(card.id), card.host_name, card.pid, card.contact.addresses[0].ip) for card in cards
    ]
    return table([("NODE", "ID", "HOST", "PID", "ADDRESS"), *rows])
