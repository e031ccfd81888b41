"""Sealed lanes: tensors between hosts, in AES-GCM records over one or several TCP streams.

The records of a direction alternate between the streams: record k travels on stream k modulo their number. A transfer
is a record with its header and, if it is small, its payload; a large payload follows in records of `record_limit` and
the rest. Both ends know these lengths and accept no others.
"""

from __future__ import annotations

import contextlib
import select
import selectors
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.net.lanes.lane import PIECE_BYTES, SMALL_BYTES, Incoming, LaneClosedError, Outgoing
from covey.net.lanes.sealed_pipe import FIRST_BYTES, SealedPipe
from covey.net.lanes.stream import SocketLane
from covey.wire.header import HEADER_BYTES
from covey.wire.seal import ForgedError, record_limit

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

_NOTHING: Final = memoryview(b"")


class SealedLane(SocketLane):
    """A lane over connected stream sockets, any of which an attacker may control. Takes ownership of the sockets."""

    def __init__(
        self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool, kind: str = "secure"
    ) -> None:
        """Both ends pass the same `secret`, random and used for this lane only, and the same `lane` id.

        `kind` says what carries the streams: TCP (`secure`) or `quic`.

        Raises:
            ConfigError: there are no sockets, or more than one where this system cannot poll several as one.
        """
        if not socks:
            raise ConfigError("a lane needs at least one stream")
        self.kind = kind
        self._readiness = Readiness() if len(socks) > 1 else None
        limit = self._limit = record_limit(len(socks))
        """The payload bytes in each record of a large transfer but the last."""
        self._pipes = [
            SealedPipe(sock, secret, lane, stream, dialler=dialler, limit=limit) for stream, sock in enumerate(socks)
        ]
        self._out: Outgoing | None = None
        self._payload = _NOTHING
        self._sealed = 0
        """How many payload bytes of `out` are sealed."""
        self._out_turn = self._in_turn = 0
        """The streams of the next record to send and to receive."""
        self._scratch = np.empty(HEADER_BYTES + limit, np.uint8)
        self._plain = memoryview(self._scratch)
        self._typed: np.ndarray[Any, np.dtype[Any]] = self._scratch[HEADER_BYTES:]
        """The scratch payload, viewed as elements of the dtype that was reduced last."""

    def sockets(self) -> Sequence[socket.socket]:
        return [pipe.connection for pipe in self._pipes]

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
                    pipe.seal(self._payload[self._sealed : self._sealed + self._limit])
                    self._sealed = min(self._sealed + self._limit, out.nbytes)
                    self._out_turn = (turn + 1) % len(pipes)
                if pipe.unsent:
                    moved = pipe.flush() or moved
                    unsent += pipe.unsent
                turn = (turn + 1) % len(pipes)
        except OSError as error:  # reset, timed out, unreachable: the lane cannot be used any more
            raise LaneClosedError(str(error)) from error
        if not unsent:
            out.sent = self._sealed
            if out.sent == out.nbytes:
                self._out, self._payload = None, _NOTHING  # the caller may reuse the memory
        return moved

    def _begin(self, out: Outgoing) -> None:
        """Seal the first record of a transfer. There is room: the kernel has taken the previous transfer."""
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

    def _open_first(self, incoming: Incoming, pipe: SealedPipe, length: int) -> None:
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

    def _open_next(self, incoming: Incoming, pipe: SealedPipe, length: int) -> None:
        got = incoming.got
        _expect(length, min(self._limit, incoming.nbytes - got))
        if incoming.dest is not None:
            pipe.open(incoming.dest[got : got + length])
            incoming.got = got + length
        else:  # a reduction cannot be undone, so the record is verified first
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
        with contextlib.suppress(ForgedError):  # `receive` raises it
            if receiving and self._pipes[self._in_turn].ready():
                return 0
        if self._readiness is None:
            return (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)
        readers = [self._pipes[self._in_turn].connection] if receiving else []
        writers = [pipe.connection for pipe in self._pipes if pipe.wants_to_send] if sending else []
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
        raise ForgedError(f"the bytes were altered on the way: {length} bytes of payload instead of {expected}")


class Readiness:
    """A descriptor that is readable when one of several sockets is ready for what was last asked."""

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
