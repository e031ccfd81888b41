"""TLS at both ends of a connection to a coordinator, and why a handshake failed, in words.

asyncio's own TLS does not send the alert that tells a refused caller why, so `TlsConnection` is used instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from covey.base.errors import ConfigError
from covey.net.keys.tls import readable_once

if TYPE_CHECKING:
    import socket

    from covey.net.keys.organisation import KeyAndCertificates

GRPC_PROTOCOL: Final = "h2"
"""What gRPC speaks inside TLS."""
TLS_PIECE_BYTES: Final = 1 << 16
STALLED_SECONDS: Final = 30.0
"""How long the other end may take to read a piece."""
_ALERT: Final = "_ALERT_"
"""In the reasons of OpenSSL: the other end has told why it ends the handshake."""
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNEXPECTED_MESSAGE")


def accepting(papers: KeyAndCertificates) -> ssl.SSLContext:
    """Return what a coordinator accepts with: it requires a certificate of the caller.

    Raises:
        ConfigError: OpenSSL does not take the key or the certificates.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, papers)
    context.num_tickets = 0  # a session that is resumed would not be checked with the certificates of now
    return context


def dialling(papers: KeyAndCertificates) -> ssl.SSLContext:
    """Return what a caller dials with; it checks the name that it connects to.

    Raises:
        ConfigError: OpenSSL does not take the key or the certificates.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, papers)


class TlsConnection:
    """The coordinator's end of a TLS connection on a socket that does not block. One task reads, and one writes."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._connection = context.wrap_bio(self._arrived, self._leaving, server_side=True)
        self._sending = asyncio.Lock()
        """Reading sends, too: what is sent leaves in the order in which OpenSSL made it."""

    async def shake(self) -> bytes:
        """Return the certificate of the caller (DER).

        Raises:
            ssl.SSLError: one end refuses the other, and the other is told why.
            OSError: the connection ended.
        """
        while True:
            try:
                self._connection.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()
                raise
            else:
                await self._flush()
                return self._connection.getpeercert(binary_form=True) or b""

    async def read(self) -> bytes:
        """Return what has arrived; empty at the end of the connection."""
        while True:
            try:
                return self._connection.read(TLS_PIECE_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        self._connection.write(data)
        await self._flush()

    def farewell(self) -> None:
        """Tell the caller that the connection ends, if that can be sent at once."""
        with contextlib.suppress(ssl.SSLError):
            self._connection.unwrap()
        if not self._sending.locked():
            with contextlib.suppress(OSError):
                self._sock.send(self._leaving.read())

    async def _receive(self) -> None:
        piece = await asyncio.get_running_loop().sock_recv(self._sock, TLS_PIECE_BYTES)
        if piece:
            self._arrived.write(piece)
        else:
            self._arrived.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._leaving.read():
                async with asyncio.timeout(STALLED_SECONDS):
                    await asyncio.get_running_loop().sock_sendall(self._sock, data)


def told(error: ssl.SSLError) -> str:
    """Return what the other end said when it ended the handshake, such as "unknown ca"; empty if it said nothing."""
    _, alert, words = (error.reason or "").partition(_ALERT)
    if words == "DECRYPT_ERROR":
        return "the signature is not by the authority that it names"
    return words.replace("_", " ").lower() if alert else ""


def in_words(error: ssl.SSLError) -> str:
    """Return why this end refused the other, or the other this one; the subject is the other end."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if words := told(error):
        return f"it does not accept the certificate of this end: {words}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    if error.reason in _NOT_TLS:
        return "it does not speak TLS"
    return (error.reason or str(error)).replace("_", " ").lower()


def _context(side: ssl._SSLMethod, papers: KeyAndCertificates) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([GRPC_PROTOCOL])
    try:
        roots = x509.load_pem_x509_certificates(papers.authorities)
        context.load_verify_locations(cadata=b"".join(each.public_bytes(serialization.Encoding.DER) for each in roots))
        with readable_once(papers.key + b"\n" + papers.chain) as path:
            context.load_cert_chain(path)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"TLS does not take the key or the certificates: {error}") from error
    return context
