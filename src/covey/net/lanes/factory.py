"""Make the lanes of a process: all of them for the compiled executor, or all of them for the one in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.native import native
from covey.net.lanes.ring import RingLane
from covey.net.lanes.stream import StreamLane
from covey.net.native import native_crypto

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.net.lanes.stream import SocketLane


class LaneFactory:
    """Makes lanes for one of the two executors. Takes ownership of the sockets."""

    def __init__(self, *, may_seal: bool) -> None:
        """`may_seal` tells whether lanes may be sealed, for which the compiled executor needs libcrypto."""
        self.is_native = native().module is not None and not (may_seal and native_crypto())

    def ring(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str) -> RingLane:
        """Make one end of a lane through shared memory."""
        if self.is_native:
            from covey.net.lanes.native import NativeRingLane

            return NativeRingLane(memory, capacity, doorbell, first=first, kind=kind)
        return RingLane(memory, capacity, doorbell, first=first, kind=kind)

    def stream(self, sock: socket.socket, kind: str) -> StreamLane:
        """Make one end of a lane over a stream socket."""
        if self.is_native:
            from covey.net.lanes.native import NativeStreamLane

            return NativeStreamLane(sock, kind)
        return StreamLane(sock, kind)

    def sealed(self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool) -> SocketLane:
        """Make one end of a sealed lane."""
        if self.is_native:
            from covey.net.lanes.native import NativeSealedLane

            return NativeSealedLane(socks, secret, lane, dialler=dialler)
        from covey.net.lanes.sealed import SealedLane  # slow to import, and not needed by ranks of one host

        return SealedLane(socks, secret, lane, dialler=dialler)
