"""What the pump asks of the node whose connections it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.quic.line import QuicSocket


class Gatekeeper(Protocol):
    """Decides which connections are accepted. Called on the pump's thread."""

    def door_keys(self) -> tuple[bytes, ...]:
        """Return the door keys that are valid now, the preferred first."""

    def comes(self, ip: str, local_ip: str) -> Callable[[], None] | None:
        """Count a connection from `ip` to `local_ip`; None if it is refused, else what to call when it is proved."""

    def take(self, sock: QuicSocket, proved: Callable[[], None]) -> None:
        """Own the socket of an accepted connection; call `proved` once it has proved the key on the stream."""
