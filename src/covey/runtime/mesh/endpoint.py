"""Taking a seat: everything that a node needs of its host before it can meet the others of its run."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.config import PORTS
from covey.base.errors import ConfigError, ConnectError
from covey.base.version import __version__
from covey.net.descriptors import explain, keep_a_spare
from covey.net.discovery.host_rendezvous import (
    HostRendezvous,
    check_folder,
    host_token,
    local_address_towards,
    socket_path,
)
from covey.net.run_folder import RunFolder
from covey.net.temporary import temporary_folder
from covey.runtime import loop as control
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials
from covey.runtime.links.link import plain_ip
from covey.runtime.members.audit import SILENT, Auditor
from covey.wire.messages import NAME_LIMIT, Address, Card, Contact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.config import GroupConfig
    from covey.net.discovery.host_registry import HostRegistry
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.identity import NodeIdentity
    from covey.runtime.environment import Place
    from covey.wire.secret import ClusterSecret

PORT_OFFSET: Final = 1
"""Rank 0 listens this far above MASTER_PORT, which belongs to torch's store: to torchrun's, or to the script's own."""
BACKLOG: Final = 256
LEAVE_SECONDS: Final = 2.0
"""How long the control loop may take to stop listening."""


@dataclass(frozen=True)
class Endpoint:
    """A node's own half of every link: what it proves itself with, who it is, and where it listens."""

    credentials: LinkCredentials
    card: Card
    acceptor: Acceptor
    contacts: Mapping[int, Contact]
    """The ranks that it knows how to reach from the start."""
    on_close: Callable[[], None]
    host_registry: HostRegistry | None = None
    """In a cluster: its nodes on this host."""
    objection: Callable[[Card], str] = lambda _card: ""
    """Tells why a node may not be in the cluster, or nothing."""
    follow: Callable[[Cluster], None] = lambda _cluster: None
    """Proves membership by the cluster's secret as it is now, and by the one before while that is good."""
    audit: Auditor = SILENT

    def leave(self) -> None:
        """Stop listening and free everything: for a seat that no node has taken over. Not on the control loop."""
        control.finish(self.acceptor.close(), LEAVE_SECONDS, self.on_close)


def folder_seat(place: Place, config: GroupConfig) -> Endpoint:
    """Sit down in a folder of this host, where all ranks meet."""
    folder = Path(place.folder)
    if place.token is not None:
        check_folder(folder)
    meeting = HostRendezvous(folder, place.rank, place.token)
    listeners = [meeting.sock]
    addresses: tuple[Address, ...] = ()
    try:
        if config.lanes in ("tcp", "secure"):
            tcp = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            tcp.setblocking(False)
            listeners.append(tcp)
            addresses = (Address("127.0.0.1", tcp.getsockname()[1], "lo"),)
        host = host_token(folder)
        credentials = LinkCredentials.of_token(meeting.token)
    except BaseException:
        meeting.leave()
        raise
    return Endpoint(
        credentials=credentials,
        card=_anonymous_card(Contact(host, addresses, str(meeting.path))),
        acceptor=Acceptor(listeners, credentials.door_key, place.name),
        contacts={
            rank: Contact(host, (), str(socket_path(folder, rank))) for rank in range(place.size) if rank != place.rank
        },
        on_close=meeting.leave,
    )


def insecure_seat(place: Place) -> Endpoint:
    """Listen where ranks on other hosts can come, in clear; name rank 0 as the one who knows them all."""
    assert place.master is not None
    host, port = place.master
    with contextlib.ExitStack() as undo:
        own = host if place.rank == 0 else local_address_towards(host)
        listener = undo.enter_context(_listen_at(own, port + PORT_OFFSET if place.rank == 0 else 0))
        folder = RunFolder()
        undo.callback(folder.remove)
        path = str(socket_path(check_folder(Path(folder.path)), place.rank))
        local = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(path)
        local.listen(BACKLOG)
        local.setblocking(False)
        # Nothing secret is shared: this only keeps different runs apart.
        credentials = LinkCredentials.of_token(f"insecure/{place.name}".encode())
        address = Address(*listener.getsockname()[:2])
        card = _anonymous_card(Contact(host_token(Path(folder.path).parent), (address,), path))
        acceptor = Acceptor([listener, local], credentials.door_key, place.name)
        release = undo.pop_all().close
    return Endpoint(credentials, card, acceptor, _rank_zero(place), release)


def launched_seat(place: Place, config: GroupConfig, cluster: Cluster) -> Endpoint:
    """Listen where ranks on other hosts can come, with the cluster's secret; rank 0 knows them all."""
    assert place.master is not None
    port = place.master[1] + PORT_OFFSET if place.rank == 0 else 0
    return cluster_endpoint(cluster, config, run=place.name, ports=(port,), contacts=_rank_zero(place))


