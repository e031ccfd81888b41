"""AES-GCM records on one stream socket: what sealed lanes and sealed sockets are made of."""

from __future__ import annotations

import socket
from time import monotonic
from typing import TYPE_CHECKING, Final

from covey.net.host.descriptors import track
from covey.net.lanes.lane import SMALL_BYTES
from covey.net.lanes.lasting import LastingSocket
from covey.net.lanes.stream import close_without_reset, connection_of
from covey.wire.header import HEADER_BYTES
from covey.wire.seal import (
    ACCEPTOR,
    DIALLER,
    RECORD_LENGTH,
    RECORD_LIMIT,
    RECORD_OVERHEAD_BYTES,
    REKEY_SECONDS,
    Opener,
    Sealer,
    lane_keys,
    record_length,
)

if TYPE_CHECKING:
    from covey.wire.seal import Bytes

FIRST_BYTES: Final = HEADER_BYTES + SMALL_BYTES
"""The most plaintext in the first record of a transfer."""
_AHEAD_BYTES: Final = 4096
"""How much is read past the end of a full record: enough for small ones that follow, little enough to copy."""
_OUT_BYTES: Final = FIRST_BYTES + 64 * RECORD_OVERHEAD_BYTES
_IN_BYTES: Final = RECORD_OVERHEAD_BYTES + _AHEAD_BYTES
"""What a pipe has room for beside a record: to send, and to receive."""


class SealedPipe:
    """One socket, with the records that are being sent and received on it. No method blocks."""

    __slots__ = (
        *("_cipher_in", "_cipher_out", "_head", "_limit", "_opener", "_renew_at", "_sealer", "_start", "_tail"),
        *("sock", "unsent"),
    )

    def __init__(
        self,
        sock: socket.socket | LastingSocket,
        secret: bytes,
        lane: bytes,
        stream: int,
        *,
        dialler: bool,
        limit: int = RECORD_LIMIT,
    ) -> None:
        """`limit` is the most plaintext in one record."""
        self._limit = limit
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock if isinstance(sock, LastingSocket) else track(sock)
        keys = lane_keys(secret, lane, stream)
        mine, theirs = (DIALLER, ACCEPTOR) if dialler else (ACCEPTOR, DIALLER)
        self._sealer = Sealer(keys[mine], lane, stream, mine)
        self._renew_at = monotonic() + REKEY_SECONDS
        self._opener = Opener(keys[theirs], lane, stream, theirs)
        self._cipher_out = memoryview(bytearray(limit + _OUT_BYTES))
        self._start = self.unsent = 0
        """`cipher_out[start:unsent]` is sealed and not sent yet; both are 0 if there is nothing to send."""
        self._cipher_in = memoryview(bytearray(limit + _IN_BYTES))
        self._head = self._tail = 0
        """`cipher_in[head:tail]` has arrived and is not opened yet."""

    @property
    def has_room(self) -> bool:
        """Whether a record of the full length may be sealed now."""
        return self.unsent <= FIRST_BYTES + RECORD_OVERHEAD_BYTES

    @property
    def connection(self) -> socket.socket:
        """What to poll."""
        return connection_of(self.sock)

    @property
    def wants_to_send(self) -> bool:
        """Whether something is sealed that the kernel may take."""
        if isinstance(self.sock, LastingSocket) and (self.sock.is_broken or self.sock.is_full):
            return False
        return self.unsent > 0

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
        length = record_length(self._cipher_in, 0, self._limit)
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
        length = record_length(self._cipher_in, self._head, self._limit)
        return length if length + RECORD_OVERHEAD_BYTES <= available else 0

    def open(self, into: Bytes) -> None:
        """Decrypt the record that is ready to `into`, which has its length; ForgedError if it was altered."""
        end = self._head + len(into) + RECORD_OVERHEAD_BYTES
        self._opener.open(self._cipher_in[self._head : end], into)
        self._head = end

    def close(self) -> None:
        """End the stream and close the socket."""
        close_without_reset(self.sock, self._cipher_in)
