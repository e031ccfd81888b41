"""What an mDNS announcement says: that somebody who holds a cluster's secret listens on a port, and nothing else.

The tag is an HMAC over fresh random bytes and the port: members recognise each other, strangers learn neither the
cluster nor the node, and two announcements cannot be told to be of one cluster. Anybody can repeat an announcement,
so an address heard with one is a hint; the handshake decides.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE: Final = "_covey._tcp.local."
VERSION: Final = b"1"
NONCE_BYTES: Final = 16
TAG_BYTES: Final = 16
_LABEL: Final = b"covey/1/mdns-tag"
_HEX: Final = re.compile(rb"[0-9a-f]{32}")


def make(key: bytes, nonce: bytes, port: int) -> dict[bytes, bytes]:
    """Return the TXT properties of one announcement; `nonce` is `NONCE_BYTES` random bytes."""
    return {b"v": VERSION, b"n": nonce.hex().encode(), b"t": _tag(key, nonce, port)}


def matches(key: bytes, properties: Mapping[bytes, bytes | None], port: int) -> bool:
    """Tell whether a holder of `key` made these properties for `port`; whatever else they hold, they do not match."""
    said = _read(properties)
    return said is not None and 0 < port < 1 << 16 and hmac.compare_digest(said[1], _tag(key, said[0], port))


def is_foreign_covey(key: bytes, properties: Mapping[bytes, bytes | None], port: int) -> bool:
    """Tell whether this is an announcement of covey, well formed, by somebody who holds another key."""
    return _read(properties) is not None and 0 < port < 1 << 16 and not matches(key, properties, port)


def _read(properties: Mapping[bytes, bytes | None]) -> tuple[bytes, bytes] | None:
    """Return nonce and tag (in hex, as it travels), or None if these are not properties that `make` makes."""
    nonce, tag = properties.get(b"n"), properties.get(b"t")
    if properties.get(b"v") != VERSION or not isinstance(nonce, bytes) or not isinstance(tag, bytes):
        return None
    if not _HEX.fullmatch(nonce) or not _HEX.fullmatch(tag):
        return None
    return bytes.fromhex(nonce.decode()), tag


def _tag(key: bytes, nonce: bytes, port: int) -> bytes:
    return hmac.digest(key, _LABEL + nonce + port.to_bytes(2, "big"), "sha256")[:TAG_BYTES].hex().encode()