def cluster_endpoint(
    cluster: Cluster,
    config: GroupConfig,
    *,
    run: str,
    ports: range | tuple[int, ...] = PORTS,
    contacts: Mapping[int, Contact] | None = None,
    identity: NodeIdentity | None = None,
    has_lanes: bool = True,
    tie_breaker: str = "",
    is_visit: bool = False,
) -> Endpoint:
    """Listen on every interface that may be used, as a node of a cluster; `identity` defaults to a slot of this host.

    A node that `has_lanes` also listens at a unix socket, for processes of this host. `tie_breaker` names the node or
    host that should break ties in the run; `here` means this one. A node on a visit leaves nothing in the audit log.

    Raises:
        ConfigError: no port is free, no interface matches, or the identity cannot be used.
    """
    from covey.net.discovery.host_registry import HostRegistry
    from covey.net.discovery.interfaces import (
        advertised,
        describe,
        loopback_interfaces,
        parse_pattern,
        usable_interfaces,
    )
    from covey.net.keys.identity import NodeIdentity

    pattern = parse_pattern(config.interfaces)
    with contextlib.ExitStack() as undo:
        usable = usable_interfaces(config.interfaces)
        own = identity if identity is not None else NodeIdentity.acquire()
        undo.callback(own.release)
        listener = undo.enter_context(_listen_everywhere(ports))
        host_registry = HostRegistry(local_tag(cluster.secret))
        undo.callback(host_registry.close)
        listeners, path = [listener], ""
        if has_lanes:
            local, path = host_registry.listen(BACKLOG)
            listeners.append(undo.enter_context(local))
        port = listener.getsockname()[1]
        addresses = advertised(usable, port) or (Address("127.0.0.1", port, "lo"),)
        credentials = _gate_of(cluster, own)
        host = host_token(Path(temporary_folder()))
        contact = Contact(host, addresses, path)
        breaks_ties = tie_breaker in ("here", own.name, _host_name()) if tie_breaker else False
        card = Card(
            own.id,
            own.life,
            own.name,
            _host_name(),
            os.getpid(),
            contact,
            __version__,
            _keeper_id(),
            breaks_ties,
            own.machine,
            own.endorsement,
        )
        loopbacks = {ip for interface in loopback_interfaces() for ip in interface.addresses} | {"127.0.0.1", "::1"}

        def allows(ip: str) -> bool:
            plain = plain_ip(ip)
            return plain in loopbacks or not config.interfaces or pattern.allows(describe(plain), plain)

        acceptor = Acceptor(listeners, credentials.door_key, run, allows=allows)
        acceptor.door_keys = credentials.door_keys
        audit = SILENT if is_visit else Auditor(cluster.name, run)
        acceptor.on_refused = audit.refused_connection
        keep_a_spare()  # what a member promises is written down before it is said
        release = undo.pop_all().close
    keeps_out = functools.partial(_objection, cluster, own.name)

    def follow(changed: Cluster) -> None:
        credentials.become(_gate_of(changed, own))

    return Endpoint(credentials, card, acceptor, contacts or {}, release, host_registry, keeps_out, follow, audit)


def _gate_of(cluster: Cluster, own: NodeIdentity) -> LinkCredentials:
    """Return what proves membership by a cluster's secret, and by the one before it while that is good."""
    from covey.net.keys.tls import Credentials

    def of(secret: ClusterSecret) -> LinkCredentials:
        return LinkCredentials(secret.derive("door"), tls=Credentials(secret.derive("node-ca"), own.private))

    credentials, now = of(cluster.secret), time.time()
    if (earlier := cluster.earlier(now)) is not None:
        credentials.earlier, credentials.until = of(earlier), time.monotonic() + cluster.previous_until - now
    return credentials


def _objection(cluster: Cluster, here: str, card: Card) -> str:
    from covey.net.keys.charter import objection

    return objection(cluster, card, here)


def local_tag(secret: ClusterSecret) -> str:
    """Return the tag of the folder where nodes of one host that hold this secret find each other."""
    return secret.derive("local")[:8].hex()


def _anonymous_card(contact: Contact) -> Card:
    name = _host_name()
    return Card(b"", secrets.token_bytes(16), name, name, os.getpid(), contact)


def _keeper_id() -> bytes:
    """Return the id of the node that speaks for this process, if `covey run` started it in a cluster."""
    with contextlib.suppress(ValueError):
        return bytes.fromhex(os.environ.get("COVEY_KEEPER_ID", ""))
    return b""


def _host_name() -> str:
    return "".join(letter if " " < letter <= "~" else "?" for letter in socket.gethostname())[:NAME_LIMIT]


def _rank_zero(place: Place) -> dict[int, Contact]:
    if place.rank == 0:
        return {}
    assert place.master is not None
    host, port = place.master
    return {0: Contact("", numeric(host, port + PORT_OFFSET), "")}


def numeric(host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses of a host, which may be given by a name that the system can look up."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectError(f"{host}: {error.strerror or error}; write a numeric address") from error
    return tuple(dict.fromkeys(Address(str(address[0]).partition("%")[0], port) for *_, address in found))


def _listen_at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {explain(error)}") from error
    sock.setblocking(False)
    return sock


def _listen_everywhere(ports: range | tuple[int, ...]) -> socket.socket:
    """Listen on the first free of `ports`, by IPv6 and IPv4 if the system has both."""
    problem: OSError | None = None
    dual = socket.has_dualstack_ipv6()
    anywhere = (0,) if len(ports) > 1 else ()  # so many nodes on one host: others find it all the same
    for port in (*ports, *anywhere):
        try:
            if dual:
                sock = socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
            else:
                sock = socket.create_server(("0.0.0.0", port), backlog=BACKLOG)
        except OSError as error:
            problem = error
        else:
            sock.setblocking(False)
            return sock
    wanted = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise ConfigError(f"cannot listen on port {wanted}: {explain(problem) if problem else 'none'}; set COVEY_PORT")
