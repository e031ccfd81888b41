"""How a coordinator and its callers prove their identities: PEM files, the secret of a cluster, or one user's loopback.

Both ends choose by the same rule (`choose_security`), so that equal settings meet.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import ConfigError
from covey.coordinator.certificates import SERVER_NAME, derived, key_of, subject_of
from covey.coordinator.extra import require_grpc
from covey.coordinator.refusal import Reason, RefusalError
from covey.net.keys import clusters
from covey.net.keys.identity import machine_secret
from covey.net.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions, is_loopback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.net.keys.clusters import Cluster
    from covey.net.keys.pem_files import KeyAndCertificates, PemFiles
    from covey.wire.secret import ClusterSecret

TOKEN_KEY: Final = "covey-token"
"""The name of the metadata that carries the token of a user on loopback."""
READ_SECONDS: Final = 1.0
"""How often the file of a cluster is read again at most."""
Options = list[tuple[str, Any]]


class Security(Protocol):
    """One way in which both ends of a connection prove their identities."""

    words: str
    """In a few words, for people."""

    def listen(self, server: Any, address: str) -> int:
        """Add a port to a gRPC server; return its number, 0 if it cannot be opened."""

    def connect(self, address: str, role: str, options: Options) -> Any:
        """Return a channel to a coordinator; the caller has the identity of `role` on this machine."""

    def metadata(self) -> Sequence[tuple[str, str]]:
        """Return what goes with every call."""

    def identity(self, auth: Mapping[str, Sequence[bytes]], metadata: Mapping[str, Any]) -> str:
        """Return the identity of the caller, as text; RefusalError if the caller has not proved one."""


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
    """Clear text between processes of one user on one machine; a token keeps out other users of the machine."""

    words = "in clear text, for this user on this machine only"

    def __init__(self) -> None:
        self._token = machine_secret("coordinator/loopback").hex()

    def listen(self, server: Any, address: str) -> int:
        return int(server.add_insecure_port(address))

    def connect(self, address: str, role: str, options: Options) -> Any:
        return require_grpc().insecure_channel(address, options)

    def metadata(self) -> Sequence[tuple[str, str]]:
        return ((TOKEN_KEY, self._token),)

    def identity(self, auth: Mapping[str, Sequence[bytes]], metadata: Mapping[str, Any]) -> str:
        given = metadata.get(TOKEN_KEY, "")
        if not isinstance(given, str) or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise RefusalError(
                Reason.UNPROVEN,
                "this coordinator is for processes of its own user on its own machine, with the same COVEY_HOME; for "
                "others, start it with a cluster or with certificates",
            )
        return f"user {os.getuid()}"


class SecretSecurity:
    """TLS with certificates from a cluster's secret; callers are known by their keys."""

    words = "with the secret of the cluster"

    def __init__(self, options: ClusterOptions) -> None:
        """Find the cluster; ConfigError if there is none."""
        self._cluster = options.find(effective_environment())
        self._read_at = time.monotonic()
        # A secret from elsewhere does not change, and to find it again may take half a second: a passphrase does.
        self._is_saved = _saved(self._cluster.name) == self._cluster.secret

    def find(self) -> Cluster:
        """Return the cluster as its file has it: the secret may have been changed. On any thread."""
        if self._is_saved and time.monotonic() > self._read_at + READ_SECONDS:
            self._read_at = time.monotonic()
            with contextlib.suppress(ConfigError):  # this machine has left the cluster, or the file is damaged
                self._cluster = clusters.load(self._cluster.name)
        return self._cluster

    def listen(self, server: Any, address: str) -> int:
        return int(server.add_secure_port(address, _server_credentials(lambda: self._papers("server"))))

    def connect(self, address: str, role: str, options: Options) -> Any:
        grpc = require_grpc()
        credentials = _client_credentials(grpc, self._papers(role))
        return grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", SERVER_NAME)])

    def metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def identity(self, auth: Mapping[str, Sequence[bytes]], metadata: Mapping[str, Any]) -> str:
        return _proved(key_of(_certificate(auth)))

    def _papers(self, role: str) -> KeyAndCertificates:
        cluster = self.find()
        return derived(cluster.secret, cluster.earlier(time.time()), role)


@dataclass(frozen=True)
class PemSecurity:
    """TLS with an organisation's certificates; callers are known by the subject of theirs."""

    files: PemFiles
    words = "with certificates from PEM files"

    def listen(self, server: Any, address: str) -> int:
        return int(server.add_secure_port(address, _server_credentials(self.files.read)))

    def connect(self, address: str, role: str, options: Options) -> Any:
        grpc = require_grpc()
        return grpc.secure_channel(address, _client_credentials(grpc, self.files.read()), options)

    def metadata(self) -> Sequence[tuple[str, str]]:
        return ()

    def identity(self, auth: Mapping[str, Sequence[bytes]], metadata: Mapping[str, Any]) -> str:
        return _proved(subject_of(_certificate(auth)))


def _saved(name: str) -> ClusterSecret | None:
    """Return the secret of a cluster that this machine has in a file."""
    try:
        return clusters.load(name).secret
    except ConfigError:
        return None


def _certificate(auth: Mapping[str, Sequence[bytes]]) -> bytes:
    found = auth.get("x509_pem_cert", ())
    return bytes(found[0]) if found else b""


def _proved(identity: str) -> str:
    if not identity:
        raise RefusalError(Reason.UNPROVEN, "the certificate of the caller has no subject; give it one")
    return identity


def _server_credentials(papers: Any) -> Any:
    """Return credentials that ask for the key and certificates at every handshake, and require those of the caller."""
    grpc = require_grpc()

    def configuration() -> Any:
        now: KeyAndCertificates = papers()
        return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.authorities)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, require_client_authentication=True)


def _client_credentials(grpc: Any, papers: KeyAndCertificates) -> Any:
    return grpc.ssl_channel_credentials(papers.authorities, papers.key, papers.chain)
