"""Counts multicast DNS packets on this machine: its own packets that come back, and those of other machines.

It sends nothing. It binds to the group's address, so it takes no packets away from other programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.net.discovery.interfaces import Interface

PORT: Final = 5353
GROUP4, GROUP6 = "224.0.0.251", "ff02::fb"
MOST_SOURCES: Final = 256
_COVEY: Final = b"\x06_covey\x04_tcp"


@dataclass
class Heard:
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
        self.heard = {interface.name: Heard() for interface in interfaces}
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
        if _COVEY in data and len(data) > 12 and len(heard.speakers) < MOST_SOURCES:
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
    return _join(socket.AF_INET, (GROUP4, PORT), socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, groups)


def _listen6(interface: Interface) -> socket.socket | None:
    if not any(net.version == 6 for net in interface.networks):
        return None
    group = socket.inet_pton(socket.AF_INET6, GROUP6) + struct.pack("@I", interface.index)
    address = (GROUP6, PORT, 0, interface.index)
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
