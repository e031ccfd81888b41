"""The contents of an mDNS announcement: a node of a cluster listens at these addresses and this port.

Everything is in one TXT record, under a tag: an HMAC over the version, fresh random bytes, the port and the addresses.
Nodes of the cluster recognise it. Other machines learn neither the cluster nor the node, cannot tell whether two
announcements belong to one cluster, and cannot add or remove an address. Other records (SRV, A, AAAA) are ignored.

Any machine can replay an announcement, so its addresses are hints, and the handshake decides. The tag changes with each
announcement, so that a replay differs from a new one.

A machine that shows a code for pairing announces itself in the same form, under a key that is no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SERVICE: Final = "_covey._tcp.local."
BEACON_VERSION: Final = b"1"
BEACON_NONCE_BYTES: Final = 16
BEACON_TAG_BYTES: Final = 16
ANNOUNCED_ADDRESSES: Final = 8
"""Addresses in one announcement: of one interface, IPv4 first."""
PAIRING_KEY: Final = hashlib.sha256(b"covey/1/pairing-beacon").digest()
"""The key of announcements of pairing, which proves nothing: machines without a secret look for them."""
_TAG_LABEL: Final = b"covey/1/mdns-tag"
_HEX: Final = re.compile(rb"[0-9a-f]{32}")
_PORT_TEXT: Final = re.compile(rb"[1-9][0-9]{0,4}")


@dataclass(frozen=True)
class Announcement:
    """A parsed announcement."""

    port: int
    ips: tuple[str, ...]
    """Numeric; IPv6 link-local addresses have no scope."""
    nonce: bytes
    tag: bytes
    is_ours: bool
    """Whether it was made with this cluster's key."""


def make(key: bytes, nonce: bytes, port: int, ips: Iterable[str]) -> dict[bytes, bytes]:
    """Return the TXT properties of one announcement; `nonce` is `BEACON_NONCE_BYTES` random bytes.

    Of more than `ANNOUNCED_ADDRESSES` addresses, the first are announced.
    """
    parsed = sorted((ipaddress.ip_address(ip) for ip in ips), key=lambda ip: ip.version)[:ANNOUNCED_ADDRESSES]
    four = b"".join(ip.packed for ip in parsed if ip.version == 4)
    six = b"".join(ip.packed for ip in parsed if ip.version == 6)
    said = {b"v": BEACON_VERSION, b"n": nonce.hex().encode(), b"p": b"%d" % port, b"4": four, b"6": six}
    return {**said, b"t": _tag(key, nonce, port, four, six).hex().encode()}


def read(key: bytes, properties: Mapping[bytes, bytes | None]) -> Announcement | None:
    """Return the announcement in TXT properties, or None if they are not in the form that `make` returns."""
    version, nonce, port, four, six, tag = (properties.get(name) for name in (b"v", b"n", b"p", b"4", b"6", b"t"))
    if version != BEACON_VERSION or not (nonce and _HEX.fullmatch(nonce) and tag and _HEX.fullmatch(tag)):
        return None
    four, six = four or b"", six or b""
    if port is None or not _PORT_TEXT.fullmatch(port) or int(port) >= 1 << 16 or len(four) % 4 or len(six) % 16:
        return None
    ips = [str(ipaddress.IPv4Address(four[at : at + 4])) for at in range(0, len(four), 4)]
    ips += [str(ipaddress.IPv6Address(six[at : at + 16])) for at in range(0, len(six), 16)]
    if not 0 < len(ips) <= ANNOUNCED_ADDRESSES:
        return None
    random, given = bytes.fromhex(nonce.decode()), bytes.fromhex(tag.decode())
    is_ours = hmac.compare_digest(given, _tag(key, random, int(port), four, six))
    return Announcement(int(port), tuple(ips), random, given, is_ours)


def split_txt(text: bytes) -> dict[bytes, bytes | None]:
    """Return the properties in the data of a TXT record; of a name that comes twice, the first counts (RFC 6763)."""
    properties: dict[bytes, bytes | None] = {}
    at = 0
    while at < len(text):
        end = at + 1 + text[at]
        name, separator, value = text[at + 1 : end].partition(b"=")
        properties.setdefault(name, value if separator else None)
        at = end
    return properties


def _tag(key: bytes, nonce: bytes, port: int, four: bytes, six: bytes) -> bytes:
    numbers = bytes((len(BEACON_VERSION),)) + BEACON_VERSION + nonce + port.to_bytes(2, "big")
    said = numbers + bytes((len(four),)) + four + bytes((len(six),)) + six
    return hmac.digest(key, _TAG_LABEL + said, "sha256")[:BEACON_TAG_BYTES]
