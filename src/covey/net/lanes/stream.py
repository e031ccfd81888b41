"""Lanes over stream sockets: unix and TCP."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.net.host import tcp
from covey.net.host.descriptors import track
from covey.net.lanes.lane import SMALL_BYTES, Incoming, LaneClosedError, LanePath, Outgoing
from covey.net.lanes.lasting import LastingSocket
from covey.wire.header import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

SEND_BYTES = 1 << 20
"""Bytes given to the kernel at once. Much more would leave the cache before the peer reads it."""
RECEIVE_BYTES = 1 << 19
"""Bytes read from the kernel at once for a reduction, so that they are still in the cache."""

SPINS = range(16)
"""How often a socket is read before the thread sleeps: for about 25 microseconds."""
SPIN_BYTES = 1 << 17
"""For transfers larger than this, sleeping costs little in comparison."""


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
    """The common part of lanes over sockets: spinning, and noticing a dead path."""

    is_resumable = False
    """Whether its streams can go on over other connections."""
    is_striped = False
    """Whether it goes over several networks."""

    def receive(self, incoming: Incoming) -> bool:
        raise NotImplementedError

    def spin(self, out: Outgoing | None, incoming: Incoming | None) -> bool:
        if out is not None or incoming is None or incoming.nbytes > SPIN_BYTES:
            return False
        for _ in SPINS:  # noqa: SIM110  (any() takes longer)
            if self.receive(incoming):
                return True
        return False

    def unpark(self) -> None:
        pass

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        return any(tcp.is_stuck(sock, has_moved=has_moved) for sock in self.sockets())

    def paths(self) -> tuple[LanePath, ...]:
        return ()

    def sockets(self) -> Sequence[socket.socket]:
        raise NotImplementedError


class StreamLane(SocketLane):
    """A connected stream socket. Takes ownership of the socket."""

    def __init__(self, sock: socket.socket | LastingSocket, kind: str) -> None:
        sock.setblocking(False)
        if kind == "tcp":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.kind = kind
        self._sock = sock if isinstance(sock, LastingSocket) else track(sock)
        self._scratch = np.empty(HEADER_BYTES + RECEIVE_BYTES, np.uint8)
        self._scratch_view = memoryview(self._scratch)
        self._typed: np.ndarray[Any, np.dtype[Any]] = self._scratch[HEADER_BYTES:]
        """The scratch payload, viewed as elements of the dtype that was reduced last."""
        self._carry = 0  # bytes of an element that arrived in part, at the front of the scratch payload

    def sockets(self) -> Sequence[socket.socket]:
        return (connection_of(self._sock),)

    def transmit(self, out: Outgoing) -> bool:
        sent = out.sent
        try:
            if sent < 0:
                header = out.header if sent == -HEADER_BYTES else out.header[sent:]
                if out.nbytes <= SMALL_BYTES:
                    taken = self._sock.send(header + out.data.tobytes())
                else:
                    taken = self._sock.sendmsg([header, out.data[:SEND_BYTES]])
            else:
                taken = self._sock.send(out.data[sent : sent + SEND_BYTES])
        except BlockingIOError:
            return False
        except OSError as error:  # reset, timed out, unreachable: the lane cannot be used any more
            raise LaneClosedError(str(error)) from error
        out.sent = sent + taken
        return True

    def receive(self, incoming: Incoming) -> bool:
        try:
            if incoming.got < 0:
                return self._receive_header(incoming)
            if incoming.dest is not None:
                got = incoming.got
                taken = self._sock.recv_into(incoming.dest[got : got + SEND_BYTES])
                incoming.got = got + taken
            else:
                end = incoming.nbytes - incoming.got
                end = HEADER_BYTES + (end if end < RECEIVE_BYTES else RECEIVE_BYTES)
                taken = self._sock.recv_into(self._scratch_view[HEADER_BYTES + self._carry : end])
                self._absorb(incoming, self._carry + taken)
        except BlockingIOError:
            return False
        except OSError as error:  # reset, timed out, unreachable: the lane cannot be used any more
            raise LaneClosedError(str(error)) from error
        if taken == 0:
            raise LaneClosedError("end of stream")
        return True

    def _receive_header(self, incoming: Incoming) -> bool:
        """Read the header and, in the same call, the start of the payload."""
        at = HEADER_BYTES + incoming.got
        if incoming.dest is not None and incoming.nbytes:
            head = self._scratch_view[at:HEADER_BYTES]
            taken = self._sock.recvmsg_into([head, incoming.dest[:SEND_BYTES]])[0]
        else:
            room = HEADER_BYTES + min(RECEIVE_BYTES, incoming.nbytes)
            taken = self._sock.recv_into(self._scratch_view[at:room])
        if taken == 0:
            raise LaneClosedError("end of stream")
        incoming.got += taken
        if incoming.got < 0:
            return True
        header = self._scratch_view[:HEADER_BYTES].tobytes()
        if header != incoming.expected:
            incoming.wrong_header(incoming.peer, incoming.expected, header)
        if incoming.dest is None and incoming.nbytes:
            arrived, incoming.got = incoming.got, 0
            self._absorb(incoming, arrived)
        return True

    def _absorb(self, incoming: Incoming, available: int) -> None:
        """Pass on the whole elements among `available` scratch bytes, and keep the bytes of an incomplete one."""
        if self._typed.dtype is not incoming.dtype:
            self._typed = self._scratch[HEADER_BYTES:].view(incoming.dtype)
        size = self._typed.itemsize
        carry = available % size
        whole = available - carry
        if whole:
            incoming.absorb(incoming.got, self._typed[: whole // size])
            incoming.got += whole
        if carry and whole:
            self._scratch[HEADER_BYTES : HEADER_BYTES + carry] = self._scratch[
                HEADER_BYTES + whole : HEADER_BYTES + available
            ]
        self._carry = carry

    def fileno(self) -> int:
        return self._sock.fileno()

    def park(self, *, sending: bool, receiving: bool) -> int:
        return (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)

    def peek(self) -> bytes:
        try:
            return self._sock.recv(HEADER_BYTES, socket.MSG_PEEK)
        except OSError:
            return b""

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        close_without_reset(self._sock, self._scratch_view)


def connection_of(sock: socket.socket | LastingSocket) -> socket.socket:
    """Return what to poll for a socket that may be a lasting one."""
    return sock.connection if isinstance(sock, LastingSocket) else sock


def close_without_reset(sock: socket.socket | LastingSocket, scratch: memoryview | bytearray) -> None:
    """End the stream, read what has arrived into `scratch`, and close the socket, which is non-blocking.

    Closing with unread bytes resets the connection, and the reset can overtake what was sent.
    """
    with contextlib.suppress(OSError, LaneClosedError):
        sock.shutdown(socket.SHUT_WR)
        while sock.recv_into(scratch):
            pass
    sock.close()
