"""The local half of every link of a node: its credentials, its card, and where it listens."""

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

from covey.base.errors import ConfigError, ConnectError
from covey.base.settings import NODE_PORTS
from covey.base.version import __version__
from covey.net.discovery.host_rendezvous import host_token
from covey.net.host.descriptors import explain, keep_a_spare
from covey.net.host.folders import host_folder
from covey.net.host.machine import hardware
from covey.runtime import loop as control
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials
from covey.runtime.links.link import plain_ip
from covey.runtime.state.audit import SILENT, Auditor
from covey.wire.messages import NAME_LIMIT, Address, Card, Contact
from covey.wire.relay import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.net.discovery.host_registry import HostRegistry
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.identity import NodeIdentity
    from covey.net.keys.organisation import Organisation
    from covey.net.router.port_mapping import PortMapping
    from covey.wire.secret import ClusterSecret

NODE_BACKLOG: Final = 256
UNLISTEN_SECONDS: Final = 2.0
"""How long the control loop may take to stop listening."""


@dataclass(frozen=True)
class Endpoint:
    """What a node has before it is linked with another: credentials, card, listening sockets."""

    credentials: LinkCredentials
    card: Card
    acceptor: Acceptor
    contacts: Mapping[Seat, Contact]
    """By rank: how to reach the ranks that are known from the start."""
    on_close: Callable[[], None]
    host_registry: HostRegistry | None = None
    """In a cluster: the registry of its nodes on this host."""
    objection: Callable[[Card], str] = lambda _card: ""
    """Returns why a node may not be in the cluster, or ""."""
    follow: Callable[[Cluster], None] = lambda _cluster: None
    """Called with a changed cluster: credentials use its secret, and accept the one before while that is good."""
    audit: Auditor = SILENT
    cluster: Cluster | None = None
    """The cluster that it is an endpoint of, if any."""
    mapping: PortMapping | None = None
    """The port of this machine's router that leads here, if it was asked for one."""

    def mapped(self) -> tuple[Address, ...]:
        """Return the address of the router at which this node can be reached from outside, if there is one."""
        mapped = None if self.mapping is None else self.mapping.mapped
        return () if mapped is None else (Address(mapped.ip, mapped.port, "router"),)

    @property
    def cluster_tag(self) -> str:
        """Differs between clusters, and stays when the secret changes; empty without a cluster."""
        return "" if self.cluster is None else self.cluster.tag

    def leave(self) -> None:
        """Stop listening and free everything, if no node has taken over. Not on the control loop."""
        control.finish(self.acceptor.close(), UNLISTEN_SECONDS, self.on_close)


