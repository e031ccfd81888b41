"""Organisations that sign certificates."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path


class Authority:
    """An organisation that signs certificates, and writes them into a folder."""

    def __init__(self, folder: Path, name: str, host: str = "127.0.0.1") -> None:
        """Certificates are for `host`."""
        self.folder, self.name, self.host = folder, name, host
        self.key: Any = ec.generate_private_key(ec.SECP256R1())
        (folder / f"{name}-ca.pem").write_bytes(self.sign(self.key, name, is_authority=True))

    def issue(
        self,
        subject: str,
        file: str = "",
        key: Any = None,
        days: float = 1.0,
        usage: x509.ObjectIdentifier | None = None,
    ) -> dict[str, str]:
        """Write a new key and a certificate; return the options that name them."""
        file = file or f"{self.name}-{subject}"
        key = ec.generate_private_key(ec.SECP256R1()) if key is None else key
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (self.folder / f"{file}.key").write_bytes(key.private_bytes(*form))
        (self.folder / f"{file}.pem").write_bytes(self.sign(key, subject, days=days, usage=usage))
        return {
            "tls_ca": str(self.folder / f"{self.name}-ca.pem"),
            "tls_cert": str(self.folder / f"{file}.pem"),
            "tls_key": str(self.folder / f"{file}.key"),
        }

    def sign(
        self,
        key: Any,
        subject: str,
        *,
        is_authority: bool = False,
        days: float = 1.0,
        usage: x509.ObjectIdentifier | None = None,
    ) -> bytes:
        """Return a certificate as PEM; with negative days, one that has expired."""

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)] if text else [])

        def allowed(**given: bool) -> x509.KeyUsage:
            first = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
            others = ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
            return x509.KeyUsage(**dict.fromkeys((*first, *others), False) | given)

        now = datetime.datetime.now(datetime.UTC)
        names = [x509.IPAddress(ipaddress.ip_address(self.host))]
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(self.name))
            .serial_number(x509.random_serial_number())
            .public_key(key.public_key())
            .not_valid_before(now - datetime.timedelta(days=10))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=not subject)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(allowed(key_cert_sign=is_authority, digital_signature=not is_authority), critical=True)
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
