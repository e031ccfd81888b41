"""Sealed lanes that survive their connections: if one breaks, its stream goes on over another, at the next byte.

Between machines, the path of a lane may die while both ends are well: a cable, a relay, IPv4. What a stream carries is
a row of bytes, the sealed records, and each byte has a position in it, whatever connections have carried it. Both ends
count what they have received. When a connection breaks, or gets nothing through, one end opens another
(`runtime.lanes.resumption`); each end says how many bytes it has, and the other one goes on from there.

Invariants, for each direction of each stream:

1. What is sealed is kept, as ciphertext, until the other end has it. It is sent again as it was: no record is sealed
   twice, so no nonce is used for two texts.
2. On a direct connection, the other end has what its kernel has acknowledged: it can read that, whatever happens to the
   path. A relay acknowledges for itself; there, the other end has what it has told itself (`acknowledge`).
3. An end that leaves a connection first counts no further acknowledgements of it (`freeze`). An end says how many bytes
   it has only when the other one has done so, and after it has read all that its kernel has (`leave`). So it has what
   the other end does not keep any more.

While a stream has no connection, the executor sees a lane on which nothing moves. The wait is ended by the control loop
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
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.net.host.descriptors import track
from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.net.lanes.sealed import SealedLane
from covey.net.lanes.sealed_pipe import SealedPipe
from covey.net.lanes.stream import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.wire.seal import Bytes

SPILL_LIMIT: Final = 1 << 26
"""Bytes that a connection may still hold for this end when it is left."""
KEPT_LIMIT: Final = 1 << 26
"""Bytes of a stream that may be kept. Then it waits until something is acknowledged."""
SLEEP_SECONDS: Final = 0.005
"""Between looks whether a stream goes on, which no descriptor tells."""
_READ_BYTES: Final = 1 << 18


class _LastingPipe(SealedPipe):
    """A stream that may go on over another connection."""

    __slots__ = (
        *("_kept", "_kept_from", "_spill", "acked", "is_broken", "is_direct", "is_drained", "is_frozen"),
        *("over", "received", "sealed", "sent", "sent_most"),
    )

    def __init__(self, *args: Any, is_direct: bool, **options: Any) -> None:
        """See SealedPipe."""
        super().__init__(*args, **options)
        self.is_direct, self.is_broken, self.is_frozen, self.is_drained = is_direct, False, False, False
        self.over = ""
        """Why no other connection comes; empty while one may."""
        self.received = self.sealed = self.sent = self.sent_most = self.acked = 0
        """Positions. The last but one is the highest that `sent` ever was."""
        self._kept: collections.deque[bytes] = collections.deque()
        """What is sealed, from `kept_from` on."""
        self._kept_from = 0
        self._spill = b""

    def seal(self, data: Bytes) -> None:
        self.unsent = 0  # everything is taken out of the buffer at once
        super().seal(data)
        self._kept.append(bytes(self._cipher_out[: self.unsent]))
        self.sealed += self.unsent
        self.unsent = self.sealed - self.sent

    @property
    def wants_to_send(self) -> bool:
        return self.unsent > 0 and not self.is_broken

    @property
    def has_room(self) -> bool:
        if self.sealed - self._kept_from > KEPT_LIMIT:
            self._trim()
        return super().has_room and self.sealed - self._kept_from <= KEPT_LIMIT

    def flush(self) -> bool:
        if self.over:
            raise LaneClosedError(self.over)
        if self.is_broken:
            return False
        moved, left, unsent = False, self.unsent, list[memoryview]()
        for piece in reversed(self._kept):  # what is unsent is at the end, and little
            if left <= 0:
                break
            unsent.append(memoryview(piece)[-left:] if left < len(piece) else memoryview(piece))
            left -= len(piece)
        for part in reversed(unsent):
            try:
                taken = self.sock.send(part)
            except BlockingIOError:
                break
            except OSError:
                self.is_broken = True
                break
            moved = moved or taken > 0
            self.sent += taken
            if taken < len(part):
                break
        self.sent_most = max(self.sent_most, self.sent)
        self.unsent = self.sealed - self.sent
        if moved and len(self._kept) > 1:
            self._trim()
        return moved

    def _trim(self) -> None:
        """Forget what is acknowledged."""
        if self.is_direct and not self.is_frozen:
            with contextlib.suppress(OSError, ValueError):
                (unacked,) = struct.unpack("i", fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4)))
                poll = select.poll()
                poll.register(self.sock, 0)
                if not poll.poll(0):  # else it has broken, and tells nothing to rely on
                    self.acked = max(self.acked, self.sent - unacked)
        while self._kept and self._kept_from + len(self._kept[0]) <= self.acked:
            self._kept_from += len(self._kept.popleft())

    def fill(self) -> bool:
        head, tail = self._head, self._tail
        if head:
            if head < tail:
                self._cipher_in[: tail - head] = self._cipher_in[head:tail]
            self._head, self._tail = 0, tail - head
        into = self._cipher_in[self._tail :]
        if self._spill:
            taken = min(len(into), len(self._spill))
            into[:taken] = self._spill[:taken]
            self._spill = self._spill[taken:]
            self._tail += taken
            return True
        if self.is_broken:
            if self.over:
                raise LaneClosedError(self.over)
            raise BlockingIOError
        try:
            taken = self.sock.recv_into(into)
        except BlockingIOError:
            raise
        except OSError as error:
            self._break(str(error))
        if not taken and not self.is_direct:
            self._break("end of stream")
        if not taken and self._tail:
            raise ConnectionResetError("the stream ended in the middle of a record")
        self._tail += taken
        self.received += taken
        return bool(taken)

    def _break(self, why: str) -> None:
        self.is_broken = self.is_drained = True
        if self.over:
            raise LaneClosedError(why)
        raise BlockingIOError

    @property
    def has_spill(self) -> bool:
        """Whether something is to be read that no descriptor tells of."""
        return bool(self._spill)

    def freeze(self) -> None:
        """Use the connection no more, and count none of its acknowledgements."""
        self.is_broken = self.is_frozen = True

    def drain(self) -> int:
        """Take what a connection that is frozen still has; return how many bytes the stream has brought."""
        pieces = [self._spill]
        while not self.is_drained:
            try:
                pieces.append(self.sock.recv(_READ_BYTES))
                self.is_drained = not pieces[-1]
                self.received += len(pieces[-1])
            except OSError:  # nothing more has arrived, or it has broken
                self.is_drained = True
            if sum(map(len, pieces)) > SPILL_LIMIT:
                raise MemoryError
        self._spill = b"".join(pieces)
        return self.received

    def attach(self, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on from this position, on another connection; return False if what follows it is not kept."""
        if not self._kept_from <= position <= self.sent_most:
            return False
        self.sock = track(sock)
        self.sent = self.acked = position
        self.unsent = self.sealed - position
        self.is_direct, self.is_broken, self.is_frozen, self.is_drained = is_direct, False, False, False
        return True

    def acknowledge(self, position: int) -> bool:
        """Note that the other end has all before this position; return False if it cannot have."""
        if not 0 <= position <= self.sent_most:
            return False
        self.acked = max(self.acked, position)
        self._trim()
        return True


