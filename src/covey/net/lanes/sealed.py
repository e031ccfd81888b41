"""Sealed lanes: tensors and messages between hosts, in AES-GCM records over one or several TCP streams.

The records of a direction take turns on the streams: record k travels on stream k modulo their number. A transfer is a
record with its header and, if it is small, its payload; a large payload follows in records of RECORD_LIMIT and the
rest. Both ends know these lengths, so nothing else is accepted.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.net.descriptors import track
from covey.net.lanes.lane import PIECE_BYTES, SMALL_BYTES, Incoming, LaneClosedError, Outgoing
from covey.net.lanes.stream import SocketLane
from covey.wire.header import HEADER_BYTES
from covey.wire.seal import (
    ACCEPTOR,
    DIALLER,
    LENGTH,
    OVERHEAD_BYTES,
    RECORD_LIMIT,
    REKEY_SECONDS,
    ForgedError,
    Opener,
    Sealer,
    lane_keys,
    record_length,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.wire.seal import Bytes

FIRST_BYTES: Final = HEADER_BYTES + SMALL_BYTES
"""The most plaintext in the first record of a transfer."""
JOINED_BYTES: Final = 1 << 14
"""Messages shorter than this are copied together into one record: that costs less than a record of their own."""
_AHEAD_BYTES: Final = 4096
"""How much is read past the end of a full record: enough for small ones that follow, little enough to copy."""
_NOTHING: Final = memoryview(b"")
_OUT_BYTES: Final = RECORD_LIMIT + FIRST_BYTES + 64 * OVERHEAD_BYTES
_IN_BYTES: Final = RECORD_LIMIT + OVERHEAD_BYTES + _AHEAD_BYTES


class _Pipe:
    """One socket with the records on their way out of it and into it. Nothing here blocks."""

    __slots__ = (
        *("_cipher_in", "_cipher_out", "_head", "_opener", "_renew_at", "_sealer", "_start", "_tail"),
        *("sock", "unsent"),
    )

    def __init__(self, sock: socket.socket, secret: bytes, lane: bytes, stream: int, *, dialler: bool) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = track(sock)
        keys = lane_keys(secret, lane, stream)
        mine, theirs = (DIALLER, ACCEPTOR) if dialler else (ACCEPTOR, DIALLER)
        self._sealer = Sealer(keys[mine], lane, stream, mine)
        self._renew_at = monotonic() + REKEY_SECONDS
        self._opener = Opener(keys[theirs], lane, stream, theirs)
        self._cipher_out = memoryview(bytearray(_OUT_BYTES))
        self._start = self.unsent = 0
        """`cipher_out[start:unsent]` is sealed and still to be sent; both are 0 when there is nothing."""
        self._cipher_in = memoryview(bytearray(_IN_BYTES))
        self._head = self._tail = 0
        """`cipher_in[head:tail]` has arrived and is still sealed."""

    @property
    def has_room(self) -> bool:
        """Whether a record of RECORD_LIMIT may be sealed now."""
        return self.unsent <= FIRST_BYTES + OVERHEAD_BYTES

    def seal(self, data: Bytes) -> None:
        """Put a record in line; there is room for it. A key that has been in use for long enough ends before it."""
        now = monotonic()
        if now >= self._renew_at:
            self._renew_at = now + REKEY_SECONDS
            self._sealer.renew()
        self.unsent += self._sealer.seal(data, self._cipher_out[self.unsent :])

    def flush(self) -> bool:
        """Give the kernel what is in line; tell whether it took anything."""
        try:
            self._start += self.sock.send(self._cipher_out[self._start : self.unsent])
        except BlockingIOError:
            return False
        if self._start == self.unsent:
            self._start = self.unsent = 0
        return True

    def fill(self) -> bool:
        """Take what the kernel has and there is room for, once no whole record is here; False at the end of the stream.

        Raises:
            BlockingIOError: there is nothing now.
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

    def ready(self) -> int:
        """Return how much plaintext the next record has if all of it is here, else 0; ForgedError if that is absurd."""
        available = self._tail - self._head
        if available < LENGTH.size:
            return 0
        length = record_length(self._cipher_in, self._head)
        return length if length + OVERHEAD_BYTES <= available else 0

    def open(self, into: Bytes) -> None:
        """Decrypt the record that is ready to `into`, which has its length; ForgedError if it is not as it was sent."""
        end = self._head + len(into) + OVERHEAD_BYTES
        self._opener.open(self._cipher_in[self._head : end], into)
        self._head = end

    def close(self) -> None:
        # Unread bytes would turn the close into a reset that can overtake what we sent.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv_into(self._cipher_in):
                pass
        self.sock.close()


