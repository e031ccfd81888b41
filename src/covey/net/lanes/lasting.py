"""A stream of bytes that outlives its connections: if one breaks, it goes on over another, at the next byte.

Between machines, the path of a lane may die while both ends are well: a cable, a relay, IPv4. What a stream carries is
a row of bytes, and each byte has a position in it, whatever connections have carried it. Both ends count what they have
received. When a connection breaks, or gets nothing through, one end opens another (`runtime.lanes.resumption`); each
end says how many bytes it has, and the other one goes on from there.

Invariants, for each direction of each stream:

1. What is sent is kept until the other end has it, and sent again as it was: of a sealed lane, as ciphertext. No record
   is sealed twice, so no nonce is used for two texts.
2. On a direct connection, the other end has what its kernel has acknowledged: it can read that, whatever happens to the
   path. A relay acknowledges for itself, and so does the socket in front of QUIC; there, the other end has what it has
   told itself (`acknowledge`).
3. An end that leaves a connection first counts no further acknowledgements of it (`freeze`). An end says how many bytes
   it has only when the other one has done so, and after it has read all that its kernel has (`drain`). So it has what
   the other end does not keep any more.

While a stream has no connection, its user sees a socket on which nothing moves. The wait is ended by the control loop
(`end`), or by the end of the group. A direct connection that the other end has closed in order ends the lane as usual.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import select
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING, Final

from covey.net.host.descriptors import track
from covey.net.lanes.lane import LaneClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Bytes = bytes | memoryview

SPILL_LIMIT: Final = 1 << 26
"""Bytes that a connection may still hold for this end when it is left."""
UNACKNOWLEDGED_BYTES: Final = 1 << 26
"""Bytes of a stream that may be kept. Then it waits until something is acknowledged."""
TRIM_BYTES: Final = 1 << 20
"""What is kept before the kernel is asked how much of it the other end has."""
LEFT_SECONDS: Final = 1.0
"""How long a connection that was replaced stays open at least."""
_READ_BYTES: Final = 1 << 18


class LeftConnections:
    """Connections that were replaced, and that a thread may be about to poll.

    Their descriptors stay taken for a moment: the thread would poll another file of the same number, and sleep.
    """

    def __init__(self) -> None:
        self._left: list[tuple[float, socket.socket]] = []

    def add(self, sock: socket.socket) -> None:
        """End a connection, which wakes a thread that polls it, and close those that were left before."""
        with contextlib.suppress(OSError):  # it has broken
            sock.shutdown(socket.SHUT_RDWR)
        now = time.monotonic()
        while self._left and now > self._left[0][0] + LEFT_SECONDS:
            self._left.pop(0)[1].close()
        self._left.append((now, sock))

    def close(self) -> None:
        """Close all."""
        while self._left:
            self._left.pop()[1].close()


class LastingSocket:
    """A non-blocking stream socket whose connection may be replaced. Its owner lets one thread at a time use it."""

    def __init__(self, sock: socket.socket, *, is_direct: bool) -> None:
        """`is_direct` tells that what the kernel counts as acknowledged is what the other machine has."""
        self.connection = track(sock)
        self.is_direct, self.is_broken, self._is_frozen, self._is_drained = is_direct, False, False, False
        self.over = ""
        """Why no other connection comes; empty while one may."""
        self.received = self._sent = self._acked = 0
        """Positions."""
        self._sent_most = 0
        """The highest that `sent` ever was: the other end cannot have more."""
        self._kept: collections.deque[bytes] = collections.deque()
        """What was sent, from `kept_from` to `kept_to`."""
        self._kept_from = self._kept_to = 0
        self._spill = b""
        """What a connection had that was left, and is not read yet."""

    # As a socket

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self.connection.fileno()

    def shutdown(self, how: int) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):  # it has broken
            self.connection.shutdown(how)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def send(self, data: Bytes) -> int:
        """Send some of `data`, and keep it; errors as those of `sendmsg`."""
        return self.sendmsg((data,))

    def sendmsg(self, parts: Sequence[Bytes]) -> int:
        """Send some of several pieces, and keep it.

        Raises:
            BlockingIOError: nothing can be sent now.
            LaneClosedError: no other connection comes.
        """
        self.flush()
        taken = 0 if self.is_broken or self.has_unsent or self.is_full else self._give(parts)
        if not taken:
            raise BlockingIOError
        self._kept.append(b"".join(parts)[:taken] if len(parts) > 1 else bytes(memoryview(parts[0])[:taken]))
        self._kept_to += taken
        if self._kept_to - self._kept_from > TRIM_BYTES:
            self.look()
        return taken

    def _give(self, parts: Sequence[Bytes]) -> int:
        """Let the kernel take what it can; return how much."""
        try:
            taken = self.connection.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:
            self.is_broken = True
            return 0
        self._sent += taken
        self._sent_most = max(self._sent_most, self._sent)
        return taken

    def flush(self) -> None:
        """Send again what another connection has lost, as far as that is possible; LaneClosedError as `sendmsg`."""
        if self.over:
            raise LaneClosedError(self.over)
        at = self._kept_from
        for piece in list(self._kept):
            start, at = self._sent - at, at + len(piece)
            if start < len(piece) and (self.is_broken or self._give((memoryview(piece)[start:],)) < len(piece) - start):
                return

    @property
    def is_full(self) -> bool:
        """Whether as much is kept as may be."""
        if self._kept_to - self._kept_from >= UNACKNOWLEDGED_BYTES:
            self.look()
        return self._kept_to - self._kept_from >= UNACKNOWLEDGED_BYTES

    @property
    def has_unsent(self) -> bool:
        """Whether something is to be sent again."""
        return self._sent < self._kept_to

    @property
    def has_spill(self) -> bool:
        """Whether something is to be read that no descriptor tells of."""
        return bool(self._spill)

    def recv_into(self, into: memoryview | bytearray) -> int:
        """Read some of the stream; 0 at its end.

        Raises:
            BlockingIOError: nothing has arrived, or there is no connection.
            LaneClosedError: no other connection comes.
        """
        if self._spill:
            taken = min(len(into), len(self._spill))
            into[:taken], self._spill = self._spill[:taken], self._spill[taken:]
            return taken
        if not self.is_broken:
            try:
                taken = self.connection.recv_into(into)
            except BlockingIOError:
                raise
            except OSError:
                taken = 0
                self.is_broken = self._is_drained = True
            else:
                self.is_broken = self._is_drained = not taken and not self.is_direct
            if not self.is_broken:
                self.received += taken
                return taken
        if self.over:
            raise LaneClosedError(self.over)
        raise BlockingIOError

    def peek(self, count: int) -> bytes:
        """Return up to `count` of the next bytes without taking them."""
        found = self._spill[:count]
        if len(found) < count and not self.is_broken:
            with contextlib.suppress(OSError):
                found += self.connection.recv(count - len(found), socket.MSG_PEEK)
        return found

    # What the control loop does with it

    def look(self) -> None:
        """Learn what the other end's kernel has, or that the connection has broken; forget what is acknowledged."""
        if not self.is_broken:
            with contextlib.suppress(OSError, ValueError):
                (unacked,) = struct.unpack("i", fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, bytes(4)))
                poll = select.poll()
                poll.register(self.connection, 0)
                if poll.poll(0):  # it tells nothing to rely on
                    self.is_broken = True
                elif self.is_direct and not self._is_frozen:
                    self._acked = max(self._acked, self._sent - unacked)
        while self._kept and self._kept_from + len(self._kept[0]) <= self._acked:
            self._kept_from += len(self._kept.popleft())

    def freeze(self) -> None:
        """Use the connection no more, and count none of its acknowledgements."""
        self.is_broken = self._is_frozen = True

    def drain(self) -> int:
        """Take what a connection that is frozen still has; return how many bytes the stream has brought.

        Raises:
            MemoryError: that is too much.
        """
        pieces = [self._spill]
        while not self._is_drained:
            try:
                pieces.append(self.connection.recv(_READ_BYTES))
                self._is_drained = not pieces[-1]
                self.received += len(pieces[-1])
            except OSError:  # nothing more has arrived, or it has broken
                self._is_drained = True
            if sum(map(len, pieces)) > SPILL_LIMIT:
                raise MemoryError
        self._spill = b"".join(pieces)
        return self.received

    def attach(self, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on from this position, on another connection; return False if what follows it is not kept."""
        if not self._kept_from <= position <= self._sent_most:
            return False
        self.connection = track(sock)
        self._sent = self._acked = position
        self.is_direct, self.is_broken, self._is_frozen, self._is_drained = is_direct, False, False, False
        return True

    def acknowledge(self, position: int) -> bool:
        """Note that the other end has all before this position; return False if it cannot have."""
        if not 0 <= position <= self._sent_most:
            return False
        self._acked = max(self._acked, position)
        self.look()
        return True

    def end(self, why: str) -> None:
        """Let the stream end, instead of waiting for another connection; wake a thread that polls it."""
        self.over = self.over or why
        self.shutdown(socket.SHUT_RDWR)
