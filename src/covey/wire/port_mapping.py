"""Datagrams between a machine and its router, with which the router is asked to pass connections to one port on.

PCP (RFC 6887) and its predecessor NAT-PMP (RFC 6886) use the same port of the router. Answers are hostile input: any
machine of the network may send one.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Final

from covey.base.errors import RemoteProtocolError

GATEWAY_PORT: Final = 5351
PCP_NONCE_BYTES: Final = 12
PCP_DATAGRAM_BYTES: Final = 1100
"""Most bytes of a datagram of PCP."""
_PCP, _PMP = 2, 0
_ANSWER_BIT: Final = 0x80
_MAP: Final = 1
_PMP_ADDRESS, _PMP_TCP = 0, 2
_MAPPED_TCP: Final = 6
_PCP_HEAD: Final = struct.Struct(">BBxBII12x")
_PCP_MAP: Final = struct.Struct(">12sB3xHH16s")
_PMP_HEAD: Final = struct.Struct(">BBHI")
_PMP_MAP: Final = struct.Struct(">HHI")
UNSUPPORTED_VERSION: Final = 1
"""The result with which a router refuses a version that it does not know, in both protocols."""
RESULTS: Final = {
    1: "it does not know the version of the request",
    2: "it does not allow it",
    3: "it has no network, or did not understand the request",
    4: "it has no room, or does not know the request",
    5: "it does not know the request",
    8: "it has no room",
    11: "it does not give this port",
    12: "it sees another address than this machine's: there is a second router between them",
}
"""What a router means that refuses, as far as both protocols agree."""


@dataclass(frozen=True)
class PcpMapping:
    """The answer of PCP: for `lifetime` seconds, connections to this address and port come here."""

    result: int
    lifetime: int
    nonce: bytes
    internal_port: int
    external_port: int
    external_ip: str


@dataclass(frozen=True)
class PmpMapping:
    """The answer of NAT-PMP: for `lifetime` seconds, connections to this port of the router come here."""

    result: int
    internal_port: int
    external_port: int
    lifetime: int


@dataclass(frozen=True)
class PmpAddress:
    """The answer of NAT-PMP: the router's address on the other side."""

    result: int
    external_ip: str


@dataclass(frozen=True)
class PmpRefusal:
    """The answer of NAT-PMP to a request of another version."""

    result: int


GatewayAnswer = PcpMapping | PmpMapping | PmpAddress | PmpRefusal


def ask_pcp(client: str, nonce: bytes, port: int, wanted: int, lifetime: int) -> bytes:
    """Return a request for TCP connections to `wanted`, or another port; a lifetime of 0 ends the mapping."""
    head = struct.pack(">BBxxI", _PCP, _MAP, lifetime) + _sixteen(client)
    return head + _PCP_MAP.pack(nonce, _MAPPED_TCP, port, wanted, _sixteen("0.0.0.0"))


def ask_pmp(port: int, wanted: int, lifetime: int) -> bytes:
    """Return a request for TCP connections to `wanted`, or another port; a lifetime of 0 ends the mapping."""
    return struct.pack(">BBxxHHI", _PMP, _PMP_TCP, port, wanted, lifetime)


def ask_pmp_address() -> bytes:
    """Return a question for the router's address on the other side."""
    return bytes((_PMP, _PMP_ADDRESS))


def read_answer(data: bytes) -> GatewayAnswer:
    """Return what a router answers to one of the requests above; raise RemoteProtocolError for anything else."""
    if len(data) >= 4 and data[0] == _PCP:
        return _read_pcp(data)
    if len(data) < _PMP_HEAD.size or data[0] != _PMP:
        raise RemoteProtocolError(f"no answer of a router: {len(data)} bytes")
    _, kind, result, _ = _PMP_HEAD.unpack_from(data)
    body = data[_PMP_HEAD.size :]
    if kind == _ANSWER_BIT | _PMP_ADDRESS and len(body) >= 4:
        return PmpAddress(result, str(ipaddress.IPv4Address(body[:4])))
    if kind == _ANSWER_BIT | _PMP_TCP and len(body) >= _PMP_MAP.size:
        return PmpMapping(result, *_PMP_MAP.unpack_from(body))
    if kind & _ANSWER_BIT and result:
        return PmpRefusal(result)
    raise RemoteProtocolError(f"no answer of a router: kind {kind} and {len(data)} bytes")


def _read_pcp(data: bytes) -> PcpMapping:
    if not _PCP_HEAD.size + _PCP_MAP.size <= len(data) <= PCP_DATAGRAM_BYTES:
        raise RemoteProtocolError(f"no answer of a router: {len(data)} bytes of PCP")
    _, kind, result, lifetime, _ = _PCP_HEAD.unpack_from(data)
    nonce, protocol, internal, external, packed = _PCP_MAP.unpack_from(data, _PCP_HEAD.size)
    if kind != _ANSWER_BIT | _MAP or protocol != _MAPPED_TCP:
        raise RemoteProtocolError(f"no answer of a router: kind {kind} and protocol {protocol} of PCP")
    six = ipaddress.IPv6Address(packed)
    return PcpMapping(result, lifetime, nonce, internal, external, str(six.ipv4_mapped or six))


def _sixteen(ip: str) -> bytes:
    """Return an address as PCP writes it: IPv4 addresses are mapped into IPv6."""
    address = ipaddress.ip_address(ip)
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
