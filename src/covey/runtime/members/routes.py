"""Where to dial a peer: a unix socket on one host, addresses and then relays otherwise."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.runtime.links.handshake import Where
    from covey.runtime.members.node import Node
    from covey.runtime.peers.remote_process import RemoteProcess


def routes_to(node: Node, peer: RemoteProcess, kind: str = "") -> list[Where]:
    """Return where `node` can dial `peer`, best first: a unix socket on one host, unless the lane has to be TCP."""
    contact = peer.contact
    assert contact is not None
    is_same_host = contact.host == node.host
    is_clear = node.credentials.tls is None
    by_socket = kind in ("shm", "unix", "memory") or (not kind and is_clear)
    if by_socket and is_same_host and contact.socket and (is_clear or _is_nodes_socket(node, contact.socket)):
        return [contact.socket]
    from covey.net.discovery.interfaces import recent_interfaces, to_dial  # of no use to ranks that share memory

    ways: list[Where] = [peer.way] if peer.way is not None else []
    own = recent_interfaces(node.config.interfaces)
    relayed = [] if is_same_host else node.relayed_ways(contact.relay)
    return ways + [way for way in (*to_dial(own, contact.addresses, is_same_host), *relayed) if way not in ways]


def _is_nodes_socket(node: Node, path: str) -> bool:
    """Tell whether a path that another node of a cluster names is where all nodes of this user on this host listen."""
    from covey.net.discovery.host_registry import is_nodes_socket  # of no use to ranks that a token holds together

    return is_nodes_socket(path, os.path.dirname(node.card.contact.socket))
