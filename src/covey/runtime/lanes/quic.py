"""The QUIC connections of a node: their pump, which connections it accepts, and where to dial. On the control loop.

The pump is started with the first lane that needs it. What it accepts passes the door like any other connection, and
must then claim an offered lane.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.net.host.descriptors import explain
from covey.runtime import loop as control
from covey.runtime.lanes.opener import SealedOpener
from covey.runtime.links.limits import SourceLimits
from covey.runtime.links.link import plain_ip
from covey.runtime.links.sockets import QuicWay, RelayedWay

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.lane_kinds import LaneKind
    from covey.net.quic.line import QuicSocket
    from covey.net.quic.pump import QuicPump
    from covey.runtime.lanes.opener import OwnEnd
    from covey.runtime.links.handshake import Where


class QuicOpener(SealedOpener):
    """Opens lanes that go by QUIC, and has the connections of one process that carry them."""

    def __init__(self, kind: LaneKind, end: OwnEnd) -> None:
        super().__init__(kind, end)
        self._pump: QuicPump | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self._arrivals = SourceLimits()

    @classmethod
    def check(cls, config: GroupConfig) -> None:
        check_extra()
        if config.limit:
            raise ConfigError("limit= is kept by the kernel's TCP, and not with lanes='quic'; leave one of them out")

    def port(self) -> int:
        return self._started().port

    def ways(self, ways: list[Where], port: int) -> list[Where]:
        """Return the ways to a peer by QUIC, from those by TCP: relays carry none."""
        direct = [way for way in ways if not isinstance(way, str | RelayedWay)]
        pump = self._started() if port else None
        if pump is None:
            return []
        found = [QuicWay(way[0], port, 0, way[3] if len(way) > 3 else 0, pump) for way in direct]
        return list(dict.fromkeys(found))

    def _started(self) -> QuicPump:
        with self._lock:
            if self._is_closed:
                raise ConfigError("this node is closed")
            if self._pump is None or self._pump.error:
                check_extra()
                from covey.net.quic.pump import QuicPump  # loads qh3

                addresses = self._end.contact.addresses
                is_local = bool(addresses) and all(each.ip == "127.0.0.1" for each in addresses)
                try:
                    self._pump = QuicPump(self, is_local=is_local)
                except OSError as error:
                    raise ConfigError(f"no UDP socket for QUIC: {explain(error)}") from error
            return self._pump

    def close(self) -> None:
        """End the connections: in order, if the other ends answer soon."""
        with self._lock:
            self._is_closed, pump = True, self._pump
        if pump is not None:
            pump.close()

    # For the pump, on its thread

    def door_keys(self) -> tuple[bytes, ...]:
        """Return the door keys that are valid now, the preferred first."""
        return self._end.credentials.door_keys()

    def comes(self, ip: str, local_ip: str) -> Callable[[], None] | None:
        """Count a connection; return what to call when it has proved the key, or None if it is refused."""
        if local_ip and not self._end.acceptor.allows(local_ip):
            return None
        arrival = self._arrivals.come(plain_ip(ip), time.monotonic(), is_member=ip in self._end.acceptor.member_ips)
        return None if arrival is None else arrival.proved_key

    def take(self, sock: QuicSocket, proved: Callable[[], None]) -> None:
        """Bring an accepted connection to the door."""
        control.soon(self._end.acceptor.take, sock, proved)


def check_extra() -> None:
    """Load qh3; ConfigError with the remedy if it is not installed."""
    try:
        import qh3.quic.connection  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lanes='quic' needs the package qh3 ({error}); install covey[quic], or use lanes='auto'"
        ) from error
