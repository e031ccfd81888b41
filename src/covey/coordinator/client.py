"""A caller of a coordinator: one connection, calls with deadlines, and errors of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.coordinator.extra import require_grpc
from covey.coordinator.limits import ANSWER_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from covey.coordinator.security import Security

CALL_SECONDS: Final = 10.0
"""How long a call may take that the coordinator answers at once."""
OPTIONS: Final = (
    ("grpc.max_receive_message_length", ANSWER_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # the session of a worker repeats calls, and knows for how long
    ("grpc.use_local_subchannel_pool", 1),  # a new connection is a new one, with the certificates of now
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
FINAL: Final = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED")
"""Statuses that the same call gets again."""


class CoordinatorClient:
    """A connection to a coordinator. Use it in `with`, or `close` it."""

    def __init__(self, address: str, security: Security, role: str) -> None:
        """`role` names the identity of the caller on this machine."""
        self._grpc = require_grpc()
        from covey.coordinator.coordinator_pb2_grpc import CoordinatorStub

        self.address = address
        papers, name = security.papers(role), security.server_name
        credentials = self._grpc.ssl_channel_credentials(papers.authorities, papers.key, papers.chain)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", name)] if name else OPTIONS
        self._channel = self._grpc.secure_channel(address, credentials, options)
        self._stub: Any = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    def call(self, method: str, request: Any, *, timeout: float = CALL_SECONDS) -> Any:
        """Return the answer to a call; raise what `explained` returns if there is none."""
        try:
            return getattr(self._stub, method)(request, timeout=timeout)
        except self._grpc.RpcError as error:
            raise explained(error, self.address) from None

    def stream(self, method: str, request: Any) -> Any:
        """Return a stream: iterate over it, or `cancel` it from another thread. It raises `grpc.RpcError`."""
        return getattr(self._stub, method)(request)

    def close(self) -> None:
        """Close the connection, and end its streams."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_final(error: Any) -> bool:
    """Tell whether a call that failed so would fail again."""
    return error.code().name in FINAL


def explained(error: Any, address: str) -> CoveyError:
    """Return the error to raise for a failed call."""
    code, details = error.code().name, printable(error.details() or "")
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return AuthError(f"the coordinator at {address} refuses this process: {details}")
    if code in FINAL:
        return ConfigError(f"the coordinator at {address}: {details}")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineError(f"the coordinator at {address} did not answer within the timeout of the call: {details}")
    if code == "UNAVAILABLE" and "refused" in details:
        return ConnectError(f"the coordinator at {address} cannot be reached: no program listens there")
    if code == "UNAVAILABLE":
        return ConnectError(
            f"the coordinator at {address} cannot be reached: {details}. If it runs, the two ends may have different "
            "secrets or certificates"
        )
    return ConnectError(f"the coordinator at {address}: {details} ({code})")
