"""Papers of nodes: an organisation's certificates that vouch for node keys, in addition to the cluster's secret.

TLS between nodes proves their Ed25519 keys. The key of a PEM certificate signs the id of a node, which is its public
key, so papers are worth nothing on a connection of any other node. They are checked on every new connection, by the
clock of that moment and three PEM files, which are read again when they change.
"""

from __future__ import annotations

import datetime
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.wire.messages import CERTIFICATES_LIMIT, Papers

logger = logging.getLogger("covey")
_PAPERS_LABEL: Final = b"covey/1/papers"
_PURPOSES: Final = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


class KeyAndCertificates(NamedTuple):
    """What one end of a connection needs, as PEM."""

    key: bytes
    chain: bytes
    authorities: bytes


@dataclass
class PemFiles:
    """The paths of an authority's certificate, an own certificate and its key; `read` returns their contents."""

    ca: str
    cert: str
    key: str
    _read: KeyAndCertificates | None = field(default=None, init=False, repr=False)
    _stamps: tuple[Any, ...] = field(default=(), init=False, repr=False)

    @classmethod
    def of(cls, ca: str | None, cert: str | None, key: str | None) -> PemFiles | None:
        """Return the files that options name; None if they name none. ConfigError if they name some only."""
        given = {"ca": ca, "cert": cert, "key": key}
        if missing := [name for name, path in given.items() if not path]:
            if len(missing) < len(given):
                raise ConfigError(f"tls-{missing[0]} is missing: tls-ca, tls-cert and tls-key belong together")
            return None
        return cls(str(ca), str(cert), str(key))

    def read(self) -> KeyAndCertificates:
        """Return the contents of the files. On any thread.

        If files that were good are now missing or do not belong together, as in the middle of a renewal, the last good
        contents are returned, with a warning in the log.

        Raises:
            ConfigError: they were never good.
        """
        try:
            stamps = tuple(_stamp(path) for path in (self.ca, self.cert, self.key))
            if self._read is None or stamps != self._stamps:
                self._read, self._stamps = self._load(), stamps
        except ConfigError as error:
            if self._read is None:
                raise
            logger.warning("the certificates were not read again: %s", error)
        return self._read

    def _load(self) -> KeyAndCertificates:
        authorities, chain, key = (_content(path) for path in (self.ca, self.cert, self.key))
        try:
            x509.load_pem_x509_certificates(authorities)
            own = x509.load_pem_x509_certificates(chain)[0].public_key()
            public = serialization.load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                f"{self.ca}, {self.cert} and {self.key} must be PEM, and the key without a password: {error}"
            ) from error
        form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        if own.public_bytes(*form) != public.public_bytes(*form):
            raise ConfigError(f"{self.key} is not the key of the certificate in {self.cert}")
        return KeyAndCertificates(key, chain, authorities)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class Organisation:
    """Makes the papers of this machine's nodes, and checks those of others. On any thread; may read files."""

    def __init__(self, files: PemFiles) -> None:
        """Read the files; ConfigError if they cannot be used."""
        self._files = files
        self.papers(b"")

    def papers(self, node_id: bytes) -> Papers:
        """Return the papers of a node of this machine."""
        read = self._files.read()
        chain = x509.load_pem_x509_certificates(read.chain)
        if len(chain) > CERTIFICATES_LIMIT:
            raise ConfigError(f"{self._files.cert} has more than {CERTIFICATES_LIMIT} certificates")
        signature = _sign(serialization.load_pem_private_key(read.key, None), _PAPERS_LABEL + node_id)
        return Papers(tuple(each.public_bytes(serialization.Encoding.DER) for each in chain), signature)

    def objection(self, node_id: bytes, papers: Papers | None) -> str:
        """Return why the papers of a node are not accepted; empty if they are."""
        if papers is None:
            return "a certificate of the organisation is missing: --tls-ca, --tls-cert and --tls-key present one"
        try:
            leaf, *above = (x509.load_der_x509_certificate(each) for each in papers.certificates)
            self._verifier().verify(leaf, above)
            _verify(leaf.public_key(), papers.signature, _PAPERS_LABEL + node_id)
        except InvalidSignature:
            return "the certificate of the organisation is not for this node"
        except (ValueError, TypeError, UnsupportedAlgorithm, VerificationError) as error:
            return f"the certificate of the organisation is not accepted: {printable(str(error), 200)}"
        return ""

    def _verifier(self) -> Any:
        authorities = x509.load_pem_x509_certificates(self._files.read().authorities)
        # A certificate for other purposes, such as signing programs, does not make a node.
        leaf = ExtensionPolicy.permit_all().may_be_present(x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _check_purpose)
        return (
            PolicyBuilder()
            .store(Store(authorities))
            .time(datetime.datetime.now(datetime.UTC))
            .extension_policies(ca_policy=ExtensionPolicy.webpki_defaults_ca(), ee_policy=leaf)
            .build_client_verifier()
        )


def _check_purpose(_policy: object, _certificate: object, usage: x509.ExtendedKeyUsage | None) -> None:
    if usage is not None and _PURPOSES.isdisjoint(usage):
        raise ValueError("it is for another purpose than TLS")


def _sign(key: Any, words: bytes) -> bytes:
    match key:
        case ed25519.Ed25519PrivateKey():
            return key.sign(words)
        case ec.EllipticCurvePrivateKey():
            return key.sign(words, ec.ECDSA(hashes.SHA256()))
        case rsa.RSAPrivateKey():
            return key.sign(words, _pss(), hashes.SHA256())
    raise ConfigError("the key of the certificate must be RSA, ECDSA or Ed25519")


def _verify(key: Any, signature: bytes, words: bytes) -> None:
    match key:
        case ed25519.Ed25519PublicKey():
            key.verify(signature, words)
        case ec.EllipticCurvePublicKey():
            key.verify(signature, words, ec.ECDSA(hashes.SHA256()))
        case rsa.RSAPublicKey():
            key.verify(signature, words, _pss(), hashes.SHA256())
        case _:
            raise ValueError("its key is neither RSA, ECDSA nor Ed25519")


def _pss() -> padding.PSS:
    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
