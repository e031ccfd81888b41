"""A line: the carrier of one connection, and the socket behind which its bytes appear. On the pump's thread.

What is read from the socket goes to the carrier, what the carrier receives goes to the socket. Both are bounded: the
socket is read only as far as the carrier has room, and the other end sends only as far as the socket was written.
"""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from covey.net.quic.carrier import Address, Carrier, QuicCredentials

SOCKET_READ_BYTES: Final = 1 << 18
"""Bytes read from a socket with one call."""
MOVED_SECONDS: Final = 10.0
DEAD_PATH_SECONDS: Final = 30.0
"""After how much silence a path is taken to be dead: if the other machine is found on another network only, and
otherwise. The other process may only be busy, and cannot answer meanwhile, as the kernel would for TCP. A connection
that follows a changed address needs some probes, with growing pauses, which a busy machine sends late."""
LAST_BYTES_SECONDS: Final = 5.0
LONGEST_SECONDS: Final = 60.0
"""How long the last bytes of a lane that was closed are sent, although the other end still sends: while nothing comes
from it, and in all."""


class QuicSocket(socket.socket):
    """The end of a line that lanes use: a stream socket like any other."""

    remote_ip = ""
    """The address of the other machine, when the connection began."""
    problem = ""
    """Why the connection ended, if an error did it."""
    waits_since = 0.0
    """Since when nothing came from the other end although it has to acknowledge something; 0 if it has not."""

    def is_silent(self, *, has_moved: bool) -> bool:
        """Tell whether the path is dead; if the other machine `has_moved` to another network, sooner."""
        seconds = MOVED_SECONDS if has_moved else DEAD_PATH_SECONDS
        return self.waits_since > 0 and time.monotonic() > self.waits_since + seconds


def socket_pair() -> tuple[QuicSocket, socket.socket]:
    """Return the end for the lane and the end for the pump; OSError if no descriptors are left."""
    one, other = socket.socketpair()
    lane = QuicSocket(one.family, one.type, one.proto, fileno=one.detach())
    lane.setblocking(False)
    other.setblocking(False)
    return lane, other


class Line:
    """One connection."""

    def __init__(
        self,
        carrier: Carrier,
        credentials: QuicCredentials,
        address: Address,
        *,
        is_dialler: bool,
        sock: socket.socket | None,
    ) -> None:
        """A dialler has its `sock` from the beginning; an acceptor gets it after the handshake."""
        self.carrier, self.credentials, self.is_dialler = carrier, credentials, is_dialler
        self.sock = sock
        self.canonical = address
        """What the core of a dialler takes for the address of the other end."""
        self.remote = address
        """Where a dialler's datagrams go: another address once the other machine has another."""
        self.probing: tuple[bytes, Address, float] | None = None
        """A dialler's question at another address: its nonce, the address, and when it was asked."""
        self.lane: weakref.ref[QuicSocket] | None = None
        """The other end of `sock`, which is told of silence and errors."""
        self.is_proved = is_dialler
        self.on_proved: Callable[[], None] = lambda: None
        """Called when the other end has proved the key."""
        self.prove_until = 0.0
        """When the other end must have proved the key."""
        self.events = 0
        """What the selector watches `sock` for."""
        self.ids: set[bytes] = set()
        """Under which ids the pump finds this line."""
        self.due = 0.0
        self.heard_at = 0.0
        """When a datagram of the other end came last."""
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._heard_eof = self._said_eof = False
        self.deaf_since = 0.0
        """When the lane was closed with bytes for it on the way; 0 before that."""

    def move(self, now: float) -> None:
        """Move bytes both ways, as far as possible now."""
        carrier = self.carrier
        if self.sock is not None and not carrier.error:
            self._to_socket(self.sock, now)
        if self.sock is not None and not carrier.is_over:
            self._from_socket(self.sock)
        if carrier.is_delivered and self._said_eof:
            carrier.close()
        elif self.deaf_since and (carrier.is_delivered or self._is_in_vain(now)):
            carrier.close("the lane was closed")

    def _is_in_vain(self, now: float) -> bool:
        """Tell whether the last bytes of a lane that was closed will not arrive any more, or not soon."""
        return now > max(self.deaf_since, self.heard_at) + LAST_BYTES_SECONDS or now > self.deaf_since + LONGEST_SECONDS

    @property
    def is_abandoned(self) -> bool:
        """Whether the lane has closed its end, or forgotten it."""
        lane = self.lane() if self.lane is not None else None
        return lane is None or lane.fileno() < 0

    @property
    def is_finished(self) -> bool:
        """Whether the connection is over, and the socket has got all that arrived in order."""
        return self.carrier.is_over and (bool(self.carrier.error) or not self._unsent or bool(self.deaf_since))

    def _to_socket(self, sock: socket.socket, now: float) -> None:
        carrier, taken = self.carrier, 0
        while not self.deaf_since:
            if not self._unsent:
                data = carrier.read()
                if data is None:
                    break
                self._unsent.append(memoryview(data))
            try:
                sent = sock.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:  # the lane was closed, with bytes for it on the way
                self.deaf_since = now
                break
            taken += sent
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]
        if taken:
            carrier.consumed(taken)
        if carrier.has_heard_end and not self._unsent and not self._said_eof:
            self._said_eof = True
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)

    def _from_socket(self, sock: socket.socket) -> None:
        while not self._heard_eof and (room := self.carrier.room()) > 0:
            try:
                data = sock.recv(min(room, SOCKET_READ_BYTES))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._heard_eof = True
                self.carrier.end()
                return
            self.carrier.write(data)

    def wanted(self) -> int:
        """Return what the socket is to be watched for."""
        if self.sock is None or self.carrier.error:
            return 0
        is_reading = not self._heard_eof and self.carrier.room() > 0
        is_writing = bool(self._unsent) and not self.deaf_since
        return (selectors.EVENT_READ if is_reading else 0) | (selectors.EVENT_WRITE if is_writing else 0)

    def note_silence(self, now: float) -> None:
        """Tell the lane since when the other end owes an answer."""
        lane = self.lane() if self.lane is not None else None
        if lane is not None:
            awaits = self.carrier.awaits_answer(now)
            lane.waits_since = max(self.heard_at, lane.waits_since or now) if awaits else 0.0

    def hang_up(self) -> None:
        """Close the socket: the lane sees the end of its stream, and `problem` says why, if an error was the reason."""
        lane = self.lane() if self.lane is not None else None
        if lane is not None and self.carrier.error:
            lane.problem = self.carrier.error
        if self.sock is not None:
            self.sock.close()
            self.sock = None
