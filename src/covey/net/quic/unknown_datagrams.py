"""Datagrams that belong to no known connection: those that begin one, and those of an end whose address has changed.

`FirstDatagrams` judges those that begin a connection, and keeps nothing of those that it refuses. QUIC itself follows
only a dialler that moves; the other functions find the end that accepted a connection when its machine has another
address. `Gatekeeper` is what the pump asks of the node whose connections it has. Without I/O.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from qh3.quic.packet import encode_quic_retry

from covey.base.errors import RemoteProtocolError
from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from covey.net.quic.carrier import Address
    from covey.net.quic.line import Line, QuicSocket

PROOFS_REMEMBERED: Final = 4096
"""Connection ids that began a connection: each may begin one."""
PROBE_AGAIN_SECONDS: Final = 0.5
"""The shortest time between two questions of a line."""


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


def question(line: Line, source: Address, now: float) -> bytes:
    """Return what to ask at an address from which a datagram of a line came; b"" if one was asked lately."""
    if line.probing is not None and now < line.probing[2] + PROBE_AGAIN_SECONDS:
        return b""
    nonce = secrets.token_bytes(quic.PATH_NONCE_BYTES)
    line.probing = nonce, source, now
    return quic.path_probe(line.credentials.door_key, nonce)


def answered(lines: Iterable[Line], data: bytes, source: Address) -> Line | None:
    """Return the line whose question a datagram answers, which goes on at this address; None if it answers none."""
    for line in lines:
        nonce, address, _ = line.probing or (b"", None, 0.0)
        if address == source and data == quic.path_answer(line.credentials.door_key, nonce):
            line.remote, line.probing = source, None
            return line
    return None


def answer_to(data: bytes, door_keys: Iterable[bytes]) -> bytes:
    """Return the answer to a question of another process; b"" if it does not have one of the keys."""
    return next((found for key in door_keys if (found := quic.answer_path_probe(key, data))), b"")


class Gatekeeper(Protocol):
    """Decides which connections are accepted. Called on the pump's thread."""

    def door_keys(self) -> tuple[bytes, ...]:
        """Return the door keys that are valid now, the preferred first."""

    def comes(self, ip: str, local_ip: str) -> Callable[[], None] | None:
        """Count a connection from `ip` to `local_ip`; None if it is refused, else what to call when it is proved."""

    def take(self, sock: QuicSocket, proved: Callable[[], None]) -> None:
        """Own the socket of an accepted connection; call `proved` once it has proved the key on the stream."""
