"""What covey itself reads and writes of QUIC datagrams: whose they are, proofs of the key, and messages about paths.

QUIC proper is qh3's. covey looks at the fields that all versions of QUIC share (RFC 8999), to find the connection of a
datagram, and at those of an Initial packet, to refuse strangers before anything is allocated for them.

The dialler proves the door's key with its first datagram: its connection id is a random number followed by a code over
it. A datagram without that proof gets no answer. A connection then has four streams, two in each direction: the bytes,
and the limits up to which the other end may send.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final, NamedTuple

from covey.base.errors import RemoteProtocolError

VERSION_1: Final = 1
"""The version of QUIC (RFC 9000)."""
CID_BYTES: Final = 20
"""Bytes of every connection id: as long as QUIC allows, because a dialler's carries a proof."""
CID_NONCE_BYTES: Final = 8
INITIAL_BYTES: Final = 1200
"""No first datagram of a connection is shorter."""
TOKEN_SECONDS: Final = 10
"""How long a dialler may take to send the token back that proves its address."""
PATH_NONCE_BYTES: Final = 16
DIALLER_BYTES, DIALLER_LIMITS, ACCEPTOR_BYTES, ACCEPTOR_LIMITS = 2, 6, 3, 7
"""The streams of a connection: all lead in one direction."""

_LONG, _FIXED_BIT, _INITIAL_MASK = 0x80, 0x40, 0x30
_PROBE, _PATH_ANSWER = 0x01, 0x02
_CODE_BYTES: Final = 16
_TOKEN: Final = struct.Struct(f">Q{CID_BYTES}s{CID_BYTES}s")
_LIMIT: Final = struct.Struct("<Q")
STREAM_LIMIT_BYTES: Final = _LIMIT.size


class FirstPacket(NamedTuple):
    """The fields of an Initial packet that are readable without keys."""

    destination: bytes
    source: bytes
    token: bytes


def proving_cid(key: bytes, nonce: bytes) -> bytes:
    """Return a dialler's connection id, which proves the door's key; `nonce` is random."""
    return nonce + hmac.digest(key, b"covey/1/quic-dialler" + nonce, "sha256")[: CID_BYTES - CID_NONCE_BYTES]


def is_proof(key: bytes, cid: bytes) -> bool:
    """Tell whether a connection id proves the door's key."""
    return len(cid) == CID_BYTES and hmac.compare_digest(cid, proving_cid(key, cid[:CID_NONCE_BYTES]))


def destination_of(data: bytes) -> bytes:
    """Return the id of the connection that a datagram is for; b"" if it is none of QUIC."""
    if not data or not data[0] & _FIXED_BIT:
        return b""
    if not data[0] & _LONG:
        return data[1 : 1 + CID_BYTES] if len(data) > CID_BYTES else b""
    end = 6 + data[5] if len(data) > 5 else 0
    return data[6:end] if 6 < end <= len(data) else b""


def read_first(data: bytes) -> FirstPacket:
    """Read the Initial packet at the beginning of a datagram; RemoteProtocolError if there is none."""
    if len(data) < INITIAL_BYTES or data[0] & (_LONG | _FIXED_BIT | _INITIAL_MASK) != _LONG | _FIXED_BIT:
        raise RemoteProtocolError("the datagram does not begin a connection")
    if int.from_bytes(data[1:5], "big") != VERSION_1:
        raise RemoteProtocolError("the datagram is of another version of QUIC")
    destination, at = _short(data, 5)
    source, at = _short(data, at)
    size = data[at]
    width = 1 << (size >> 6)
    length = int.from_bytes(data[at : at + width], "big") & ((1 << (8 * width - 2)) - 1)
    at += width
    if len(destination) > CID_BYTES or len(source) > CID_BYTES or at + length > len(data):
        raise RemoteProtocolError("the datagram has impossible lengths")
    return FirstPacket(destination, source, data[at : at + length])


def _short(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes that a length at `at` is followed by, and where they end. Two fit into any first datagram."""
    end = at + 1 + data[at]
    return data[at + 1 : end], end


def address_token(key: bytes, address: bytes, original: bytes, chosen: bytes, now: int) -> bytes:
    """Return a token that proves that its sender receives at `address`; only this process has the `key`.

    `original` is the connection id to which the first datagram went, `chosen` the one to which the next will go; `now`
    are seconds of any clock.
    """
    body = _TOKEN.pack(now, original.ljust(CID_BYTES, b"\0"), chosen) + bytes((len(original),))
    return body + hmac.digest(key, address + body, "sha256")


def read_token(key: bytes, address: bytes, token: bytes, chosen: bytes, now: int) -> bytes:
    """Return the id to which the first datagram of a connection went; RemoteProtocolError if the token is no proof."""
    body, code = token[: _TOKEN.size + 1], token[_TOKEN.size + 1 :]
    if not hmac.compare_digest(code, hmac.digest(key, address + body, "sha256")):
        raise RemoteProtocolError("the token proves no address")
    since, original, expected = _TOKEN.unpack_from(body)
    if expected != chosen or now - since > TOKEN_SECONDS:
        raise RemoteProtocolError("the token is of another connection, or too old")
    return bytes(original[: body[-1]])


def path_probe(key: bytes, nonce: bytes) -> bytes:
    """Return the datagram that asks whether a process with the key is at an address."""
    return _signed(key, _PROBE, nonce)


def answer_path_probe(key: bytes, data: bytes) -> bytes:
    """Return the answer to a probe of a path, as long as the probe; b"" if the datagram is none with this key."""
    nonce = data[1 : 1 + PATH_NONCE_BYTES]
    return _signed(key, _PATH_ANSWER, nonce) if hmac.compare_digest(data, _signed(key, _PROBE, nonce)) else b""


def path_answer(key: bytes, nonce: bytes) -> bytes:
    """Return the answer that a probe with this nonce gets."""
    return _signed(key, _PATH_ANSWER, nonce)


def is_about_path(data: bytes) -> bool:
    """Tell whether a datagram looks like a probe of a path, or like the answer: no datagram of QUIC does."""
    return len(data) == 1 + PATH_NONCE_BYTES + _CODE_BYTES and data[0] in (_PROBE, _PATH_ANSWER)


def _signed(key: bytes, kind: int, nonce: bytes) -> bytes:
    body = bytes((kind,)) + nonce
    return body + hmac.digest(key, b"covey/1/quic-path" + body, "sha256")[:_CODE_BYTES]


class LimitReader:
    """Reads the limits that the other end announces: each is the number of bytes it takes in all, and none is lower."""

    def __init__(self) -> None:
        self._partial = b""
        self.limit = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream; RemoteProtocolError if a limit is lower than the one before."""
        data = self._partial + data
        whole = len(data) - len(data) % STREAM_LIMIT_BYTES
        for (limit,) in _LIMIT.iter_unpack(data[:whole]):
            if limit < self.limit:
                raise RemoteProtocolError("a limit was taken back")
            self.limit = limit
        self._partial = data[whole:]


def limit_bytes(limit: int) -> bytes:
    """Return what announces a limit."""
    return _LIMIT.pack(limit)
