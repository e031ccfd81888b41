"""Which nodes may be in a cluster: by the owner's charter for all members, and by this machine's own list.

A `Charter` lists denied nodes, and optionally the only allowed ones. It is stored in the cluster's file, and running
members pass it on. Lists name a machine by its first key (`wire.signed`), or a single node by its own key.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from covey.base.errors import AuthError, ConfigError
from covey.net.keys import clusters
from covey.net.keys.identity import node_name, own_machine, short_id
from covey.wire.messages import CHARTER_LIMIT, Charter
from covey.wire.signed import charter_words, has_signed_names, is_signed, machine_of, names_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from covey.net.keys.clusters import Cluster
    from covey.wire.messages import Card

Lists = tuple[frozenset[bytes], frozenset[bytes] | None]
"""Denied nodes; and the only allowed ones, or None."""


def objection(cluster: Cluster, card: Card, here: str) -> str:
    """Return why a node that holds the secret may not be in the cluster, and what to do; or "".

    `here` is the name of the node that asks.
    """
    try:
        machine = machine_of(card)
    except AuthError as error:
        return str(error)
    return _objection_to(cluster, {card.id, machine}, machine, f"node {card.name} ({short_id(card.id)})", here)


def machine_objection(cluster: Cluster, machine: bytes, here: str) -> str:
    """Return why a machine that holds the secret may not be in the cluster, and what to do; or ""."""
    return _objection_to(cluster, {machine}, machine, f"machine {short_id(machine)}", here)


def _objection_to(cluster: Cluster, ids: set[bytes], machine: bytes, label: str, here: str) -> str:
    charter, short = cluster.charter, short_id(machine)
    if ids & cluster.denied:
        return f"{label} is denied on {here}; `covey deny {short} --undo` there lets it in"
    if charter is None:
        return ""
    if not ids.isdisjoint(charter.denied):
        return f"{label} is denied by the owner of the cluster; on {charter.machine} run `covey deny {short} --undo`"
    if charter.allowed is not None and ids.isdisjoint(charter.allowed):
        return f"{label} is waiting for approval: on {charter.machine} run `covey allow {short}`"
    return ""


def is_waiting(cluster: Cluster, card: Card) -> bool:
    """Tell whether a node lacks nothing but the owner's approval."""
    charter = cluster.charter
    if charter is None or charter.allowed is None or objection(cluster, card, "") == "":
        return False
    return objection(replace(cluster, charter=msgspec.structs.replace(charter, allowed=None)), card, "") == ""


def is_news(cluster: Cluster, charter: Charter) -> bool:
    """Tell whether a charter is later than the cluster's, or has names that it lacks, and is signed by its owner.

    A node of an earlier release passes a charter on without the names.

    Raises:
        AuthError: it is later, and the owner has not signed it.
    """
    known = cluster.charter
    if not cluster.owner or (known is not None and charter.serial < known.serial):
        return False
    if known is not None and charter.serial == known.serial and not (charter.names and not known.names):
        return False
    if not is_signed(cluster.owner, charter_words(cluster.name, charter), charter.signature):
        raise AuthError("the owner of this cluster has not signed this charter")
    if charter.names and not has_signed_names(cluster.name, cluster.owner, charter):
        raise AuthError("the owner of this cluster has not signed the names of this charter")
    return True


def bound_names(cluster: Cluster) -> dict[bytes, str]:
    """Return the machines that the owner has approved, with the names that the owner bound to their keys, or ""."""
    charter = cluster.charter
    if charter is None or charter.allowed is None:
        return {}
    return dict.fromkeys(charter.allowed, "") | dict(zip(charter.allowed, charter.names, strict=False))


def keep(cluster: Cluster, charter: Charter) -> None:
    """Store a charter in the cluster's file, if there is one with no later charter. Not for the event loop."""

    def change(saved: Cluster) -> Cluster:
        is_later = saved.owner == cluster.owner and is_news(saved, charter)
        return replace(saved, charter=charter) if is_later else saved

    if clusters.cluster_path(cluster.name).exists():
        clusters.update(cluster.name, change)


def amend(
    cluster: Cluster,
    private: Ed25519PrivateKey,
    change: Callable[[Lists], Lists],
    names: Mapping[bytes, str] | None = None,
) -> Cluster:
    """Sign a charter with other lists, store it on this machine, and return the changed cluster.

    `names` are those of machines that the owner approves now. A machine that was on the list keeps its name.

    Raises:
        ConfigError: a list is too long.
    """
    machine = node_name(socket.gethostname(), own_machine())

    def sign(saved: Cluster) -> Cluster:
        denied, allowed = change(lists(saved))
        if max(len(denied), len(allowed or ())) > CHARTER_LIMIT:
            raise ConfigError(
                f"a list of nodes has at most {CHARTER_LIMIT} of them; take some off, or change the secret"
            )
        last = saved.charter.serial if saved.charter is not None else 0
        listed = None if allowed is None else tuple(sorted(allowed))
        before = {each: name for each, name in bound_names(saved).items() if name}
        bound = {own_machine(): machine, **(names or {}), **before}
        unsigned = Charter(
            clusters.next_serial(last),
            machine,
            tuple(sorted(denied)),
            listed,
            names=tuple(bound.get(each, "") for each in listed or ()),
        )
        signed = msgspec.structs.replace(
            unsigned,
            signature=private.sign(charter_words(saved.name, unsigned)),
            names_signature=private.sign(names_words(saved.name, unsigned)) if unsigned.names else b"",
        )
        return replace(saved, charter=signed)

    return clusters.update(cluster.name, sign)


def lists(cluster: Cluster) -> Lists:
    """Return the lists of the cluster's charter; without a charter, nothing is denied and all nodes are allowed."""
    charter = cluster.charter
    if charter is None:
        return frozenset(), None
    return frozenset(charter.denied), None if charter.allowed is None else frozenset(charter.allowed)


def latest(one: Charter | None, other: Charter | None) -> Charter | None:
    """Return the later of two charters; of two that differ only in that one has no names, the other."""
    found: Iterable[Charter] = (each for each in (one, other) if each is not None)
    return max(found, key=lambda charter: (charter.serial, bool(charter.names)), default=None)