def cluster_endpoint(
    cluster: Cluster,
    config: GroupConfig,
    *,
    run: str,
    ports: range | tuple[int, ...] = NODE_PORTS,
    contacts: Mapping[Seat, Contact] | None = None,
    identity: NodeIdentity | None = None,
    has_lanes: bool = True,
    tie_breaker: str = "",
    is_visit: bool = False,
    token: bytes = b"",
    relay_port: int = 0,
    maps_port: bool = False,
) -> Endpoint:
    """Listen as a node of a cluster on every usable interface; `identity` defaults to a free slot of this host.

    A node that `has_lanes` also listens at a unix socket, for processes of this host. `tie_breaker` names the node or
    host that should break ties in the run; `here` means this one. A node that `is_visit` writes no audit log. It
    registers with relays under `token`, or a random one; `relay_port` is where this machine is a relay, unless a keeper
    has set it. With `maps_port`, the router of this machine is asked to pass connections on to its port.

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
    parse_pattern(config.metered)  # an error in it is one now, and not when a sum is under way
    with contextlib.ExitStack() as undo:
        usable = usable_interfaces(config.interfaces)
        own = identity if identity is not None else NodeIdentity.acquire(preferred=_id_in("COVEY_NODE_ID"))
        undo.callback(own.release)
        listener = undo.enter_context(listen_everywhere(ports))
        host_registry = HostRegistry(local_tag(cluster.secret))
        undo.callback(host_registry.close)
        listeners, path = [listener], ""
        if has_lanes:
            local, path = host_registry.listen(NODE_BACKLOG)
            listeners.append(undo.enter_context(local))
        port, mapping = listener.getsockname()[1], None
        if maps_port:
            from covey.net.router.port_mapping import PortMapping

            mapping = PortMapping(port)
            undo.callback(mapping.close)
        addresses = advertised(usable, port) or (Address("127.0.0.1", port, "lo"),)
        organisation = _organisation(config)
        credentials = _credentials_of(cluster, own, organisation)
        host = host_token(Path(host_folder()))
        token = token or secrets.token_bytes(TOKEN_BYTES)
        contact = Contact(host, addresses, path, token, relay_port or _relay_port())
        breaks_ties = tie_breaker in ("here", own.name, host_name()) if tie_breaker else False
        card = Card(
            own.id,
            own.life,
            own.name,
            host_name(),
            os.getpid(),
            contact,
            __version__,
            _id_in("COVEY_KEEPER_ID"),
            breaks_ties,
            own.machine,
            own.endorsement,
            hardware(),
            keeps_store=bool(config.store_file),
        )
        loopbacks = {ip for interface in loopback_interfaces() for ip in interface.addresses} | {"127.0.0.1", "::1"}

        def allows(ip: str) -> bool:
            plain = plain_ip(ip)
            return plain in loopbacks or not config.interfaces or pattern.allows(describe(plain), plain)

        audit = SILENT if is_visit else Auditor(cluster.name, run)
        acceptor = Acceptor(
            listeners,
            credentials.door_key,
            run,
            allows=allows,
            door_keys=credentials.door_keys,
            refused=audit.refused_connection,
        )
        keep_a_spare()  # so that promises can be written to disk when descriptors run out
        release = undo.pop_all().close
    objection = functools.partial(_objection, cluster, own.name)

    def follow(changed: Cluster) -> None:
        credentials.become(_credentials_of(changed, own, organisation))

    return Endpoint(
        credentials, card, acceptor, contacts or {}, release, host_registry, objection, follow, audit, cluster, mapping
    )


def _organisation(config: GroupConfig) -> Organisation | None:
    """Return the organisation whose certificates the settings name, if they name some."""
    if not (config.tls_ca or config.tls_cert or config.tls_key):
        return None
    from covey.net.keys.organisation import Organisation, PemFiles

    files = PemFiles.of(config.tls_ca, config.tls_cert, config.tls_key)
    assert files is not None
    return Organisation(files)


def _credentials_of(cluster: Cluster, own: NodeIdentity, organisation: Organisation | None) -> LinkCredentials:
    """Return credentials of a cluster's secret, and of the one before it while that is good."""
    from covey.net.keys.tls import Credentials

    def of(secret: ClusterSecret) -> LinkCredentials:
        tls = Credentials(secret.derive("node-ca"), own.private)
        return LinkCredentials(secret.derive("door"), tls=tls, organisation=organisation)

    credentials, now = of(cluster.secret), time.time()
    if (earlier := cluster.earlier(now)) is not None:
        credentials.earlier, credentials.until = of(earlier), time.monotonic() + cluster.previous_until - now
    return credentials


def _objection(cluster: Cluster, here: str, card: Card) -> str:
    from covey.net.keys.charter import objection

    return objection(cluster, card, here)


def local_tag(secret: ClusterSecret) -> str:
    """Return the tag of the registry in which nodes of one host that hold this secret find each other."""
    return secret.derive("local")[:8].hex()


def _id_in(variable: str) -> bytes:
    """Return a node id that `covey run` has set: of this process's keeper, or of the process that this one replaces."""
    with contextlib.suppress(ValueError):
        return bytes.fromhex(os.environ.get(variable, ""))
    return b""


def _relay_port() -> int:
    """Return the port at which the keeper of this process offers a relay, as `covey run` has set it; 0 if none."""
    text = os.environ.get("COVEY_RELAY_PORT", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) < 1 << 16 else 0


def host_name() -> str:
    """Return the name of this host in printable ASCII, as cards show it."""
    return "".join(letter if " " < letter <= "~" else "?" for letter in socket.gethostname())[:NAME_LIMIT]


def numeric(host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses of a host, given by address or by name; ConnectError if the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectError(f"{host}: {error.strerror or error}; write a numeric address") from error
    return tuple(dict.fromkeys(Address(str(address[0]).partition("%")[0], port) for *_, address in found))


def listen_everywhere(ports: range | tuple[int, ...]) -> socket.socket:
    """Listen on the first free port of `ports`, by IPv6 and IPv4 if the system has both."""
    problem: OSError | None = None
    dual = socket.has_dualstack_ipv6()
    anywhere = (
        (0,) if len(ports) > 1 else ()
    )  # all taken by nodes of this host: any port works, because nodes announce theirs
    for port in (*ports, *anywhere):
        try:
            if dual:
                sock = socket.create_server(
                    ("::", port), family=socket.AF_INET6, backlog=NODE_BACKLOG, dualstack_ipv6=True
                )
            else:
                sock = socket.create_server(("0.0.0.0", port), backlog=NODE_BACKLOG)
        except OSError as error:
            problem = error
        else:
            sock.setblocking(False)
            return sock
    wanted = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise ConfigError(f"cannot listen on port {wanted}: {explain(problem) if problem else 'none'}; set COVEY_PORT")
