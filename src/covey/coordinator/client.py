"""A caller of a coordinator: one connection, calls with deadlines, and errors of ours.

gRPC says only that a connection ended when one end refused the other, and with TLS 1.3 a coordinator refuses a caller
after the caller's part of the handshake. So after such an end the caller makes one more handshake without gRPC, and
reads once: it gets the first bytes of HTTP/2, or the reason.
"""

from __future__ import annotations

import datetime
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final, Self

from cryptography import x509

from covey.base.config import parse_seed
from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.coordinator import tls
from covey.coordinator.extra import require_grpc
from covey.coordinator.refusal import STATUS_BYTES, RefusalError
from covey.coordinator.security import CHARTER_KEY

if TYPE_CHECKING:
    from types import TracebackType

    from covey.coordinator.security import Security

PROMPT_CALL_SECONDS: Final = 10.0
"""How long a call may take that the coordinator answers at once."""
CLIENT_OPTIONS: Final = (
    ("grpc.max_receive_message_length", STATUS_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # the session of a worker repeats calls, and knows for how long
    ("grpc.use_local_subchannel_pool", 1),  # a new connection is a new one, with the certificates of now
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
TELLING: Final = ("RegisterWorker", "GetStatus")
"""Calls that tell a coordinator of the owner's list of machines."""
FINAL_STATUSES: Final = (
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNIMPLEMENTED",
)
"""Statuses that the same call gets again."""


class CoordinatorClient:
    """A connection to a coordinator. Use it in `with`, or `close` it."""

    def __init__(self, address: str, security: Security, role: str) -> None:
        """`role` names the identity of the caller on this machine.

        Raises:
            AuthError: the machine of the coordinator is denied.
        """
        self._grpc = require_grpc()
        from covey.coordinator.coordinator_pb2_grpc import CoordinatorStub

        self.address, self._security, self._role = address, security, role
        if security.denies:
            check_coordinator(address, security, role)
        papers, name = security.papers(role), security.server_name
        credentials = self._grpc.ssl_channel_credentials(papers.authorities, papers.key, papers.chain)
        options = [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name)] if name else CLIENT_OPTIONS
        self._channel = self._grpc.secure_channel(address, credentials, options)
        self._stub: Any = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, *, timeout: float = PROMPT_CALL_SECONDS) -> Any:
        """Return the answer to a call; raise what `explained` returns if there is none."""
        try:
            return getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata(method))
        except self._grpc.RpcError as error:
            raise self.explained(error) from None

    def stream(self, method: str, request: Any) -> Any:
        """Return a stream: iterate over it, or `cancel` it from another thread. It raises `grpc.RpcError`."""
        return getattr(self._stub, method)(request, metadata=self._metadata(method))

    def _metadata(self, method: str) -> list[tuple[str, bytes]]:
        charter = self._security.charter() if method in TELLING else b""
        return [(CHARTER_KEY, charter)] if charter else []

    def explained(self, error: Any) -> CoveyError:
        """Return the error to raise for a failed call: AuthError if one end refuses the other."""
        found = explained(error, self.address)
        if isinstance(found, ConnectError) and "refused" not in (error.details() or ""):
            return why_refused(self.address, self._security, self._role) or found
        return found

    def close(self) -> None:
        """Close the connection, and end its streams."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_final(error: Any) -> bool:
    """Tell whether a call that failed so would fail again."""
    return error.code().name in FINAL_STATUSES


def explained(error: Any, address: str) -> CoveyError:
    """Return the error to raise for a failed call."""
    code, details = error.code().name, printable(error.details() or "")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return AuthError(f"the coordinator at {address} refuses this process: {details}")
    if code in FINAL_STATUSES:
        return ConfigError(f"the coordinator at {address}: {details}")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineError(f"the coordinator at {address} did not answer within the timeout of the call: {details}")
    if code == "UNAVAILABLE" and "refused" in details:
        return ConnectError(f"the coordinator at {address} cannot be reached: no program listens there")
    if code == "UNAVAILABLE":
        return ConnectError(f"the coordinator at {address} cannot be reached: {details}")
    return ConnectError(f"the coordinator at {address}: {details} ({code})")


def check_coordinator(address: str, security: Security, role: str) -> None:
    """Raise AuthError if a coordinator that proves itself is on a machine that may not be in the cluster."""
    try:
        certificate = _shake(address, security, tls.dialling(security.papers(role)))
    except OSError:
        return  # the call that follows says why
    try:
        security.identity(certificate)
    except RefusalError as refusal:
        raise AuthError(f"the coordinator at {address} is not accepted: {refusal}") from None


def _shake(address: str, security: Security, context: ssl.SSLContext) -> bytes:
    """Make a TLS connection, read once, and return the certificate of the coordinator (PEM).

    Raises:
        ssl.SSLError: one end does not accept the other.
        OSError: no coordinator was reached.
    """
    parsed = parse_seed(address)
    with (
        socket.create_connection((parsed.host, parsed.port), PROMPT_CALL_SECONDS) as sock,
        context.wrap_socket(sock, server_hostname=security.server_name or parsed.host) as connection,
    ):
        connection.recv(1)
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"").encode()


def why_refused(address: str, security: Security, role: str) -> AuthError | None:
    """Return why this process and a coordinator do not accept each other; None if they do, or none is reached."""
    try:
        papers = security.papers(role)
        context = tls.dialling(papers)
    except ConfigError as error:
        return AuthError(f"this process has no certificate for the coordinator at {address}: {error}")
    if problem := _out_of_date(papers.chain):
        return AuthError(f"the certificate of this process for the coordinator at {address} {problem}; renew it")
    try:
        _shake(address, security, context)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None
    except ssl.SSLError as error:
        if words := tls.told(error):
            return AuthError(
                f"the coordinator at {address} does not accept the certificate of this process: {words}; "
                f"{security.remedy}"
            )
        return AuthError(f"the program at {address} is not the coordinator: {tls.in_words(error)}; {security.remedy}")
    except OSError:
        return None
    return None


def _out_of_date(chain: bytes) -> str:
    """Return what is wrong with the dates of a certificate (PEM); empty if it is valid now."""
    now = datetime.datetime.now(datetime.UTC)
    own = x509.load_pem_x509_certificates(chain)[0]
    if now > own.not_valid_after_utc:
        return f"expired at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < own.not_valid_before_utc:
        return f"is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return ""
