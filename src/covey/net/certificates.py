"""Certificates of nodes: signed by an authority whose key is derived from a secret that nodes share."""

from __future__ import annotations

import datetime
import functools
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_SINCE: Final = datetime.datetime(2000, 1, 1)
_UNTIL: Final = datetime.datetime(9999, 12, 31)
"""Early enough for a machine whose clock starts in 2000 after each power cut."""


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
        .not_valid_before(_SINCE)
        .not_valid_after(_UNTIL)
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
