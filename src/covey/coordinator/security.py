"""How a coordinator and its callers prove their identities: PEM files, the secret of a cluster, or one machine's key.

Both ends choose by the same rule (`choose_security`), so that equal settings meet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import AuthError, ConfigError, RemoteProtocolError
from covey.coordinator.certificates import SERVER_NAME, derived, key_of, local, machine_of, subject_of
from covey.coordinator.refusal import Reason, RefusalError
from covey.net.host.settings_files import effective_environment
from covey.net.keys import clusters
from covey.net.keys.charter import is_news, keep, latest, machine_objection
from covey.runtime.environment import ClusterOptions, is_loopback
from covey.wire.messages import Charter, decode_control, encode

if TYPE_CHECKING:
    from covey.net.keys.clusters import Cluster
    from covey.net.keys.organisation import KeyAndCertificates, PemFiles
    from covey.wire.secret import ClusterSecret

CHARTER_KEY: Final = "covey-charter-bin"
"""The metadata of a call that carries a charter."""
CHARTER_BYTES: Final = 5000
"""Largest charter that goes with calls, for about 150 machines; gRPC takes 8 KiB of metadata."""
READ_SECONDS: Final = 1.0
"""How often the file of a cluster is read again at most."""


class Security(Protocol):
    """One way in which both ends of a connection prove their identities with certificates."""

    words: str
    """In a few words, for people."""
    server_name: str
    """The name in the certificate of the coordinator; empty: the host of its address."""
    denies: bool
    """Whether `identity` refuses machines that are denied."""
    remedy: str
    """What to do if one end does not accept the certificate of the other."""

    def papers(self, role: str) -> KeyAndCertificates:
        """Return the key and certificates of this machine for a role, as they are now. On any thread."""

    def identity(self, certificate: bytes) -> str:
        """Return the identity of the holder of a certificate (PEM), as text; RefusalError if it may not call."""

    def charter(self) -> bytes:
        """Return the owner's list of machines as this machine knows it, to tell the other end; empty if it has none."""

    def hear(self, charter: bytes) -> None:
        """Obey a list that a caller brought from now on, if it is later and the owner has signed it."""


def choose_security(host: str, pem: PemFiles | None, options: ClusterOptions) -> Security:
    """Return how to secure a coordinator at `host`.

    PEM files if they are given, else the secret of a cluster if it is named or the coordinator is not on loopback.

    Raises:
        ConfigError: it would need a secret, and there is none; or the files cannot be used.
    """
    if pem is not None:
        pem.read()
        return PemSecurity(pem)
    if is_loopback(host) and options == ClusterOptions():
        return LoopbackSecurity()
    try:
        return SecretSecurity(options)
    except ConfigError as error:
        raise ConfigError(
            f"a coordinator at {host} is reached from other machines, and covey does not talk beyond this machine in "
            f"clear text: give tls-ca, tls-cert and tls-key, or be in a cluster ({error}), or use 127.0.0.1"
        ) from error


class LoopbackSecurity:
    """TLS with certificates that only processes of one user on one machine can make: from the machine's own key."""

    words = "for this user on this machine only"
    server_name = SERVER_NAME
    denies = False
    remedy = "without options, both must be processes of one user on one machine, with the same COVEY_HOME"

    def papers(self, role: str) -> KeyAndCertificates:
        return local(role)

    def identity(self, certificate: bytes) -> str:
        return f"user {os.getuid()}"

    def charter(self) -> bytes:
        return b""

    def hear(self, charter: bytes) -> None:
        """Do nothing: there is no owner."""


class SecretSecurity:
    """TLS with certificates from a cluster's secret; callers are known by their keys."""

    words = "with the secret of the cluster"
    server_name = SERVER_NAME
    denies = True
    remedy = "both must be in the same cluster, with the same secret"

    def __init__(self, options: ClusterOptions) -> None:
        """Find the cluster; ConfigError if there is none."""
        self._cluster = options.find(effective_environment())
        self._read_at = time.monotonic()
        # A secret from elsewhere does not change, and to find it again may take half a second: a passphrase does.
        self._is_saved = _saved(self._cluster.name) == self._cluster.secret

    def find(self) -> Cluster:
        """Return the cluster as its file has it: its secret or its denied machines may have changed. On any thread."""
        if time.monotonic() > self._read_at + READ_SECONDS:
            self._read_at = time.monotonic()
            with contextlib.suppress(ConfigError):  # this machine has left the cluster, or the file is damaged
                saved = clusters.load(self._cluster.name)
                if self._is_saved and saved.owner == self._cluster.owner:
                    self._cluster = replace(saved, charter=latest(saved.charter, self._cluster.charter))
                else:  # denied machines stay denied whatever the source of the secret
                    self._cluster = saved if self._is_saved else replace(self._cluster, denied=saved.denied)
        return self._cluster

    def papers(self, role: str) -> KeyAndCertificates:
        cluster = self.find()
        return derived(cluster.secret, cluster.earlier(time.time()), role)

    def identity(self, certificate: bytes) -> str:
        machine = machine_of(certificate)
        if not machine:
            raise RefusalError(Reason.UNPROVEN, "the certificate names no machine; update covey on both machines")
        if objection := machine_objection(self.find(), machine, socket.gethostname()):
            raise RefusalError(Reason.NOT_YOURS, objection)
        return _proved(key_of(certificate))

    def charter(self) -> bytes:
        charter = self.find().charter
        data = b"" if charter is None else encode(charter)
        return data if len(data) <= CHARTER_BYTES else b""

    def hear(self, charter: bytes) -> None:
        cluster = self.find()
        with contextlib.suppress(RemoteProtocolError, AuthError, ConfigError, OSError):  # the next caller may bring it
            found = decode_control(charter)
            if isinstance(found, Charter) and is_news(cluster, found):
                self._cluster = replace(cluster, charter=found)
                if self._is_saved:
                    keep(cluster, found)


@dataclass(frozen=True)
class PemSecurity:
    """TLS with an organisation's certificates; callers are known by the subject of theirs."""

    files: PemFiles
    words = "with certificates from PEM files"
    server_name = ""
    denies = False
    remedy = "the tls-ca of each end must have signed the certificate of the other"

    def papers(self, role: str) -> KeyAndCertificates:
        return self.files.read()

    def identity(self, certificate: bytes) -> str:
        return _proved(subject_of(certificate))

    def charter(self) -> bytes:
        return b""

    def hear(self, charter: bytes) -> None:
        """Do nothing: the authority decides which machines have a certificate."""


def _saved(name: str) -> ClusterSecret | None:
    """Return the secret of a cluster that this machine has in a file."""
    try:
        return clusters.load(name).secret
    except ConfigError:
        return None


def _proved(identity: str) -> str:
    if not identity:
        raise RefusalError(Reason.UNPROVEN, "the certificate of the caller has no subject; give it one")
    return identity
