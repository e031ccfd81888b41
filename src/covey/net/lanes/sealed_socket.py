"""A sealed socket: the messages of two ranks between hosts, in AES-GCM records over one TCP stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covey.net.lanes.message_socket import MessageSocket
from covey.net.lanes.sealed_pipe import SealedPipe
from covey.wire.seal import RECORD_LIMIT, ForgedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.wire.seal import Bytes

JOINED_BYTES: Final = 1 << 14
"""Messages shorter than this are copied together into one record: that costs less than a record of their own."""


class SealedSocket(MessageSocket):
    """A connected stream socket that encrypts its bytes.

    Takes ownership of the socket. Altered bytes are reported as a broken connection, like a reset: an
    attacker on the network can cause both.
    """

    def __init__(self, sock: socket.socket, secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """See SealedLane. The secret is not used for any other lane or socket."""
        self._pipe = SealedPipe(sock, secret, lane, 0, dialler=dialler)
        self.family = sock.family
        self.is_silent = getattr(sock, "is_silent", None)
        """Tells whether the other end of a connection by QUIC is silent (`tcp.is_stuck`)."""
        self._claimed = 0
        """How many of the caller's bytes are sealed while the kernel has not taken all of them."""
        self._plain = memoryview(bytearray(RECORD_LIMIT))
        self._start = self._stop = 0
        """`plain[start:stop]` is decrypted and not received by the caller yet."""

    @property
    def pending(self) -> bool:
        """Whether there are bytes to receive, or an error, that polling the descriptor does not report."""
        try:
            return self._start < self._stop or self._pipe.ready() > 0
        except ForgedError:
            return True

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option of the socket."""
        return self._pipe.connection.getsockopt(level, name, size)

    def sendmsg(self, buffers: Sequence[Bytes]) -> int:
        """Send the first bytes of `buffers` and return how many.

        Raises:
            BlockingIOError: the kernel has no room. Part of the bytes may have been sent: pass the same bytes again
                when the descriptor is writable. More bytes may follow them.
        """
        if not self._claimed and len(buffers) > 1:
            self._claimed = self._seal(buffers)
        return self.send(buffers[0])  # which seals nothing while there is something sealed

    def send(self, data: Bytes) -> int:
        """As `sendmsg([data])`."""
        if not self._claimed:
            piece = memoryview(data)[:RECORD_LIMIT]
            if not piece:
                return 0
            self._pipe.seal(piece)
            self._claimed = len(piece)
        if self._pipe.unsent:
            self._pipe.flush()
            if self._pipe.unsent:
                raise BlockingIOError("the kernel has no room")
        claimed, self._claimed = self._claimed, 0
        return claimed

    def _seal(self, buffers: Sequence[Bytes]) -> int:
        """Seal the first bytes of `buffers`, as many as there is room for; return how many."""
        sealed, small = 0, b""
        for buffer in buffers:
            piece = memoryview(buffer)[: RECORD_LIMIT - sealed - len(small)]
            if len(piece) < JOINED_BYTES:
                small += piece
                continue
            for data in (small, piece) if small else (piece,):
                self._pipe.seal(data)
                sealed += len(data)
            small = b""
        if small:
            self._pipe.seal(small)
        return sealed + len(small)

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int, list[Any], int, None]:
        """Write what is buffered to `buffers`, or else what the kernel has; return first how many bytes, 0 at the end.

        Raises:
            BlockingIOError: nothing has arrived.
            ConnectionError: the connection broke, or the bytes were altered.
        """
        while not self.pending:
            if not self._pipe.fill():
                return 0, [], 0, None
        count = 0
        try:
            for buffer in buffers:
                taken = self._take(memoryview(buffer))
                count += taken
                if taken < len(buffer):
                    break
        except ForgedError as error:
            if not count:
                raise ConnectionAbortedError(str(error)) from error
        return count, [], 0, None

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive as `recvmsg_into` does; return the number of bytes."""
        if self._start == self._stop:
            try:
                count = self._pipe.receive_one(memoryview(buffer))
            except ForgedError as error:
                raise ConnectionAbortedError(str(error)) from error
            if count is not None:
                return count
        return self.recvmsg_into([buffer])[0]

    def _take(self, buffer: memoryview) -> int:
        """Fill `buffer` from the records that have arrived whole; return how many bytes were written."""
        at, size = 0, len(buffer)
        while at < size:
            if self._start < self._stop:
                step = min(self._stop - self._start, size - at)
                buffer[at : at + step] = self._plain[self._start : self._start + step]
                self._start += step
            elif 0 < (step := self._pipe.ready()) <= size - at:
                self._pipe.open(buffer[at : at + step])
            elif step:
                self._pipe.open(self._plain[:step])
                self._start, self._stop, step = 0, step, 0
            else:
                break
            at += step
        return at

    def shutdown(self, how: int) -> None:
        """End one or both directions."""
        self._pipe.sock.shutdown(how)

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once closed."""
        return self._pipe.sock.fileno()

    def close(self) -> None:
        """Close at once. Closing twice is fine."""
        self._pipe.sock.close()