class SealedLane(SocketLane):
    """A lane over connected stream sockets, each of which may lie in the hands of a stranger. Takes ownership."""

    kind = "secure"

    def __init__(self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """Both ends give the same `secret`, random and used for this lane only, and the same `lane` id.

        Raises:
            ConfigError: there are no sockets, or more than one where this system cannot wait for several.
        """
        if not socks:
            raise ConfigError("a lane needs at least one stream")
        self._readiness = _Readiness() if len(socks) > 1 else None
        self._pipes = [_Pipe(sock, secret, lane, stream, dialler=dialler) for stream, sock in enumerate(socks)]
        self._out: Outgoing | None = None
        self._payload = _NOTHING
        self._sealed = 0
        """Payload bytes of `out` that are sealed."""
        self._out_turn = self._in_turn = 0
        """The streams of the next record out and in."""
        self._scratch = np.empty(HEADER_BYTES + RECORD_LIMIT, np.uint8)
        self._plain = memoryview(self._scratch)
        self._typed: np.ndarray[Any, np.dtype[Any]] = self._scratch[HEADER_BYTES:]
        """The scratch payload, seen as elements of the dtype that was reduced last."""

    def sockets(self) -> Sequence[socket.socket]:
        return [pipe.sock for pipe in self._pipes]

    def transmit(self, out: Outgoing) -> bool:
        pipes = self._pipes
        turn = self._out_turn
        if out is not self._out:
            self._begin(out)
        moved, unsent = False, 0
        try:
            for _ in pipes:
                pipe = pipes[turn]
                if self._sealed < out.nbytes and turn == self._out_turn and pipe.has_room:
                    pipe.seal(self._payload[self._sealed : self._sealed + RECORD_LIMIT])
                    self._sealed = min(self._sealed + RECORD_LIMIT, out.nbytes)
                    self._out_turn = (turn + 1) % len(pipes)
                if pipe.unsent:
                    moved = pipe.flush() or moved
                    unsent += pipe.unsent
                turn = (turn + 1) % len(pipes)
        except OSError as error:  # reset, timed out, unreachable: nothing more will come
            raise LaneClosedError(str(error)) from error
        if not unsent:
            out.sent = self._sealed
            if out.sent == out.nbytes:
                self._out, self._payload = None, _NOTHING  # the caller's memory is the caller's again
        return moved

    def _begin(self, out: Outgoing) -> None:
        """Seal the first record of a transfer. There is room: the transfer before it is with the kernel."""
        is_small = out.nbytes <= SMALL_BYTES
        self._pipes[self._out_turn].seal(out.header + out.data.tobytes() if is_small else out.header)
        if is_small:
            self._sealed = out.nbytes
        else:
            self._payload, self._sealed = memoryview(out.data), 0
        self._out = out
        self._out_turn = (self._out_turn + 1) % len(self._pipes)

    def receive(self, incoming: Incoming) -> bool:
        try:
            pipe = self._pipes[self._in_turn]
            length = pipe.ready()
            if not length:
                if not pipe.fill():
                    raise LaneClosedError("end of stream")
                length = pipe.ready()
            while length:
                if incoming.got < 0:
                    self._open_first(incoming, pipe, length)
                else:
                    self._open_next(incoming, pipe, length)
                self._in_turn = (self._in_turn + 1) % len(self._pipes)
                if incoming.got == incoming.nbytes:
                    break
                pipe = self._pipes[self._in_turn]
                length = pipe.ready()
        except BlockingIOError:
            return False
        except (OSError, ForgedError) as error:
            raise LaneClosedError(str(error)) from error
        return True

    def _open_first(self, incoming: Incoming, pipe: _Pipe, length: int) -> None:
        if not HEADER_BYTES <= length <= FIRST_BYTES:
            raise ForgedError(f"the bytes were altered on the way: no transfer starts with a record of {length} bytes")
        pipe.open(self._plain[:length])
        header = self._plain[:HEADER_BYTES].tobytes()
        if header != incoming.expected:
            incoming.wrong_header(incoming.peer, incoming.expected, header)
        nbytes = incoming.nbytes
        incoming.got = 0
        _expect(length - HEADER_BYTES, nbytes if nbytes <= SMALL_BYTES else 0)
        if 0 < nbytes <= SMALL_BYTES:
            if incoming.dest is not None:
                incoming.dest[:] = self._plain[HEADER_BYTES:length]
                incoming.got = nbytes
            else:
                self._absorb(incoming, nbytes)

    def _open_next(self, incoming: Incoming, pipe: _Pipe, length: int) -> None:
        got = incoming.got
        _expect(length, min(RECORD_LIMIT, incoming.nbytes - got))
        if incoming.dest is not None:
            pipe.open(incoming.dest[got : got + length])
            incoming.got = got + length
        else:  # what was reduced cannot be taken back, so it is verified before
            pipe.open(self._plain[HEADER_BYTES : HEADER_BYTES + length])
            self._absorb(incoming, length)

    def _absorb(self, incoming: Incoming, length: int) -> None:
        if self._typed.dtype is not incoming.dtype:
            self._typed = self._scratch[HEADER_BYTES:].view(incoming.dtype)
        size = self._typed.itemsize
        for start in range(0, length, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, length)
            incoming.absorb(incoming.got, self._typed[start // size : stop // size])
            incoming.got += stop - start

    def fileno(self) -> int:
        return self._pipes[0].sock.fileno() if self._readiness is None else self._readiness.fileno()

    def park(self, *, sending: bool, receiving: bool) -> int:
        with contextlib.suppress(ForgedError):  # `receive` tells
            if receiving and self._pipes[self._in_turn].ready():
                return 0
        if self._readiness is None:
            return (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)
        readers = [self._pipes[self._in_turn].sock] if receiving else []
        writers = [pipe.sock for pipe in self._pipes if pipe.unsent] if sending else []
        if sending and not writers:
            return 0
        self._readiness.ask(readers, writers)
        return select.POLLIN

    def peek(self) -> bytes:
        pipe = self._pipes[self._in_turn]
        try:
            with contextlib.suppress(BlockingIOError):
                while not pipe.ready() and pipe.fill():
                    pass
            length = pipe.ready()
            if not HEADER_BYTES <= length <= FIRST_BYTES:
                return b""
            pipe.open(self._plain[:length])
        except (OSError, ForgedError):
            return b""
        return self._plain[:HEADER_BYTES].tobytes()

    def shutdown(self, how: int) -> None:
        for pipe in self._pipes:
            pipe.sock.shutdown(how)

    def close(self) -> None:
        if self._readiness is not None:
            self._readiness.close()
        for pipe in self._pipes:
            pipe.close()


def _expect(length: int, expected: int) -> None:
    if length != expected:
        raise ForgedError(f"the bytes were altered on the way: {length} bytes of payload where {expected} belong")


class SealedSocket:
    """A connected stream socket whose bytes travel sealed: the part of `socket.socket` that a message lane uses.

    Never blocks. Takes ownership of the socket. Bytes that were altered on the way are a broken connection, like a
    reset: the same stranger can cause both.
    """

    def __init__(self, sock: socket.socket, secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """As for SealedLane, which has its own secret."""
        self._pipe = _Pipe(sock, secret, lane, 0, dialler=dialler)
        self.family = sock.family
        self._claimed = 0
        """Bytes that are sealed, of which the kernel has not taken the last ones."""
        self._plain = memoryview(bytearray(RECORD_LIMIT))
        self._start = self._stop = 0
        """`plain[start:stop]` is opened and still to be taken."""

    @property
    def pending(self) -> bool:
        """Whether there are bytes to receive, or an error, of which polling the descriptor does not tell."""
        try:
            return self._start < self._stop or self._pipe.ready() > 0
        except ForgedError:
            return True

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option of the socket."""
        return self._pipe.sock.getsockopt(level, name, size)

    def send(self, data: Bytes) -> int:
        """As `sendmsg([data])`."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Bytes]) -> int:
        """Send what can be sent and return how many bytes that is.

        Raises:
            BlockingIOError: the kernel has no room now. A part of the bytes may be on its way: send the same ones again
                when the descriptor is writable, with others behind them if you like.
        """
        if not self._claimed:
            self._claimed = self._seal(buffers)
        if self._pipe.unsent:
            self._pipe.flush()
            if self._pipe.unsent:
                raise BlockingIOError("the kernel has no room now")
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

    def recv(self, limit: int) -> bytes:
        """Receive up to `limit` bytes; as `recvmsg_into`."""
        data = bytearray(limit)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive as `recvmsg_into` does; return how many bytes came."""
        return self.recvmsg_into([buffer])[0]

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int, list[Any], int, None]:
        """Write what is here to `buffers`, and ask the kernel if nothing is; return how many bytes, 0 at the end.

        Raises:
            BlockingIOError: there is nothing now.
            ConnectionError: the connection broke, or the bytes are not what the other end sent.
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

    def _take(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as whole records are here; return how far that is."""
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

    def setblocking(self, flag: bool) -> None:
        """Accept False only."""
        if flag:
            raise ConfigError("a sealed socket never blocks")

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once closed."""
        return self._pipe.sock.fileno()

    def close(self) -> None:
        """Close at once. Closing twice is fine."""
        self._pipe.sock.close()


class _Readiness:
    """A descriptor that is readable when one of several sockets can do what was last asked for."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._asked: dict[socket.socket, int] = {}
        self._is_closed = False
        if not hasattr(self._selector, "fileno"):
            self._selector.close()
            raise ConfigError("several streams per lane need epoll or kqueue, which this system lacks; use streams=1")

    def ask(self, readers: list[socket.socket], writers: list[socket.socket]) -> None:
        wanted = dict.fromkeys(readers, selectors.EVENT_READ)
        for sock in writers:
            wanted[sock] = wanted.get(sock, 0) | selectors.EVENT_WRITE
        # Other sockets are unregistered: a broken one would be reported whatever its mask is.
        for sock in self._asked.keys() - wanted.keys():
            self._selector.unregister(sock)
        for sock, events in wanted.items():
            if sock not in self._asked:
                self._selector.register(sock, events)
            elif self._asked[sock] != events:
                self._selector.modify(sock, events)
        self._asked = wanted

    def fileno(self) -> int:
        return -1 if self._is_closed else int(self._selector.fileno())

    def close(self) -> None:
        self._selector.close()
        self._is_closed = True
