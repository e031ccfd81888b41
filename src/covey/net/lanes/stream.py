"""Lanes over sockets: what all of them have in common, and those that the executor in Python moves, unix and TCP.

The executor in Python has one stream per lane, and no lane over several networks: both exist for speed only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.net.host import tcp
from covey.net.lanes.lane import Incoming, LaneClosedError, LanePath, Outgoing
from covey.net.lanes.lasting import LastingSocket, LeftConnections
from covey.wire.header import TRANSFER_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

SEND_BYTES: Final = 1 << 20
"""Bytes given to the kernel at once. Much more would leave the cache before the peer reads it."""
SLEEP_SECONDS: Final = 0.005
"""Between looks whether a stream goes on, which no descriptor tells."""


def is_resumable(lane: Any) -> bool:
    """Tell whether the streams of a lane can go on over other connections (`net.lanes.lasting`)."""
    return getattr(lane, "is_resumable", False)


def is_striped(lane: Any) -> bool:
    """Tell whether a lane goes over several networks."""
    return getattr(lane, "is_striped", False)


def dead_streams(lane: Any, *, has_moved: bool = False) -> list[int]:
    """Return the streams of a resumable lane that wait for a connection, or whose path seems dead, and are needed.

    A striped lane needs none of them while another one works.
    """
    broken = set(lane.broken())
    socks = lane.sockets()
    dead = [stream for stream, sock in enumerate(socks) if stream in broken or tcp.is_stuck(sock, has_moved=has_moved)]
    return [] if is_striped(lane) and len(dead) < len(socks) else dead


def prepare(sock: socket.socket) -> None:
    """Prepare a connection for the stream of a lane."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SocketLane:
    """The common part of lanes over sockets: noticing a dead path."""

    is_resumable = False
    """Whether its streams can go on over other connections."""
    is_striped = False
    """Whether it goes over several networks."""

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        return any(tcp.is_stuck(sock, has_moved=has_moved) for sock in self.sockets())

    def paths(self) -> tuple[LanePath, ...]:
        return ()

    def sockets(self) -> Sequence[socket.socket]:
        raise NotImplementedError


