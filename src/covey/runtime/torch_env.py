"""The variables that `torch.distributed` reads: for scripts which use it beside covey, or instead."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.runtime.greet import Where
    from covey.runtime.group import Group
    from covey.runtime.node import Node

logger = logging.getLogger("covey")


def torch_variables(
    *, rank: int, size: int, local_rank: int, local_size: int, master: str, port: int
) -> dict[str, str]:
    """Return what torchrun would export for a rank; the first one's store is at `master`, `port`."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.create_server(("", 0)) as sock:
        return int(sock.getsockname()[1])


def export_torch_env(group: Group, node: Node | None) -> None:
    """Set torch's variables in this process, once its rank in a run of the cluster is known; all ranks call it.

    `node` is None for a group of one.
    """
    port = int(group.broadcast_object(free_port() if group.rank == 0 else None, type=int))
    peers = list(node.peers.values()) if node is not None else []
    host = node.host if node is not None else ""
    here = [peer for peer in peers if peer.contact is not None and peer.contact.host == host]
    master = "127.0.0.1"
    if node is not None and len(here) < len(peers):
        master = _address_of_first(node)
        if group.local_rank == 0:
            logger.warning(
                "torch's store at %s, port %d, is neither encrypted nor authenticated: whoever is on that network can "
                "read and change what goes through it",
                master,
                port,
            )
    os.environ |= torch_variables(
        rank=group.rank,
        size=group.size,
        local_rank=group.local_rank,
        local_size=len(here) + 1,
        master=master,
        port=port,
    )


def _address_of_first(node: Node) -> str:
    """Return by which address this node reaches the host of rank 0."""
    if node.rank == 0:
        ips = [address.ip for address in node.card.contact.addresses]
        return next((ip for ip in ips if not ipaddress.ip_address(ip).is_link_local), "127.0.0.1")
    first = node.peers[0]
    if first.contact is not None and first.contact.host == node.host:
        return "127.0.0.1"
    return _ip(first.way) or (first.link.remote_ip if first.link is not None else "127.0.0.1")


def _ip(way: Where | None) -> str:
    """Return the address of a way as text, with the interface where it means nothing without."""
    if way is None or isinstance(way, str):
        return ""
    ip = str(way[0])
    return f"{ip}%{way[3]}" if len(way) > 3 and way[3] and "%" not in ip else ip
