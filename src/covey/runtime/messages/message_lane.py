"""One stream socket of a messenger, plain or encrypted: moves bytes between it and the matcher without blocking."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.net.host import tcp
from covey.proto.message_stream import HURRIED_PIECE_BYTES, PAYLOAD_PIECE_BYTES, SHORT_PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.lanes.message_sockets import RingSocket
    from covey.net.lanes.sealed import SealedSocket
    from covey.proto.matching import Matcher

_CALLS_PER_TURN: Final = 4
"""Send or receive calls before other lanes get their turn."""
_PAUSE_SECONDS: Final = 50e-6
"""How long a lane gives way: a thread that only waits for a system call gets the GIL back before others can take it."""
HURRY_SECONDS: Final = 5.0
"""How long the kernel gets little at a time after something urgent was sent."""
HURRIED_UNSENT_BYTES: Final = 8 * 1024
"""How much the kernel has not sent at most, meanwhile: what is sent next overtakes all that it does not have yet."""
_LINGER_MS: Final = 5
"""Milliseconds between checks of the kernel's send queue. No event tells when it is empty."""


class MessageLane:
    """The connection to one peer. Callers hold the messenger's lock."""

    def __init__(
        self,
        peer: int,
        sock: socket.socket | SealedSocket | RingSocket,
        matcher: Matcher,
        gives_way: Callable[[], bool] | None = None,
    ) -> None:
        """`gives_way` tells whether something more urgent moves elsewhere."""
        self._gives_way = gives_way
        self.peer, self.sock = peer, sock
        self.descriptor = sock.fileno()
        self._matcher, self._ready = matcher, matcher.ready
        link = matcher.link(peer)
        self._outlet, self._inlet = link.outlet, link.inlet
        self._began_at = matcher.progress(peer)
        self.sent_bytes = 0
        self.moved_at = time.monotonic()
        """When the kernel last took bytes, or had some."""
        self.is_ended = False
        """Nothing may be read or written after this."""
        self.is_blocked = False
        """The kernel did not take all; wait until the socket is writable."""
        self._hurries, self._hurries_until = False, 0.0

    @property
    def has_moved(self) -> bool:
        """Whether it has carried anything, as far as this end knows."""
        return self._matcher.progress(self.peer) > self._began_at

    def undelivered_bytes(self) -> int:
        """Return how many bytes the kernel holds for the peer; for a unix socket 0, since a write delivers."""
        if self.sock.family == socket.AF_UNIX or self.sock.fileno() < 0:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])

    def hurry(self) -> None:
        """Give the kernel little at a time for a while, because something urgent is sent here beside other things."""
        self._hurries_until = time.monotonic() + HURRY_SECONDS
        if not self._hurries and self.sock.family != socket.AF_UNIX:
            self._hurries = True
            tcp.limit_unsent(self.descriptor, HURRIED_UNSENT_BYTES)

    def _still_hurries(self) -> bool:
        if time.monotonic() >= self._hurries_until:
            self._hurries = False
            tcp.limit_unsent(self.descriptor, 0)
        return self._hurries

    def flush(self) -> None:
        """Write what the matcher has for this peer until the kernel takes no more. OSError: the lane is broken."""
        outlet = self._outlet
        outlet.piece_bytes = PAYLOAD_PIECE_BYTES
        hurries = self._hurries and self._still_hurries()
        for _ in range(_CALLS_PER_TURN):
            if self.peer not in self._ready:
                self.is_blocked = False
                return
            if self._gives_way is not None:
                outlet.piece_bytes = SHORT_PIECE_BYTES if self._give_way() else PAYLOAD_PIECE_BYTES
            if hurries:
                outlet.piece_bytes = HURRIED_PIECE_BYTES
                if tcp.unsent_bytes(self.descriptor) >= HURRIED_UNSENT_BYTES:
                    break
            buffers = outlet.buffers()
            try:
                count = self.sock.sendmsg(buffers) if len(buffers) > 1 else self.sock.send(buffers[0])
            except BlockingIOError:
                break
            outlet.advance(count)
            self.sent_bytes += count
            self.moved_at = time.monotonic()
        self.is_blocked = self.peer in self._ready

    def read(self) -> bool:
        """Read what has arrived; return False at the end of the stream.

        Raises:
            OSError: the lane is broken.
            RemoteProtocolError: the peer sent bytes that are not messages.
        """
        calls = 0
        while calls < _CALLS_PER_TURN or self._has_more():
            calls += 1
            if self._gives_way is not None:
                self._give_way()
            buffers = self._inlet.buffers()
            try:
                count = self.sock.recvmsg_into(buffers)[0] if len(buffers) > 1 else self.sock.recv_into(buffers[0])
            except BlockingIOError:
                return True
            if not count:
                return False
            self.moved_at = time.monotonic()
            try:
                self._inlet.advance(count)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"rank {self.peer} broke the protocol of messages: {error}") from None
            if count < sum(map(len, buffers)):
                return True  # the kernel had no more
        return True

    def _give_way(self) -> bool:
        """Let other threads of this process run, if something more urgent moves elsewhere; return whether it does."""
        is_needed = self._gives_way is not None and self._gives_way()
        if is_needed:
            time.sleep(_PAUSE_SECONDS)
        return is_needed

    def _has_more(self) -> bool:
        """Tell whether decrypted bytes are buffered, which `poll` does not report."""
        return bool(getattr(self.sock, "pending", False))

    def read_rest(self) -> None:
        """Read all that has arrived on a stream that can no longer be written."""
        with contextlib.suppress(OSError):
            while self.read() and _becomes_readable(self.sock, 0):
                pass

    def close(self, deadline: float) -> None:
        """End the stream and close it, without discarding what the peer has not read yet.

        Closing a TCP socket with unread bytes, or receiving bytes after that, resets the connection and discards
        what the kernel has not delivered. So read until the peer closes or has everything, or until `deadline`.
        """
        with contextlib.suppress(OSError, RemoteProtocolError):
            self.sock.shutdown(socket.SHUT_WR)
            while self._discard() and time.monotonic() < deadline and self.undelivered_bytes():
                _becomes_readable(self.sock, _LINGER_MS)
        self.is_ended = True
        self.sock.close()

    def _discard(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            while self.sock.recv(1 << 16):
                pass
            return False
        return True


def _becomes_readable(sock: socket.socket | SealedSocket | RingSocket, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(milliseconds))
