"""An organisation's own certificates: three PEM files, which are read again when they change."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from covey.base.errors import ConfigError

logger = logging.getLogger("covey")


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
