"""The endpoint of a rank that a launcher started: in a folder of its host, in clear text, or as a node of a cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS
from covey.base.numbers import Seat
from covey.base.version import __version__
from covey.net.discovery.host_rendezvous import (
    HostRendezvous,
    check_folder,
    host_token,
    local_address_towards,
    socket_path,
)
from covey.net.host.descriptors import explain
from covey.net.host.machine import hardware
from covey.net.host.runs import RunFolder
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials
from covey.runtime.peers.endpoint import NODE_BACKLOG, Endpoint, cluster_endpoint, host_name, numeric
from covey.wire.messages import Address, Card, Contact

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.environment import LaunchedRank


def in_folder(launched: LaunchedRank, config: GroupConfig) -> Endpoint:
    """Listen in the folder of this host where all ranks of the run listen."""
    folder = Path(launched.folder)
    if launched.token is not None:
        check_folder(folder)
    rendezvous = HostRendezvous(folder, launched.rank, launched.token)
    listeners = [rendezvous.sock]
    addresses: tuple[Address, ...] = ()
    try:
        if config.lanes in LANE_KINDS and LANE_KINDS[config.lanes].is_of_network:
            tcp = socket.create_server(("127.0.0.1", 0), backlog=NODE_BACKLOG)
            tcp.setblocking(False)
            listeners.append(tcp)
            addresses = (Address("127.0.0.1", tcp.getsockname()[1], "lo"),)
        host = host_token(folder)
        credentials = LinkCredentials.of_token(rendezvous.token)
    except BaseException:
        rendezvous.leave()
        raise
    others = (seat for seat in map(Seat, range(launched.size)) if seat != launched.rank)
    return Endpoint(
        credentials=credentials,
        card=_anonymous_card(Contact(host, addresses, str(rendezvous.path)), config),
        acceptor=Acceptor(listeners, credentials.door_key, launched.name),
        contacts={seat: Contact(host, (), str(socket_path(folder, seat))) for seat in others},
        on_close=rendezvous.leave,
    )


def insecure(launched: LaunchedRank, config: GroupConfig) -> Endpoint:
    """Listen in clear text where ranks of other hosts can connect; rank 0 knows how to reach them all."""
    own = _own_address(launched) or (local_address_towards(launched.addresses[0][0]), 0)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_listen_at(*own))
        folder = RunFolder()
        undo.callback(folder.remove)
        path = str(socket_path(check_folder(Path(folder.path)), launched.rank))
        local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(path)
        local.listen(NODE_BACKLOG)
        local.setblocking(False)
        # Nothing secret is shared: this only keeps different runs apart.
        credentials = LinkCredentials.of_token(f"insecure/{launched.name}".encode())
        address = Address(*listener.getsockname()[:2])
        card = _anonymous_card(Contact(host_token(Path(folder.path).parent), (address,), path), config)
        acceptor = Acceptor([listener, local], credentials.door_key, launched.name)
        release = undo.pop_all().close
    return Endpoint(credentials, card, acceptor, _known_ranks(launched), release)


def in_cluster(launched: LaunchedRank, config: GroupConfig, cluster: Cluster) -> Endpoint:
    """Listen where ranks of other hosts can connect with the cluster's secret; rank 0 knows how to reach them all."""
    own, contacts, token = _own_address(launched), _known_ranks(launched), b""
    if cluster.relays:
        from covey.runtime.peers.launcher_mesh import first_token

        token = first_token(cluster, launched.name)
        if Seat(0) in contacts:
            contacts[Seat(0)] = Contact("", contacts[Seat(0)].addresses, "", token)
    ports = (own[1] if own is not None else 0,)
    token = token if launched.rank == 0 else b""
    return cluster_endpoint(cluster, config, run=launched.name, ports=ports, contacts=contacts, token=token)


def _own_address(launched: LaunchedRank) -> tuple[str, int] | None:
    """Return where this rank has to listen; None if it may choose."""
    return launched.addresses[launched.rank] if launched.rank < len(launched.addresses) else None


def _known_ranks(launched: LaunchedRank) -> dict[Seat, Contact]:
    """Return how to reach the lower ranks whose address is known, which this rank dials, by rank."""
    lower = launched.addresses[: launched.rank]
    return {Seat(rank): Contact("", numeric(*address), "") for rank, address in enumerate(lower)}


def _anonymous_card(contact: Contact, config: GroupConfig) -> Card:
    name = host_name()
    return Card(
        b"",
        secrets.token_bytes(16),
        name,
        name,
        os.getpid(),
        contact,
        version=__version__,
        hardware=hardware(),
        keeps_store=bool(config.store_file),
    )


def _listen_at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=NODE_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {explain(error)}") from error
    sock.setblocking(False)
    return sock
