"""What the doctor tries on the network while it looks at the rest: it counts multicast packets, and asks the router.

Counted are packets of this machine that come back, and those of other machines. Both probes run beside the examination.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from covey.base.errors import ConnectError
from covey.net.router import port_mapping
from covey.net.router.upnp import UpnpPort
from covey.wire.port_mapping import PCP_NONCE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.net.discovery.interfaces import Interface

MDNS_PORT: Final = 5353
GROUP4, GROUP6 = "224.0.0.251", "ff02::fb"
SOURCES_COUNTED: Final = 256
_COVEY_SERVICE: Final = b"\x06_covey\x04_tcp"
UNUSED_PORT: Final = 9
"""The port of the discard service."""
ROUTER_SECONDS: Final = 8.0
"""From the first question: the whole examination has little more."""


@dataclass
class PacketsHeard:
    """Packets that arrived on one interface."""

    own: int = 0
    """Packets of this machine, including those of this process."""
    others: int = 0
    speakers: dict[str, bool] = field(default_factory=dict)
    """Other machines that sent packets about covey; True if one packet was an answer, which announces a node."""


class MulticastListener(asyncio.DatagramProtocol):
    """Counts packets of multicast DNS by interface. Runs on the control loop."""

    def __init__(self, interfaces: Sequence[Interface]) -> None:
        self._interfaces = interfaces
        self._own = {ip for interface in interfaces for ip in interface.addresses}
        self.heard = {interface.name: PacketsHeard() for interface in interfaces}
        self._transports: list[asyncio.BaseTransport] = []

    async def open(self) -> None:
        """Start to listen, on each address family that works."""
        loop = asyncio.get_running_loop()
        for sock in (_listen4(self._interfaces), *map(_listen6, self._interfaces)):
            if sock is not None:
                transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=sock)
                self._transports.append(transport)

    def close(self) -> None:
        for transport in self._transports:
            transport.close()

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        ip = str(addr[0]).partition("%")[0]
        interface = self._interface_of(ip, addr[3] if len(addr) == 4 else 0)
        if interface is None:
            return
        heard = self.heard[interface.name]
        if ip in self._own:
            heard.own += 1
            return
        heard.others += 1
        if _COVEY_SERVICE in data and len(data) > 12 and len(heard.speakers) < SOURCES_COUNTED:
            is_answer = bool(data[2] & 0x80)
            heard.speakers[ip] = heard.speakers.get(ip, False) or is_answer

    def _interface_of(self, ip: str, scope: int) -> Interface | None:
        address = ipaddress.ip_address(ip)
        for interface in self._interfaces:
            if scope and address.is_link_local:
                if interface.index == scope:
                    return interface
            elif any(address.version == net.version and address in net.network for net in interface.networks):
                return interface
        return None


def _listen4(interfaces: Sequence[Interface]) -> socket.socket | None:
    """Return one socket for all interfaces, because each of several sockets would receive the packets of all."""
    own = [next((net.ip.packed for net in each.networks if net.version == 4), b"") for each in interfaces]
    groups = [socket.inet_aton(GROUP4) + ip for ip in own if ip]
    return _join(socket.AF_INET, (GROUP4, MDNS_PORT), socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, groups)


def _listen6(interface: Interface) -> socket.socket | None:
    if not any(net.version == 6 for net in interface.networks):
        return None
    group = socket.inet_pton(socket.AF_INET6, GROUP6) + struct.pack("@I", interface.index)
    address = (GROUP6, MDNS_PORT, 0, interface.index)
    return _join(socket.AF_INET6, address, socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, [group])


def _join(
    family: int, address: tuple[Any, ...], level: int, option: int, groups: Sequence[bytes]
) -> socket.socket | None:
    """Return a socket that is in all groups that can be joined; None if there are none (the search reports why)."""
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError:  # the system has no such family
        return None
    joined = 0
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        for group in groups:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, group)
                joined += 1
    if joined:
        return sock
    sock.close()
    return None


class RouterFacts(NamedTuple):
    """With which protocol the router maps ports and its address outside if that is private, or why it does not."""

    protocol: str = ""
    private_ip: str = ""
    problem: str = ""


class RouterQuestion:
    """A question that is asked from `__enter__` until `__exit__`, at most.

    The router is asked to end the mapping of a port that covey never maps or, with UPnP, for its address outside. So
    nothing is mapped, and none of a run's mappings ends.
    """

    def __init__(self) -> None:
        self._facts = RouterFacts(problem="the router has not answered in time")
        self._until, self._ending = time.monotonic() + ROUTER_SECONDS, threading.Event()
        self._thread = threading.Thread(target=self._ask, name="covey-doctor-router", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def answer(self) -> RouterFacts:
        """Wait for the answer, until it is too late for one."""
        self._thread.join(max(0.0, self._until - time.monotonic()))
        return self._facts

    def _ask(self) -> None:
        nonce, upnp = secrets.token_bytes(PCP_NONCE_BYTES), UpnpPort(UNUSED_PORT, self._ending)
        try:
            gateway = port_mapping.default_gateway()
            said = port_mapping.ask_gateway(gateway, UNUSED_PORT, nonce, 0, port_mapping.ANSWER_WAITS[:2], upnp)
        except (ConnectError, OSError) as error:
            self._facts = RouterFacts(problem=str(error))
        else:
            self._facts = RouterFacts(said.protocol, said.ip if said.is_private else "")
