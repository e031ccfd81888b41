"""One lane's two byte streams: payloads land where they are wanted, small frames pass between large ones."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final

from covey.wire import message_header as wire
from covey.wire.message_header import Header

if TYPE_CHECKING:
    from collections.abc import Callable

EAGER_BYTES: Final = 64 * 1024
"""Messages up to this size travel with their header."""
PIECE_BYTES: Final = 1024 * 1024
"""Larger payloads are cut into pieces of this size; a small frame waits for one piece at most."""

_SCRATCH_BYTES: Final = EAGER_BYTES + 1024
_AHEAD_BYTES: Final = 4096
"""How much is read past the end of a large piece: enough for the next headers, little enough to copy."""
_GATHER: Final = 64
"""Buffers offered to one send call."""


class Landing:
    """Where a payload goes: `target[:filled]` is there already. `target` may be moved while bytes arrive."""

    __slots__ = ("filled", "target")

    def __init__(self, target: memoryview) -> None:
        self.target = target
        self.filled = 0


class Inlet:
    """Cuts what one peer sends into frames.

    `begin(header)` is called for each frame and says where its payload lands (None for frames without one);
    `landed(landing)` is called when that payload is complete.
    """

    def __init__(self, begin: Callable[[Header], Landing | None], landed: Callable[[Landing], None]) -> None:
        self._begin, self._landed = begin, landed
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._stop = 0
        """`scratch[:stop]` is the start of a header. While a payload lands it is 0."""
        self._landing: Landing | None = None
        self._left = 0
        """Bytes of the current payload that are still to come."""

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes of the stream should be written, in this order."""
        if self._landing is None:
            return [self._scratch[self._stop :]]
        filled, left = self._landing.filled, self._left
        ahead = self._scratch if left <= EAGER_BYTES else self._scratch[:_AHEAD_BYTES]
        return [self._landing.target[filled : filled + left], ahead]

    def advance(self, count: int) -> None:
        """Take note that `count` more bytes were written to `buffers()`.

        Raises:
            RemoteProtocolError: they are not frames; the stream is of no further use.
        """
        if self._landing is not None:
            taken = min(count, self._left)
            count -= taken
            self._fill(self._landing, taken)
        start, stop = 0, self._stop + count
        while (landing := self._landing) is not None or start < stop:
            if landing is not None:
                taken = min(self._left, stop - start)
                filled = landing.filled
                landing.target[filled : filled + taken] = self._scratch[start : start + taken]
                start += taken
                self._fill(landing, taken)
                if self._left:
                    break
            elif (parsed := wire.decode(self._scratch, start, stop)) is not None:
                header, start = parsed
                self._landing = self._begin(header)
                self._left = header.payload_bytes
            else:
                break
        if start and start < stop:
            self._scratch[: stop - start] = bytes(self._scratch[start:stop])
        self._stop = stop - start

    def _fill(self, landing: Landing, count: int) -> None:
        landing.filled += count
        self._left -= count
        if not self._left:
            self._landing = None
            self._landed(landing)


class Payload:
    """A large payload on its way out: `view[:moved]` has left."""

    __slots__ = ("message_id", "moved", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.message_id = 0
        self.moved = 0


class Outlet:
    """Puts small frames and pieces of large payloads in a line: first come, first served, payloads piece by piece."""

    def __init__(self, left: Callable[[Payload], None]) -> None:
        """`left(payload)` is called when the last piece of a payload has left."""
        self._left = left
        self._line: deque[tuple[memoryview, Payload | None]] = deque()
        self._moving: deque[Payload] = deque()
        self._has_piece = False
        """A piece of `moving[0]` stands in the line; there is never more than one."""
        self._takes_pieces = True

    def __bool__(self) -> bool:
        return bool(self._line) or (bool(self._moving) and self._takes_pieces)

    def push(self, frame: bytes) -> None:
        """Append a whole frame."""
        self._line.append((memoryview(frame), None))

    def move(self, payload: Payload) -> None:
        """Send a payload in pieces, in turn with other payloads."""
        self._moving.append(payload)

    def finish_line(self) -> None:
        """Start no further piece, so that the stream can end after a whole frame."""
        self._takes_pieces = False

    def buffers(self) -> list[memoryview]:
        """Return the next bytes to send, in this order."""
        if self._moving and not self._has_piece and self._takes_pieces:
            payload = self._moving[0]
            piece = payload.view[payload.moved : payload.moved + PIECE_BYTES]
            self.push(wire.encode(Header(wire.DATA, payload.message_id, len(piece))))
            self._line.append((piece, payload))
            self._has_piece = True
        return [view for view, _ in itertools.islice(self._line, _GATHER)]

    def advance(self, count: int) -> None:
        """Take note that the first `count` bytes of `buffers()` were sent."""
        while count:
            view, payload = self._line[0]
            step = min(count, len(view))
            count -= step
            if payload is not None:
                payload.moved += step
            if step < len(view):
                self._line[0] = (view[step:], payload)
                return
            self._line.popleft()
            if payload is not None:
                self._end_piece()

    def _end_piece(self) -> None:
        payload = self._moving.popleft()
        self._has_piece = False
        if payload.moved < len(payload.view):
            self._moving.append(payload)
        else:
            self._left(payload)
