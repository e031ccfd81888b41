"""Lanes for the compiled executor: Python opens and closes them, `covey._native` moves the bytes.

Each has a `native` part, which the executor uses without the interpreter's lock. The wire format is that of the lanes
in Python, so the other end may be either.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

from covey.base.errors import ConfigError
from covey.net.descriptors import track
from covey.net.lanes.ring import RingLane
from covey.net.lanes.stream import SocketLane, StreamLane
from covey.net.native import native

if TYPE_CHECKING:
    from collections.abc import Sequence


class NativeRingLane(RingLane):
    """One end of a pair of rings."""

    def __init__(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str) -> None:
        super().__init__(memory, capacity, doorbell, first=first, kind=kind)
        self.native = native().module.Ring(memory, capacity, doorbell.fileno(), first)

    def peek(self) -> bytes:
        return bytes(self.native.peek())

    def close(self) -> None:
        self.native.close()
        super().close()


class NativeStreamLane(StreamLane):
    """A connected stream socket."""

    def __init__(self, sock: socket.socket, kind: str) -> None:
        super().__init__(sock, kind)
        self.native = native().module.Stream(sock.fileno())

    def close(self) -> None:
        self.native.close()
        super().close()


class NativeSealedLane(SocketLane):
    """A lane over connected stream sockets, sealed by libcrypto; see `sealed.SealedLane`."""

    kind = "secure"

    def __init__(self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool) -> None:
        from covey.wire.seal import ACCEPTOR, DIALLER, lane_keys, scope

        if not socks:
            raise ConfigError("a lane needs at least one stream")
        mine, theirs = (DIALLER, ACCEPTOR) if dialler else (ACCEPTOR, DIALLER)
        streams = []
        for stream, sock in enumerate(socks):
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keys = lane_keys(secret, lane, stream)
            scopes = scope(lane, stream, mine), scope(lane, stream, theirs)
            streams.append((sock.fileno(), keys[mine], scopes[0], keys[theirs], scopes[1]))
        self.native = native().module.Sealed(tuple(streams))
        self._socks = [track(sock) for sock in socks]

    def sockets(self) -> Sequence[socket.socket]:
        return self._socks

    def peek(self) -> bytes:
        return bytes(self.native.peek())

    def shutdown(self, how: int) -> None:
        for sock in self._socks:
            sock.shutdown(how)

    def close(self) -> None:
        self.native.close()
        unread = bytearray(1 << 16)
        for sock in self._socks:
            # Unread bytes would turn the close into a reset that can overtake what we sent.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                while sock.recv_into(unread):
                    pass
            sock.close()