class ResumableLane(SealedLane):
    """A sealed lane whose streams go on over other connections.

    The executor's thread and the control loop take turns under the lock.
    """

    _pipes: list[_LastingPipe]  # type: ignore[assignment]

    def __init__(
        self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool, directs: Sequence[bool]
    ) -> None:
        """See SealedLane; `directs` tells of each connection whether it goes through no relay."""
        self._directs = directs
        super().__init__(socks, secret, lane, dialler=dialler)
        self._lock = threading.Lock()
        self._is_closed = False

    def _make_pipe(
        self, sock: socket.socket, secret: bytes, lane: bytes, stream: int, *, dialler: bool
    ) -> _LastingPipe:
        is_direct = self._directs[stream]
        return _LastingPipe(sock, secret, lane, stream, dialler=dialler, limit=self._limit, is_direct=is_direct)

    def transmit(self, out: Outgoing) -> bool:
        with self._lock:
            moved = super().transmit(out)
            return moved or out.sent == out.nbytes  # also if the control loop has sent the rest

    def receive(self, incoming: Incoming) -> bool:
        with self._lock:
            return super().receive(incoming)

    def park(self, *, sending: bool, receiving: bool) -> int:
        with self._lock:
            pipe = self._pipes[self._in_turn]
            if receiving and pipe.has_spill:
                return 0
            waits = receiving and pipe.is_broken
            waits = waits or (sending and not any(each.wants_to_send for each in self._pipes))
            events = 0 if waits else super().park(sending=sending, receiving=receiving)
        if waits:
            time.sleep(SLEEP_SECONDS)
        return events

    def peek(self) -> bytes:
        with self._lock, contextlib.suppress(LaneClosedError):
            return super().peek()
        return b""

    # What the control loop does with streams

    @property
    def is_closed(self) -> bool:
        """Whether the lane was closed."""
        return self._is_closed

    def broken(self) -> list[int]:
        """Return the streams that wait for a connection."""
        return [stream for stream, pipe in enumerate(self._pipes) if pipe.is_broken]

    def freeze(self, stream: int) -> None:
        """Use the connection of a stream no more, and count none of its acknowledgements."""
        with self._lock:
            self._pipes[stream].freeze()

    def leave(self, stream: int) -> int:
        """Take what the connection of a frozen stream still has; return how many bytes the stream has brought.

        Raises:
            MemoryError: that is too much.
        """
        with self._lock:
            pipe = self._pipes[stream]
            if self._is_closed:
                return pipe.received
            return pipe.drain()

    def attach(self, stream: int, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on with a frozen stream from this position, on a connection that the lane owns from now on.

        Returns False, and takes nothing, if the lane was closed, or if what the other end expects is not kept.
        """
        prepare(sock)
        with self._lock:
            before = self._pipes[stream].sock
            if self._is_closed or not self._pipes[stream].attach(sock, position, is_direct=is_direct):
                return False
            if self._readiness is not None:  # it can send, which wakes a thread that polls several connections
                self._readiness.ask([], [sock])
        _end(before)
        before.close()
        return True

    def push(self) -> bool:
        """Send what is sealed and can be sent; return whether there is more of it."""
        with self._lock, contextlib.suppress(LaneClosedError):
            for pipe in self._pipes:
                if pipe.unsent and not self._is_closed:
                    pipe.flush()
            return not self._is_closed and any(pipe.wants_to_send for pipe in self._pipes)
        return False

    def acknowledge(self, stream: int, position: int) -> bool:
        """Note that the other end has all bytes of a stream before this position; return False if it cannot have."""
        with self._lock:
            return self._pipes[stream].acknowledge(position)

    def received(self, stream: int) -> int:
        """Return how many bytes a stream has brought, on all connections."""
        return self._pipes[stream].received

    def end(self, why: str) -> None:
        """Let the lane end, instead of waiting for another connection."""
        with self._lock:
            for pipe in self._pipes:
                pipe.over = pipe.over or why
                _end(pipe.sock)

    def shutdown(self, how: int) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has broken
                pipe.sock.shutdown(how)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            super().close()


def _end(sock: socket.socket) -> None:
    """End a connection, which wakes a thread that polls it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
