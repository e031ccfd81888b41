"""The variables that `torch.distributed` reads, for scripts that use it beside covey or instead."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.runtime.group.internals import engine_of, peers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.group.group import Group
    from covey.runtime.links.handshake import Where

logger = logging.getLogger("covey")

GLOO: Final = "GLOO_SOCKET_IFNAME"
"""Names the interface that gloo uses."""
GIVEN: Final = "COVEY_GAVE_RANK"
"""Tells that covey wrote RANK and the related variables, so that `env://` meets through covey."""
TORCH_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_YET: Final = "not known before this process joins: call covey.join or init_process_group first"
"""The value of RANK while only joining tells the rank. A script that reads a number there fails, instead of training
alone."""


def rank_variables(*, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return the variables in which torchrun gives a process its rank."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(value) for name, value in values.items()}


def torch_variables(*, master: str, port: int, **own: int) -> dict[str, str]:
    """Return the variables that torchrun exports for a rank; the store of rank 0 is at `master`, `port`."""
    return rank_variables(**own) | {"MASTER_ADDR": master, "MASTER_PORT": str(port)}


def given(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables of a rank with the mark that covey gave them."""
    return {**variables, GIVEN: _mark(variables)}


def is_given(env: Mapping[str, str]) -> bool:
    """Tell whether RANK and the related variables in an environment are those that covey gave."""
    return env.get(GIVEN) == _mark(env)


def _mark(env: Mapping[str, str]) -> str:
    """Return what tells the variables of one launcher from those of another that a rank starts."""
    return "/".join(env.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that learns its rank when it joins."""
    return {name: value for name, value in env.items() if name not in TORCH_VARIABLES} | given({"RANK": NOT_YET})


def export_rank(group: Group) -> None:
    """Set the variables in which torchrun would give this process its rank, if only joining told the rank."""
    if os.environ.get("RANK") == NOT_YET:
        os.environ |= given(own_variables(group))


def own_variables(group: Group) -> dict[str, str]:
    """Return the variables in which torchrun would give this process its rank in a group of all ranks."""
    return rank_variables(rank=group.rank, size=group.size, local_rank=group.local_rank, local_size=_local_size(group))


def _local_size(group: Group) -> int:
    """Return how many ranks of the group are on this host."""
    return engine_of(group).roster.ranks_here()


def gloo_variables(group: Group) -> dict[str, str]:
    """Return the variable that makes gloo use the interface of this node's links; nothing if it is set already.

    Without it, gloo listens at the address of the host's own name, which is 127.0.1.1 on many systems: no other machine
    can reach that.
    """
    node = engine_of(group).roster.node
    if node is None or GLOO in os.environ:
        return {}
    from covey.net.discovery.interfaces import recent_interfaces

    peers = peers_of(group)  # rank 0's machine comes first
    ips = [peer.link.local_ip for peer in peers if peer.link and peer.contact and not peer.is_on(node.peers.host)]
    by_ip = {ip: interface.name for interface in recent_interfaces() for ip in interface.addresses}
    return next(({GLOO: by_ip[ip]} for ip in ips if ip in by_ip), {})


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("", 0)) as sock:
        return int(sock.getsockname()[1])


def reserve_port() -> socket.socket:
    """Return a socket that keeps a TCP port of this host from other programs, and does not listen.

    A program that binds this port by its number, with SO_REUSEADDR as stores and servers do, still gets it.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def export_torch_env(group: Group) -> None:
    """Set torch's variables in this process, once its rank in a run of the cluster is known; all ranks call it."""
    port = int(group.broadcast_object(free_port() if group.rank == 0 else None, type=int))
    if not 0 < port < 1 << 16:
        raise RemoteProtocolError(f"rank 0 named port {port} for torch's store")
    master = "127.0.0.1"
    if _local_size(group) < group.size:
        master = address_of_first(group)
        if group.local_rank == 0:
            logger.warning(
                "torch's store at %s, port %d, is neither encrypted nor authenticated: every machine on that network "
                "can read and change its traffic",
                master,
                port,
            )
    os.environ |= own_variables(group) | {"MASTER_ADDR": master, "MASTER_PORT": str(port)} | gloo_variables(group)
    os.environ.pop(GIVEN, None)  # torch's own store is wanted


def address_of_first(group: Group) -> str:
    """Return the address by which this node reaches the host of rank 0 of a group."""
    node = engine_of(group).roster.node
    if node is None:
        return "127.0.0.1"
    if group.rank == 0:
        ips = [address.ip for address in node.card.contact.addresses]
        return next((ip for ip in ips if not ipaddress.ip_address(ip).is_link_local), "127.0.0.1")
    first = peers_of(group)[0]
    if first.is_on(node.peers.host):
        return "127.0.0.1"
    return _ip(first.way) or (first.link.remote_ip if first.link is not None else "127.0.0.1")


def _ip(way: Where | None) -> str:
    """Return an address to dial as text, with the interface if a link-local address needs one."""
    if way is None or isinstance(way, str):
        return ""
    ip = str(way[0])
    return f"{ip}%{way[3]}" if len(way) > 3 and way[3] and "%" not in ip else ip
