"""TLS between the nodes of a cluster: only a node that has the secret can make an accepted certificate.

The certificate authority is derived from the cluster's secret and is the same, byte for byte, on every node. Each node
signs a certificate over its own Ed25519 key, which identifies it: names in certificates have no meaning.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import ssl
import tempfile
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from covey.base.errors import AuthError

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_BEFORE: Final = datetime.datetime(2000, 1, 1)
NOT_AFTER: Final = datetime.datetime(9999, 12, 31)
"""Early enough for a machine whose clock starts in 2000 after each power cut."""
LINK_PROTOCOL: Final = "covey/1"
RECORD_HEADER_BYTES: Final = 5
_RETRY: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The `random` of a ServerHello that asks for another ClientHello (RFC 8446, 4.1.3)."""
_RANDOM_AT: Final = RECORD_HEADER_BYTES + 4 + 2
_HELLO_LIMIT_BYTES: Final = 1 << 14
_HANDSHAKE: Final = 22


def signed_certificate(
    authority: Ed25519PrivateKey,
    key: Ed25519PublicKey,
    name: str,
    *,
    is_authority: bool,
    host_name: str = "",
) -> x509.Certificate:
    """Sign a certificate. It is the same each time: Ed25519 needs no randomness.

    It says what its key may be used for, or the `host_name` that a library insists on. It has no key identifier of the
    authority, because that would reveal which nodes are in the same cluster.
    """
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covey authority")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .serial_number(1 if is_authority else 2)
        .public_key(key)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if host_name:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host_name)]), critical=False)
    else:
        builder = builder.add_extension(_usage(is_authority), critical=True)
    return builder.sign(authority, None)


@functools.cache
def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


class Credentials:
    """The certificate of a node and the authority that it accepts: one context for dialling, one for accepting."""

    def __init__(self, authority_seed: bytes, private: Ed25519PrivateKey) -> None:
        """`authority_seed` is 32 bytes derived from the cluster's secret for this purpose only."""
        authority = Ed25519PrivateKey.from_private_bytes(authority_seed)
        root = signed_certificate(authority, authority.public_key(), "covey authority", is_authority=True)
        leaf = signed_certificate(authority, private.public_key(), "covey node", is_authority=False)
        self.dialling = _context(ssl.PROTOCOL_TLS_CLIENT, root, leaf, private)
        self.accepting = _context(ssl.PROTOCOL_TLS_SERVER, root, leaf, private)
        self.accepting.num_tickets = 0  # sessions are not resumed, and each ticket costs a write


def hello_bytes(header: bytes) -> int:
    """Return how many bytes follow the header of the record that holds a ClientHello.

    Raises:
        AuthError: it is the header of something else.
    """
    length = int.from_bytes(header[3:RECORD_HEADER_BYTES], "big")
    if header[0] != _HANDSHAKE or not 0 < length <= _HELLO_LIMIT_BYTES:
        raise AuthError("the answer at the door was not followed by TLS")
    return length


class Channel:
    """One end of a TLS connection, without a socket: it takes and returns the bytes of the connection."""

    def __init__(self, credentials: Credentials, *, dialled: bool) -> None:
        context = credentials.dialling if dialled else credentials.accepting
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._connection = context.wrap_bio(self._arrived, self._leaving, server_side=not dialled)
        self._dialled = dialled
        self.is_done = False
        """Whether the handshake is over."""

    def shake(self, data: bytes = b"") -> bytes:
        """Take what the other side sent, and return what to send. Called until `is_done`, and once more after that.

        Raises:
            AuthError: the other side is not in this cluster. `farewell` returns what tells it so.
        """
        self._arrived.write(data)
        try:
            self._connection.do_handshake()
            self.is_done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise AuthError(f"the TLS handshake failed: {_reason(error)}") from error
        flight = self._leaving.read()
        # The door has bound this connection to the first ClientHello. A second one could come from another dialler.
        if not self._dialled and flight[_RANDOM_AT : _RANDOM_AT + len(_RETRY)] == _RETRY:
            raise AuthError("the two ends have no key exchange in common: do both have the same version of OpenSSL?")
        return flight

    def peer_id(self) -> bytes:
        """Return the node id at the other end of a finished handshake: its public key.

        Raises:
            AuthError: it uses another protocol, or has no Ed25519 certificate.
        """
        return peer_id(self._connection)

    def encrypt(self, data: bytes) -> bytes:
        """Return what to send for `data`."""
        self._connection.write(data)
        return self._leaving.read()

    def decrypt(self, data: bytes) -> bytes:
        """Take what arrived, and return the plain bytes that are complete.

        Raises:
            AuthError: the bytes were altered, or the other side reports that it rejects this node.
        """
        self._arrived.write(data)
        plain = bytearray()
        try:
            while piece := self._connection.read(1 << 16):
                plain += piece
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise AuthError(f"the TLS connection failed: {_reason(error)}") from error
        return bytes(plain)

    def farewell(self) -> bytes:
        """Return the bytes that tell the other side that the connection ends, or why it is rejected."""
        with contextlib.suppress(ssl.SSLError):
            self._connection.unwrap()
        return self._leaving.read()


def _reason(error: ssl.SSLError) -> str:
    """Return the reason that OpenSSL gives; for a certificate with details, such as "certificate is not yet valid"."""
    reason = error.reason or str(error)
    return f"{reason}: {error.verify_message}" if isinstance(error, ssl.SSLCertVerificationError) else reason


def peer_id(connection: ssl.SSLObject | ssl.SSLSocket) -> bytes:
    """Return the node id at the other end of a finished handshake: its public key.

    Raises:
        AuthError: it uses another protocol, or has no Ed25519 certificate.
    """
    if connection.selected_alpn_protocol() != LINK_PROTOCOL:
        raise AuthError("the other side has an incompatible version of covey, or is another program")
    der = connection.getpeercert(binary_form=True)
    try:
        key = x509.load_der_x509_certificate(der).public_key() if der else None
    except (ValueError, UnsupportedAlgorithm) as error:  # OpenSSL is less strict
        raise AuthError(f"the other side's certificate cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise AuthError("the other side has no Ed25519 certificate")
    return key.public_bytes_raw()


def _context(
    side: ssl._SSLMethod, root: x509.Certificate, leaf: x509.Certificate, private: Ed25519PrivateKey
) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # peers are identified by their keys
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([LINK_PROTOCOL])
    context.load_verify_locations(cadata=root.public_bytes(serialization.Encoding.DER))
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with readable_once(key + leaf.public_bytes(serialization.Encoding.PEM)) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def readable_once(data: bytes) -> Iterator[str]:
    """Give `data` a path, because `ssl` reads keys only from files; in memory if the system has memfd."""
    if hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd"):
        descriptor = os.memfd_create("covey-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile(prefix="covey-") as file:
            file.write(data)
            file.flush()
            yield file.name
