"""Make the lanes of a process: all of them for the compiled executor, or all of them for the one in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.native import native
from covey.net.host import tcp
from covey.net.host.machine import native_crypto
from covey.net.lanes import shm
from covey.net.lanes.native import (
    NativeRingLane,
    NativeSealedLane,
    NativeStreamLane,
    NativeStripedLane,
)
from covey.net.lanes.ring import RingLane
from covey.net.lanes.ring_socket import RingSocket
from covey.net.lanes.stream import StreamLane

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.net.lanes.stream import SocketLane


class LaneFactory:
    """Makes lanes for one of the two executors. Takes ownership of the sockets."""

    def __init__(self, *, may_seal: bool, kernel_copy: str = "auto") -> None:
        """`may_seal` tells whether lanes may be sealed, for which the compiled executor needs libcrypto.

        `kernel_copy` is the setting of this name.
        """
        self._kernel_copy = kernel_copy
        self.is_native: bool = native().module is not None and not (may_seal and native_crypto())
        self.ring_obstacle = shm.obstacle_here(is_native=self.is_native)
        """Why no lane of this process goes through shared memory; empty if it may."""
        self.bytes_per_second = 0
        """How fast lanes made from now on send over TCP; 0: as fast as they can. Only Linux knows how."""

    def ring(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str) -> RingLane:
        """Make one end of a lane through shared memory."""
        if self.is_native:
            how = self._kernel_copy
            return NativeRingLane(memory, capacity, doorbell, first=first, kind=kind, kernel_copy=how)
        return RingLane(memory, capacity, doorbell, first=first, kind=kind)

    def ring_socket(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool) -> RingSocket:
        """Make one end of a socket for messages through shared memory."""
        return RingSocket(memory, capacity, doorbell, first=first, is_native=self.is_native)

    # Streams go on over other connections if `directs` tells of each whether it is direct; see `net.lanes.lasting`.

    def stream(self, sock: socket.socket, kind: str, *, directs: Sequence[bool] | None = None) -> SocketLane:
        """Make one end of a lane over a stream socket."""
        self._slow_down([sock])
        if self.is_native:
            return NativeStreamLane(sock, kind, directs=directs)
        if directs is None:
            return StreamLane(sock, kind)
        from covey.net.lanes.resumable import ResumableStreamLane  # of no use to ranks of one host

        return ResumableStreamLane(sock, kind, directs=directs)

    def sealed(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool] | None = None,
        kind: str = "secure",
    ) -> SocketLane:
        """Make one end of a sealed lane."""
        self._slow_down(socks)
        if self.is_native:
            return NativeSealedLane(socks, secret, lane, dialler=dialler, directs=directs, kind=kind)
        if directs is None:
            from covey.net.lanes.sealed import SealedLane  # slow to import, and not needed by ranks of one host

            return SealedLane(socks, secret, lane, dialler=dialler, kind=kind)
        from covey.net.lanes.resumable import ResumableSealedLane

        return ResumableSealedLane(socks, secret, lane, dialler=dialler, directs=directs, kind=kind)

    def striped(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool] | None = None,
    ) -> SocketLane:
        """Make one end of a lane over several networks."""
        from covey.net.lanes.striped import StripedLane, prepare

        self._slow_down(socks)
        if self.is_native:
            prepare(socks)
            return NativeStripedLane(socks, secret, lane, dialler=dialler, directs=directs)
        if directs is None:
            return StripedLane(socks, secret, lane, dialler=dialler)
        from covey.net.lanes.resumable import ResumableStripedLane

        return ResumableStripedLane(socks, secret, lane, dialler=dialler, directs=directs)

    def _slow_down(self, socks: Sequence[socket.socket]) -> None:
        """Let the kernel space out what these sockets send together."""
        if self.bytes_per_second:
            for sock in socks:
                tcp.pace(sock, self.bytes_per_second // len(socks))
