"""Sends a charter to the running nodes of a cluster; shared by the commands about charters."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from covey.base.config import group_config
from covey.base.errors import CoveyError
from covey.base.pace import Growing
from covey.cli.status.command import look_around
from covey.cli.terminal import plural, say, working
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters, trust
from covey.net.keys.identity import meant_ids, resolve_id, short_id
from covey.runtime.backoff import Backoff
from covey.runtime.peers.visit import visiting
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from covey.net.keys.clusters import Cluster
    from covey.runtime.peers.visit import Visit

OBEY_SECONDS: Final = 5.0
"""How long running nodes may take to confirm a new charter."""
SPREAD_ANSWER_SECONDS: Final = 2.0
SPREAD_PAUSES: Final = Growing(0.1, 0.5)


@contextmanager
def among(cluster: Cluster, *, quiet: bool = False) -> Iterator[Visit]:
    """Visit the nodes of a cluster that run now; they and this visitor show each other their charters.

    Searching takes some seconds. A terminal shows a message meanwhile, unless `quiet`.
    """
    with (
        working(f"looking for nodes of {cluster.name} that run now ...", quiet=quiet),
        visiting(cluster, group_config(effective_environment())) as visit,
    ):
        look_around(visit)
        yield visit


def spread(cluster: Cluster, *, quiet: bool = False) -> tuple[list[messages.Card], list[messages.Card]]:
    """Send the cluster's charter to its running nodes; return those that confirm it, and those that do not.

    The charter is already stored on this machine, so a failed visit is not an error.
    """
    assert cluster.charter is not None
    try:
        return _spread(cluster, cluster.charter.serial, quiet=quiet)
    except CoveyError as error:
        say(f"the running nodes could not be told: {error}", err=True)
        return [], []


def _spread(cluster: Cluster, serial: int, *, quiet: bool) -> tuple[list[messages.Card], list[messages.Card]]:
    with among(cluster, quiet=quiet) as visit:
        cards = [state.card for state in visit.members()]
        obeying: dict[bytes, messages.Card] = {}
        tries = Backoff("nodes that confirm the charter", SPREAD_PAUSES, within=OBEY_SECONDS, level=logging.DEBUG)
        tries.begin()
        while len(obeying) < len(cards) and not tries.is_over:
            asked = [card for card in cards if card.id not in obeying]
            for card, answer in zip(asked, visit.ask_all(asked, messages.Ask(), SPREAD_ANSWER_SECONDS), strict=True):
                if isinstance(answer, messages.Tell) and answer.charter >= serial:
                    obeying[card.id] = card
            if len(obeying) < len(cards):
                tries.failed(f"{len(cards) - len(obeying)} have not")
                time.sleep(tries.pause)
    return list(obeying.values()), [card for card in cards if card.id not in obeying]


def tell_result(obeying: list[messages.Card], others: list[messages.Card]) -> None:
    """Print which running nodes have confirmed the new charter."""
    if obeying:
        names = ", ".join(card.name for card in obeying)
        say(f"{plural(len(obeying), 'node')} running now obey{'s' * (len(obeying) == 1)} it: {names}.")
    elif not others:
        say("No other node was found running. Nodes get it when they meet a node of this machine.")
    for card in others:
        say(f"{card.name} ({short_id(card.id)}) does not obey it: does it know this cluster's owner?")


def as_rows(nodes: Iterable[bytes], names: dict[bytes, str]) -> list[dict[str, str]]:
    """Return nodes as plain values for JSON."""
    return [{"id": node.hex(), "name": names.get(node, "")} for node in sorted(nodes)]


def label(node: bytes, names: dict[bytes, str]) -> str:
    """Return a node's name and id, as commands show them."""
    return f"{names[node]} ({short_id(node)})" if node in names else short_id(node)


def named(cluster: Cluster, word: str, names: Mapping[bytes, str]) -> bytes:
    """Return the id that a word means: of a machine whose name is bound to its key, or else of one of `names`.

    `names` are what nodes call themselves: no node gets another one meant by claiming a bound name.

    Raises:
        ConfigError: it means none of them, or several.
    """
    bound = {each: known.name for each, known in trust.trusted(cluster).items()}
    meant = meant_ids(word, bound)
    return meant[0] if len(meant) == 1 else resolve_id(word, {**names, **bound} if meant else names)


def machine_of(cluster: Cluster, node: bytes) -> bytes:
    """Return the machine of a node that was met before; for any other node, the node itself."""
    return clusters.machines(cluster.name).get(node, node)
