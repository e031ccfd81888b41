"""`covey secret`: gives a cluster a new secret, sends it to running nodes, and shows which machine may do so."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import group_config
from covey.base.errors import ConfigError, CoveyError
from covey.cli.init import show_code
from covey.cli.layout import Column, room, table
from covey.cli.status.command import look_around
from covey.cli.terminal import say, working
from covey.net.audit import audit_log
from covey.net.discovery.interfaces import current_seeds
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, owner
from covey.net.keys.clusters import GRACE, MAX_GRACE
from covey.net.keys.identity import resolve_id, short_id
from covey.runtime.environment import ClusterOptions
from covey.runtime.peers.visit import visiting
from covey.wire import messages
from covey.wire.secret import MAX_RELAYS, encode_join_code

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.visit import Visit

KEEP_SECONDS: Final = 15.0
"""How long a node may take to store the secret: it may wait for a file lock."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def secret() -> None:
    """Change a cluster's secret, or show whether this machine may."""


@dataclass(frozen=True)
class Receiver:
    """A node that the new secret was sent to."""

    card: messages.Card
    problem: str
    """Why it did not store it; empty if it did."""

    @property
    def has_stored(self) -> bool:
        return not self.problem


@app.command()
def show(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which owner key a cluster has, and whether it is on this machine. The secret itself is not shown."""
    found = clusters.find_saved(cluster)
    holds = owner.held(found) is not None
    earlier = found.earlier(time.time()) is not None
    if as_json:
        shown = {
            "cluster": found.name,
            "owner": found.owner.hex(),
            "holds_owner_key": holds,
            "serial": found.serial,
            "previous_until": found.previous_until if earlier else None,
        }
        return typer.echo(json.dumps(shown))
    if not found.owner:
        say(
            f"This machine knows no owner of {found.name!r}: it takes no new secret from the network. "
            "`covey enroll` with a join code from `covey init` names one."
        )
    else:
        here = "This machine holds" if holds else "Another machine holds"
        say(f"{here} the owner key of {found.name!r}: {short_id(found.owner)}")
    if earlier:
        say(f"The secret before the last change is good until {time.ctime(found.previous_until)}.")


@app.command()
def rotate(
    cluster: Annotated[
        str | None, typer.Argument(metavar="CLUSTER", help="Which one, if this machine is in several.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option("--to", metavar="NODE", help="Send it only to this node; may be repeated."),
    ] = None,
    grace: Annotated[
        int, typer.Option(metavar="SECONDS", min=0, max=MAX_GRACE, help="How long the old secret stays good.")
    ] = GRACE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the secret is changed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; goes with --yes.")] = False,
) -> None:
    """Make a new secret for a cluster, and send it to all running nodes and agents that are not denied.

    It works only on the machine with the owner key, where `covey init` was run. A node accepts the secret only with the
    owner's signature for this node. Machines that do not get it need the new join code: `covey enroll`.

    Runs continue. Until --grace has passed, the old secret is good, too, for nodes that do not have the new one.

    Exits with 0, or with 1 if a running node could not store the new secret.
    """
    if as_json and not yes:
        raise ConfigError("--json cannot ask; add --yes if you mean to change the secret")
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on; add --yes if you mean to change the secret")
    old = _saved(cluster)
    private = owner.require(old, "changing the secret")
    with visiting(old, group_config(effective_environment()), announce=False) as visit:
        with working(f"looking for nodes of {old.name} that run now ...", quiet=as_json):
            look_around(visit)
        running = {card.id: card for card in (*visit.agents(), *(state.card for state in visit.members()))}
        cards = _chosen(list(running.values()), to)
        if not yes:
            _ask(old, cards)
        new = owner.rotate(old, grace)  # stored here first, so that it cannot be lost
        audit_log.note(old.name, "secret-rotated", reason=f"the old one is good for {grace} s more")
        with working("sending the new secret ...", quiet=as_json):
            receivers = _hand_out(
                visit, [(card, owner.sign_secret(private, old, new, grace, card.id)) for card in cards]
            )
    _report(new, receivers, as_json=as_json)
    raise typer.Exit(0 if all(receiver.has_stored for receiver in receivers) else 1)


def _chosen(cards: list[messages.Card], to: list[str] | None) -> list[messages.Card]:
    if not to:
        return cards
    names = {card.id: card.name for card in cards}
    wanted = {resolve_id(text, names) for text in to}
    if absent := wanted - set(names):
        raise ConfigError(
            f"{', '.join(map(short_id, sorted(absent)))} does not run now; `covey status` shows the nodes"
        )
    return [card for card in cards if card.id in wanted]


def _saved(name: str | None) -> Cluster:
    """Return the cluster to change, if its secret is in a file of this machine."""
    for variable in ("COVEY_SECRET", "COVEY_SECRET_FILE"):
        if variable in os.environ:
            raise ConfigError(f"the secret is given by {variable}: change it there, or unset {variable} first")
    return ClusterOptions(name).find(effective_environment())


def _ask(cluster: Cluster, cards: list[messages.Card]) -> None:
    if cards:
        say(f"These nodes of {cluster.name!r} run now and will get the new secret:")
        typer.echo(f"\n{_listed(cards)}\n")
    else:
        say(f"No node and no agent of {cluster.name!r} runs now: every other machine will need the new join code.")
    if cluster.denied:
        say(f"The nodes denied here ({', '.join(sorted(map(short_id, cluster.denied)))}) will not.")
    typer.confirm(f"Change the secret of {cluster.name!r}?", abort=True)


def _hand_out(visit: Visit, signed: list[tuple[messages.Card, messages.NewSecret]]) -> list[Receiver]:
    answers = visit.ask_each(list(signed), KEEP_SECONDS)
    receivers = []
    for (card, _), answer in zip(signed, answers, strict=True):
        if isinstance(answer, messages.SecretKept):
            receivers.append(Receiver(card, answer.problem))
        else:
            receivers.append(Receiver(card, str(answer) if isinstance(answer, CoveyError) else "no answer"))
    return receivers


def _report(new: Cluster, receivers: list[Receiver], *, as_json: bool) -> None:
    seeds = current_seeds(effective_environment())
    code = encode_join_code(new.secret, seeds, new.owner, new.relays[:MAX_RELAYS])
    if as_json:
        nodes = [
            {
                "id": receiver.card.id.hex(),
                "name": receiver.card.name,
                "host": receiver.card.host_name,
                "kept": receiver.has_stored,
                "problem": receiver.problem,
            }
            for receiver in receivers
        ]
        return typer.echo(json.dumps({"cluster": new.name, "join_code": code, "seeds": seeds, "nodes": nodes}))
    kept = [receiver.card for receiver in receivers if receiver.has_stored]
    failed = [receiver for receiver in receivers if not receiver.has_stored]
    say(f"The cluster {new.name!r} has a new secret. It is saved on this machine.")
    if kept:
        typer.echo(f"\nThese nodes have stored it:\n\n{_listed(kept)}")
    if failed:
        columns = [
            Column("NODE", [each.card.name for each in failed]),
            Column("ID", [short_id(each.card.id) for each in failed]),
            Column("WHY", [each.problem for each in failed], wraps=True),
        ]
        typer.echo(f"\nThese nodes did NOT store it:\n\n{table(columns, room())}")
    show_code("\nThe new join code:", code)
    say(
        f"\nEvery other machine of {new.name!r} needs it:  covey enroll\n"
        f"Runs continue. The old secret is good until {time.ctime(new.previous_until)}."
    )


def _listed(cards: list[messages.Card]) -> str:
    columns = [
        Column("NODE", [card.name for card in cards]),
        Column("ID", [short_id(card.id) for card in cards]),
        Column("HOST", [card.host_name for card in cards], leave_out=3, wraps=True),
        Column("PID", [str(card.pid) for card in cards], leave_out=2),
        Column("ADDRESS", [card.contact.addresses[0].ip for card in cards], leave_out=1),
    ]
    return table(columns, room())
