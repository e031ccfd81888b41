"""The certificates of QUIC: a process that accepts proves that it has the door's key.

qh3 cannot ask a dialler for a certificate. The dialler proves the key with its connection id, and on the stream: there
the door and the key of the offered lane come first, as on TCP.
"""

from __future__ import annotations

import hmac
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from qh3.quic.configuration import QuicConfiguration
from qh3.tls import SignatureAlgorithm

from covey.net.certificates import signed_certificate
from covey.wire import quic

PROTOCOL: Final = "covey-lane/1"
NAME: Final = "covey.invalid"
"""The name in all certificates. It means nothing."""
WINDOW_BYTES: Final = 4 << 20
"""What may be on the way in each direction: with a round trip of 40 ms, enough for 100 MB/s."""
PACKET_BYTES: Final = 1232
"""The longest datagrams: with their headers they fit into the 1280 bytes that every network with IPv6 must carry, so
that none is swallowed on the way."""
CONNECTION_IDLE_SECONDS: Final = 120.0
"""A connection on which nothing arrives for so long has ended. A process that computes without releasing the GIL is
silent; views decide sooner whether it is lost."""


class QuicCredentials:
    """What one key of the door gives for QUIC: the configurations of diallers and acceptors."""

    def __init__(self, door_key: bytes) -> None:
        self.door_key = door_key
        seed = hmac.digest(door_key, b"covey/1/quic-authority", "sha256")
        authority = Ed25519PrivateKey.from_private_bytes(seed)
        own = Ed25519PrivateKey.generate()
        root = signed_certificate(
            authority, authority.public_key(), "covey authority", is_authority=True, host_name=NAME
        )
        leaf = signed_certificate(authority, own.public_key(), "covey node", is_authority=False, host_name=NAME)
        pem = serialization.Encoding.PEM
        secret = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.dialling = _configuration(is_client=True)
        self.dialling.server_name = NAME
        self.dialling.load_verify_locations(cadata=root.public_bytes(pem))
        self.dialling.signature_algorithms = [SignatureAlgorithm.ED25519]
        self.accepting = _configuration(is_client=False)
        self.accepting.load_cert_chain(leaf.public_bytes(pem), secret)


def _configuration(*, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[PROTOCOL],
        connection_id_length=quic.CID_BYTES,
        idle_timeout=CONNECTION_IDLE_SECONDS,
        max_data=WINDOW_BYTES + (WINDOW_BYTES >> 2),
        max_stream_data=WINDOW_BYTES,
        max_datagram_size=PACKET_BYTES,
        probe_datagram_size=False,
    )
