"""Make the lanes of a process: all of them for the compiled executor, or all of them for the one in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.native import native
from covey.base.settings import STREAMS_LIMIT
from covey.net.host import tcp
from covey.net.host.machine import native_crypto
from covey.net.lanes import shm
from covey.net.lanes.message_sockets import RingSocket
from covey.net.lanes.native import (
    NativeRingLane,
    NativeSealedLane,
    NativeStreamLane,
    NativeStripedLane,
)
from covey.net.lanes.ring import RingLane
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

    @property
    def most_streams(self) -> int:
        """How many connections a lane may have: in Python one, over one network."""
        return STREAMS_LIMIT if self.is_native else 1

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
        return StreamLane(sock, kind, is_direct=None if directs is None else directs[0])

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
        """Make one end of a sealed lane; in Python, it has one stream."""
        self._slow_down(socks)
        if self.is_native:
            return NativeSealedLane(socks, secret, lane, dialler=dialler, directs=directs, kind=kind)
        from covey.net.lanes.sealed import SealedLane  # slow to import, and not needed by ranks of one host

        (sock,), is_direct = socks, None if directs is None else directs[0]
        return SealedLane(sock, secret, lane, dialler=dialler, is_direct=is_direct, kind=kind)

    def striped(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool] | None = None,
    ) -> SocketLane:
        """Make one end of a lane over several networks, for the compiled executor."""
        self._slow_down(socks)
        return NativeStripedLane(socks, secret, lane, dialler=dialler, directs=directs)

    def _slow_down(self, socks: Sequence[socket.socket]) -> None:
        """Let the kernel space out what these sockets send together."""
        if self.bytes_per_second:
            for sock in socks:
                tcp.pace(sock, self.bytes_per_second // len(socks))
