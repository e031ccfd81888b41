"""AES-GCM records on one stream socket, the lane of the executor in Python that is made of them, and the socket of
messages between hosts, with either executor.

A transfer is a record with its header and, if it is small, its payload; a large payload follows in records of
RECORD_LIMIT and the rest. Both ends know these lengths and accept no others.
"""

from __future__ import annotations

import contextlib
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from covey.net.host.descriptors import track
from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.net.lanes.message_sockets import MessageSocket
from covey.net.lanes.stream import PythonLane, close_without_reset, prepare
from covey.wire.header import SMALL_BYTES, TRANSFER_HEADER_BYTES
from covey.wire.seal import (
    ACCEPTOR,
    DIALLER,
    RECORD_LENGTH,
    RECORD_OVERHEAD_BYTES,
    REKEY_SECONDS,
    SEALED_RECORD_LIMIT,
    ForgedError,
    Opener,
    Sealer,
    lane_keys,
    record_length,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.net.lanes.lasting import LastingSocket
    from covey.wire.seal import Bytes

FIRST_BYTES: Final = TRANSFER_HEADER_BYTES + SMALL_BYTES
"""The most plaintext in the first record of a transfer."""
JOINED_BYTES: Final = 1 << 14
"""Messages shorter than this are copied together into one record: that costs less than a record of their own."""
_RECORD_AHEAD_BYTES: Final = 4096
"""How much is read past the end of a full record: enough for small ones that follow, little enough to copy."""
_OUT_BYTES: Final = FIRST_BYTES + 64 * RECORD_OVERHEAD_BYTES
_IN_BYTES: Final = RECORD_OVERHEAD_BYTES + _RECORD_AHEAD_BYTES
"""What a pipe has room for beside a record: to send, and to receive."""


class SealedPipe:
    """One socket, with the records that are being sent and received on it. No method blocks."""

    __slots__ = (
        *("_cipher_in", "_cipher_out", "_head", "_opener", "_renew_at", "_sealer", "_start", "_tail"),
        *("sock", "unsent"),
    )

    def __init__(self, sock: socket.socket | LastingSocket, secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """`sock` is prepared for the stream of a lane (`stream.prepare`)."""
        self.sock = sock
        keys = lane_keys(secret, lane, 0)
        mine, theirs = (DIALLER, ACCEPTOR) if dialler else (ACCEPTOR, DIALLER)
        self._sealer = Sealer(keys[mine], lane, 0, mine)
        self._renew_at = monotonic() + REKEY_SECONDS
        self._opener = Opener(keys[theirs], lane, 0, theirs)
        self._cipher_out = memoryview(bytearray(SEALED_RECORD_LIMIT + _OUT_BYTES))
        self._start = self.unsent = 0
        """`cipher_out[start:unsent]` is sealed and not sent yet; both are 0 if there is nothing to send."""
        self._cipher_in = memoryview(bytearray(SEALED_RECORD_LIMIT + _IN_BYTES))
        self._head = self._tail = 0
        """`cipher_in[head:tail]` has arrived and is not opened yet."""

    @property
    def has_room(self) -> bool:
        """Whether a record of the full length may be sealed now."""
        return self.unsent <= FIRST_BYTES + RECORD_OVERHEAD_BYTES

    def seal(self, data: Bytes) -> None:
        """Seal a record to be sent; there must be room for it. Renew the key first if it is REKEY_SECONDS old."""
        now = monotonic()
        if now >= self._renew_at:
            self._renew_at = now + REKEY_SECONDS
            self._sealer.renew()
        self.unsent += self._sealer.seal(data, self._cipher_out[self.unsent :])

    def flush(self) -> bool:
        """Give the kernel the sealed bytes; return whether it took any."""
        try:
            self._start += self.sock.send(self._cipher_out[self._start : self.unsent])
        except BlockingIOError:
            return False
        if self._start == self.unsent:
            self._start = self.unsent = 0
        return True

    def fill(self) -> bool:
        """Read what has arrived, as far as there is room; return False at the end of the stream.

        Only called while no whole record is buffered.

        Raises:
            BlockingIOError: nothing has arrived.
            ConnectionResetError: the stream ended in the middle of a record.
        """
        head, tail = self._head, self._tail
        if head:
            if head < tail:
                self._cipher_in[: tail - head] = self._cipher_in[head:tail]
            self._head, self._tail = 0, tail - head
        taken = self.sock.recv_into(self._cipher_in[self._tail :])
        self._tail += taken
        if not taken and self._tail:
            raise ConnectionResetError("the stream ended in the middle of a record")
        return bool(taken)

    def receive_one(self, into: memoryview) -> int | None:
        """Read what has arrived, and open it into the start of `into`, if it is one whole record that fits.

        Return its length, 0 at the end of the stream; None if it is anything else, or something was buffered before.
        The errors are those of `fill` and `open`.
        """
        if self._head != self._tail:
            return None
        self._head, self._tail = 0, self.sock.recv_into(self._cipher_in)
        if self._tail < RECORD_OVERHEAD_BYTES:
            return None if self._tail else 0
        length = record_length(self._cipher_in)
        if length > len(into) or length + RECORD_OVERHEAD_BYTES != self._tail:
            return None
        self._opener.open(self._cipher_in[: self._tail], into[:length])
        self._head = self._tail
        return length

    def ready(self) -> int:
        """Return the plaintext length of the next record if all of it is here, else 0; ForgedError if it is invalid."""
        available = self._tail - self._head
        if available < RECORD_LENGTH.size:
            return 0
        length = record_length(self._cipher_in, self._head)
        return length if length + RECORD_OVERHEAD_BYTES <= available else 0

    def open(self, into: Bytes) -> None:
        """Decrypt the record that is ready to `into`, which has its length; ForgedError if it was altered."""
        end = self._head + len(into) + RECORD_OVERHEAD_BYTES
        self._opener.open(self._cipher_in[self._head : end], into)
        self._head = end

    def close(self) -> None:
        """End the stream and close the socket."""
        close_without_reset(self.sock, self._cipher_in)


class SealedLane(PythonLane):
    """A lane over a connected stream socket that an attacker may control. Takes ownership of the socket."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        is_direct: bool | None = None,
        kind: str = "secure",
    ) -> None:
        """Both ends pass the same `secret`, random and used for this lane only, and the same `lane` id.

        `kind` says what carries the stream: TCP (`secure`) or `quic`. The lane is resumable if `is_direct` tells
        whether the connection is direct.
        """
        super().__init__(sock, kind, is_direct=is_direct)
        self._pipe = SealedPipe(self._sock, secret, lane, dialler=dialler)
        self._out: Outgoing | None = None
        self._sealed = 0
        """How many payload bytes of `out` are sealed."""
        self._first = memoryview(bytearray(FIRST_BYTES))

    def _transmit(self, out: Outgoing) -> bool:
        pipe = self._pipe
        if out is not self._out:  # there is room: the kernel has taken the previous transfer
            is_small = out.nbytes <= SMALL_BYTES
            pipe.seal(out.header + out.data.tobytes() if is_small else out.header)
            self._out, self._sealed = out, out.nbytes if is_small else 0
        if self._sealed < out.nbytes and pipe.has_room:
            stop = min(self._sealed + SEALED_RECORD_LIMIT, out.nbytes)
            pipe.seal(out.data[self._sealed : stop])
            self._sealed = stop
        moved = pipe.flush()
        if not pipe.unsent:
            out.sent = self._sealed
            if out.sent == out.nbytes:
                self._out = None  # the caller may reuse the memory
        return moved

    def _receive(self, incoming: Incoming) -> bool:
        pipe = self._pipe
        try:
            length = pipe.ready()
            if not length:
                if not pipe.fill():
                    raise LaneClosedError("end of stream")
                length = pipe.ready()
            while length:
                if incoming.got < 0:
                    self._open_first(incoming, length)
                else:
                    stop = min(incoming.got + SEALED_RECORD_LIMIT, incoming.nbytes)
                    _expect(length, stop - incoming.got)
                    pipe.open(incoming.dest[incoming.got : stop])
                    incoming.got = stop
                length = pipe.ready() if incoming.got < incoming.nbytes else 0
        except ForgedError as error:
            raise LaneClosedError(str(error)) from error
        return True

    def _open_first(self, incoming: Incoming, length: int) -> None:
        if not TRANSFER_HEADER_BYTES <= length <= FIRST_BYTES:
            raise ForgedError(f"the bytes were altered on the way: no transfer starts with a record of {length} bytes")
        self._pipe.open(self._first[:length])
        if self._first[:TRANSFER_HEADER_BYTES] != incoming.expected:
            incoming.wrong_header(incoming.peer, incoming.expected, self._first[:TRANSFER_HEADER_BYTES].tobytes())
        payload = incoming.nbytes if incoming.nbytes <= SMALL_BYTES else 0
        _expect(length - TRANSFER_HEADER_BYTES, payload)
        incoming.dest[:payload] = self._first[TRANSFER_HEADER_BYTES:length]
        incoming.got = payload

    def _has_arrived(self) -> bool:
        with contextlib.suppress(ForgedError):  # `receive` raises it
            return self._lasting.has_spill or self._pipe.ready() > 0
        return True

    def peek(self) -> bytes:
        with self._lock, contextlib.suppress(OSError, ForgedError, LaneClosedError):
            with contextlib.suppress(BlockingIOError):
                while not self._pipe.ready() and self._pipe.fill():
                    pass
            length = self._pipe.ready()
            if TRANSFER_HEADER_BYTES <= length <= FIRST_BYTES:
                self._pipe.open(self._first[:length])
                return self._first[:TRANSFER_HEADER_BYTES].tobytes()
        return b""


def _expect(length: int, expected: int) -> None:
    if length != expected:
        raise ForgedError(f"the bytes were altered on the way: {length} bytes of payload instead of {expected}")


class SealedSocket(MessageSocket):
    """A connected stream socket that encrypts its bytes.

    Takes ownership of the socket. Altered bytes are reported as a broken connection, like a reset: an
    attacker on the network can cause both.
    """

    def __init__(self, sock: socket.socket, secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """See SealedLane. The secret is not used for any other lane or socket."""
        prepare(sock)
        self._sock = track(sock)
        self._pipe = SealedPipe(sock, secret, lane, dialler=dialler)
        self.family = sock.family
        self.is_silent = getattr(sock, "is_silent", None)
        """Tells whether the other end of a connection by QUIC is silent (`tcp.is_stuck`)."""
        self._claimed = 0
        """How many of the caller's bytes are sealed while the kernel has not taken all of them."""
        self._plain = memoryview(bytearray(SEALED_RECORD_LIMIT))
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
        return self._sock.getsockopt(level, name, size)

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
            piece = memoryview(data)[:SEALED_RECORD_LIMIT]
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
            piece = memoryview(buffer)[: SEALED_RECORD_LIMIT - sealed - len(small)]
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