class PythonLane(SocketLane):
    """A lane over one stream, which the executor in Python moves. Takes ownership of the socket.

    If it is told whether the connection is direct, the stream may go on over others (`lasting.LastingSocket`). The
    thread of the operation and the control loop, which replaces connections, take turns under a lock. The methods for
    the control loop take the number of a stream, as those of lanes for the compiled executor do (`native`).
    """

    def __init__(self, sock: socket.socket, kind: str, *, is_direct: bool | None) -> None:
        prepare(sock)
        self.kind = kind
        self.is_resumable = is_direct is not None
        self._lasting = LastingSocket(sock, is_direct=bool(is_direct))
        """Only of use to a resumable lane; the others use the connection itself."""
        self._sock = self._lasting if self.is_resumable else self._lasting.connection
        self._lock = threading.Lock()
        self._left = LeftConnections()
        self.is_closed = False
        """Whether the lane was closed."""

    def sockets(self) -> Sequence[socket.socket]:
        """Return the connection."""
        return (self._lasting.connection,)

    # For the executor

    def transmit(self, out: Outgoing) -> bool:
        with self._lock:
            try:
                return self._transmit(out)
            except BlockingIOError:
                return False
            except OSError as error:  # reset, timed out, unreachable: the lane cannot be used any more
                raise LaneClosedError(str(error)) from error

    def _transmit(self, out: Outgoing) -> bool:
        raise NotImplementedError

    def receive(self, incoming: Incoming) -> bool:
        with self._lock:
            try:
                return self._receive(incoming)
            except BlockingIOError:
                return False
            except OSError as error:
                raise LaneClosedError(str(error)) from error

    def _receive(self, incoming: Incoming) -> bool:
        raise NotImplementedError

    def fileno(self) -> int:
        return self._sock.fileno()

    def park(self, *, sending: bool, receiving: bool) -> int:
        with self._lock:
            if receiving and self._has_arrived():
                return 0
            waits = self.is_resumable and (self._lasting.is_broken or (sending and self._lasting.is_full))
        if waits:
            time.sleep(SLEEP_SECONDS)
            return 0
        return (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)

    def _has_arrived(self) -> bool:
        """Tell whether there is something to receive that no descriptor tells of."""
        return self._lasting.has_spill

    def unpark(self) -> None:
        pass

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._left.close()
            close_without_reset(self._sock, memoryview(bytearray(1 << 16)))

    # For the control loop, if the lane is resumable

    def broken(self) -> list[int]:
        """Return the streams that wait for a connection."""
        return [0] if self._lasting.is_broken else []

    def freeze(self, stream: int) -> None:
        """Use the connection of a stream no more, and count none of its acknowledgements."""
        with self._lock:
            self._lasting.freeze()

    def leave(self, stream: int) -> int:
        """Take what the connection of a frozen stream still has; return how many bytes the stream has brought.

        Raises:
            MemoryError: that is too much.
        """
        with self._lock:
            return self._lasting.received if self.is_closed else self._lasting.drain()

    def attach(self, stream: int, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on with a frozen stream from this position, on a connection that the lane owns from now on.

        Returns False, and takes nothing, if the lane was closed, or if what the other end expects is not kept.
        """
        prepare(sock)
        with self._lock:
            before = self._lasting.connection
            if self.is_closed or not self._lasting.attach(sock, position, is_direct=is_direct):
                return False
            self._left.add(before)
        return True

    def push(self) -> bool:
        """Send again what is needed and can be sent; return whether there is more of it."""
        with self._lock, contextlib.suppress(LaneClosedError):
            if not self.is_closed:
                self._lasting.flush()
                return self._lasting.has_unsent and not self._lasting.is_broken
        return False

    def acknowledge(self, stream: int, position: int) -> bool:
        """Note that the other end has all bytes of a stream before this position; return False if it cannot have."""
        with self._lock:
            return self._lasting.acknowledge(position)

    def received(self, stream: int) -> int:
        """Return how many bytes a stream has brought, on all connections."""
        return self._lasting.received

    def end(self, why: str) -> None:
        """Let the lane end, instead of waiting for another connection."""
        with self._lock:
            self._lasting.end(why)


class StreamLane(PythonLane):
    """A connected stream socket: headers and payloads follow each other in clear."""

    def __init__(self, sock: socket.socket, kind: str, *, is_direct: bool | None = None) -> None:
        """The lane is resumable if `is_direct` tells whether the connection is direct."""
        super().__init__(sock, kind, is_direct=is_direct)
        self._header = memoryview(bytearray(TRANSFER_HEADER_BYTES))

    def _transmit(self, out: Outgoing) -> bool:
        if out.sent < 0:
            out.sent += self._sock.sendmsg((out.header[out.sent :], out.data[:SEND_BYTES]))
        else:
            out.sent += self._sock.send(out.data[out.sent : out.sent + SEND_BYTES])
        return True

    def _receive(self, incoming: Incoming) -> bool:
        is_header, got = incoming.got < 0, incoming.got
        taken = self._sock.recv_into(self._header[got:] if is_header else incoming.dest[got : got + SEND_BYTES])
        if not taken:
            raise LaneClosedError("end of stream")
        incoming.got += taken
        if is_header and not incoming.got and self._header != incoming.expected:
            incoming.wrong_header(incoming.peer, incoming.expected, self._header.tobytes())
        return True

    def peek(self) -> bytes:
        with self._lock:
            if self.is_resumable:
                return self._lasting.peek(TRANSFER_HEADER_BYTES)
            with contextlib.suppress(OSError):
                return self._lasting.connection.recv(TRANSFER_HEADER_BYTES, socket.MSG_PEEK)
        return b""


def close_without_reset(sock: socket.socket | LastingSocket, scratch: memoryview | bytearray) -> None:
    """End the stream, read what has arrived into `scratch`, and close the socket, which is non-blocking.

    Closing with unread bytes resets the connection, and the reset can overtake what was sent.
    """
    with contextlib.suppress(OSError, LaneClosedError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv_into(scratch):
            pass
    sock.close()
