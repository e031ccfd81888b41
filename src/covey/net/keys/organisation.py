"""Papers of nodes: an organisation's certificates that vouch for node keys, in addition to the cluster's secret.

TLS between nodes proves their Ed25519 keys. The key of a PEM certificate signs the id of a node, which is its public
key, so papers are worth nothing on a connection of any other node. They are checked on every new connection, by the
files and the clock of that moment.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.wire.messages import CERTIFICATES_LIMIT, Papers

if TYPE_CHECKING:
    from covey.net.keys.pem_files import PemFiles

_LABEL: Final = b"covey/1/papers"
_PURPOSES: Final = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


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
        signature = _sign(serialization.load_pem_private_key(read.key, None), _LABEL + node_id)
        return Papers(tuple(each.public_bytes(serialization.Encoding.DER) for each in chain), signature)

    def objection(self, node_id: bytes, papers: Papers | None) -> str:
        """Return why the papers of a node are not accepted; empty if they are."""
        if papers is None:
            return "a certificate of the organisation is missing: --tls-ca, --tls-cert and --tls-key present one"
        try:
            leaf, *above = (x509.load_der_x509_certificate(each) for each in papers.certificates)
            self._verifier().verify(leaf, above)
            _verify(leaf.public_key(), papers.signature, _LABEL + node_id)
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
