"""Judges datagrams that belong to no connection, and keeps nothing of those it refuses. Without I/O."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from qh3.quic.packet import encode_quic_retry

from covey.base.errors import RemoteProtocolError
from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.net.quic.carrier import Address

PROOFS_REMEMBERED: Final = 4096
"""Connection ids that began a connection: each may begin one."""


class Entering(NamedTuple):
    """A connection that may begin: its sender has proved the key and its address."""

    door_key: bytes
    original: bytes
    """The connection id to which its first datagram went."""
    chosen: bytes
    """The one to which this datagram went."""
    source: bytes
    """The sender's own."""


class FirstDatagrams:
    """Judges the datagrams that come to one UDP socket."""

    def __init__(self) -> None:
        self._token_key = secrets.token_bytes(32)
        self._used: dict[bytes, None] = {}

    def judge(self, data: bytes, source: Address, door_keys: Sequence[bytes], now: float) -> Entering | bytes:
        """Return a connection that may begin, or the datagram to answer with, which is shorter; b"" for no answer.

        A sender without one of the keys gets no answer. One with a key is asked to prove its address first.
        """
        try:
            first = quic.read_first(data)
            door_key = next((key for key in door_keys if quic.is_proof(key, first.source)), None)
            if door_key is None or first.source in self._used:
                return b""
            address = repr(source).encode()
            if not first.token:
                return self._ask_back(first, address, now)
            original = quic.read_token(self._token_key, address, first.token, first.destination, int(now))
        except RemoteProtocolError:
            return b""
        return Entering(door_key, original, first.destination, first.source)

    def entered(self, entering: Entering) -> None:
        """Note that a connection has begun: the proof is worth nothing from now on."""
        self._used[entering.source] = None
        if len(self._used) > PROOFS_REMEMBERED:
            del self._used[next(iter(self._used))]

    def _ask_back(self, first: quic.FirstPacket, address: bytes, now: float) -> bytes:
        chosen = secrets.token_bytes(quic.CID_BYTES)
        token = quic.address_token(self._token_key, address, first.destination, chosen, int(now))
        return encode_quic_retry(
            version=quic.VERSION_1,
            source_cid=chosen,
            destination_cid=first.source,
            original_destination_cid=first.destination,
            retry_token=token,
        )
