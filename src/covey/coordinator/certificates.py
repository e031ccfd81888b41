"""Certificates for gRPC that are derived from a cluster's secret, and what a certificate says about its holder.

The links between nodes use Ed25519 (`net.keys.tls`), which gRPC's TLS does not accept: these keys are on the curve
P-256. The authority is derived from the secret, or on loopback from the first key of the machine. A process derives its
own key from that key, too, so nothing is stored, and a worker that starts again has the same key. An extension of the
certificate names that first key, with its signature over the certificate's: lists of denied machines have it.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from covey.net.keys.identity import machine_secret, sign_as_machine
from covey.net.keys.organisation import KeyAndCertificates
from covey.net.keys.tls import NOT_AFTER, NOT_BEFORE
from covey.wire.formation import ID_BYTES
from covey.wire.signed import certificate_words, is_signed

if TYPE_CHECKING:
    from covey.wire.secret import ClusterSecret

SERVER_NAME: Final = "covey-coordinator"
"""The name in every derived certificate; holders are told apart by their keys."""
PURPOSE: Final = "coordinator-ca"
MACHINE: Final = x509.ObjectIdentifier("2.25.262894374285127904538297642873514205791")
"""The extension that names a machine: its first key, and the signature of that key over the certificate's."""
_CURVE_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The number of points of P-256."""
_PUBLIC: Final = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def derived(secret: ClusterSecret, earlier: ClusterSecret | None, role: str) -> KeyAndCertificates:
    """Return the key of this machine for `role`, with a certificate from a cluster's secret.

    Certificates from the `earlier` secret are accepted, too, if there is one.
    """
    return _issued([each.derive(PURPOSE) for each in (secret, earlier) if each is not None], role)


def local(role: str) -> KeyAndCertificates:
    """Return the key of this machine for `role`, with a certificate that only this user on this machine can make."""
    return _issued([machine_secret("coordinator-ca")], role)


def _issued(authorities: list[bytes], role: str) -> KeyAndCertificates:
    """Return the key of this machine for `role`, with a certificate from the first authority; all are accepted."""
    private = _private(machine_secret(f"coordinator/{role}"))
    signers = [_private(seed) for seed in authorities]
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    roots = b"".join(_certificate(signer, None) for signer in signers)
    return KeyAndCertificates(key, _certificate(signers[0], private.public_key()), roots)


@functools.lru_cache(1024)
def key_of(certificate: bytes) -> str:
    """Return the fingerprint of the public key in a certificate (PEM), as text; empty if it cannot be read."""
    try:
        key = x509.load_pem_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return f"key {hashlib.sha256(key.public_bytes(*_PUBLIC)).hexdigest()[:32]}"


@functools.lru_cache(1024)
def machine_of(certificate: bytes) -> bytes:
    """Return the first key of the machine that a certificate (PEM) is for; empty if no machine has signed it."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        extension = found.extensions.get_extension_for_oid(MACHINE).value
        words = certificate_words(found.public_key().public_bytes(*_PUBLIC))
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension):
        return b""
    if not isinstance(extension, x509.UnrecognizedExtension):
        return b""
    machine, signature = extension.value[:ID_BYTES], extension.value[ID_BYTES:]
    return machine if is_signed(machine, words, signature) else b""


@functools.lru_cache(1024)
def subject_of(certificate: bytes) -> str:
    """Return the subject of a certificate (PEM), or its alternative names, as text; empty if it has neither.

    An organisation's certificates are renewed with new keys, so the subject stands for the holder.
    """
    try:
        found = x509.load_pem_x509_certificate(certificate)
        if subject := found.subject.rfc4514_string():
            return f"subject {subject}"
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return ""
    texts = sorted(str(name.value) for name in names if not isinstance(name, x509.OtherName))
    return f"names {', '.join(texts)}" if texts else ""


def _private(seed: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(seed, "big") % (_CURVE_ORDER - 1) + 1, ec.SECP256R1())


def _certificate(authority: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePublicKey | None) -> bytes:
    """Return a certificate for `key`, or that of the authority itself, as PEM."""
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "covey coordinator authority")])
    subject = issuer if key is None else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(1 if key is None else 2)
        .public_key(authority.public_key() if key is None else key)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=key is None, path_length=0 if key is None else None), critical=True)
    )
    if key is not None:
        machine, signature = sign_as_machine(certificate_words(key.public_bytes(*_PUBLIC)))
        builder = builder.add_extension(x509.UnrecognizedExtension(MACHINE, machine + signature), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
