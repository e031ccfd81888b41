"""The two byte streams between a pair of ranks: payloads land where they are wanted, small frames pass large ones.

A stream outlives the connections that carry it. Both ends count its bytes. What was sent is kept until the other end
acknowledges it; the first frame on every connection (RESUME) tells how much has arrived, and the rest is sent again. So
every byte of a stream arrives exactly once, in order, however often the connection breaks.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import RemoteProtocolError
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
    `landed(landing)` is called when that payload is complete; `resumed(position)` when a connection has begun, with the
    number of bytes of the stream in the other direction that the peer has.
    """

    def __init__(
        self,
        begin: Callable[[Header], Landing | None],
        landed: Callable[[Landing], None],
        resumed: Callable[[int], None],
    ) -> None:
        self._begin, self._landed, self._resumed = begin, landed, resumed
        self.received = 0
        """Bytes of the stream that have arrived."""
        self._greeting = memoryview(bytearray(wire.FIXED_BYTES))
        self._greeted = 0
        """`greeting[:greeted]` is the start of the connection's first frame, which is not part of the stream."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._stop = 0
        """`scratch[:stop]` is the start of a header. While a payload lands it is 0."""
        self._landing: Landing | None = None
        self._left = 0
        """Bytes of the current payload that are still to come."""

    def lane_opened(self) -> None:
        """Go on with the stream on another connection."""
        self._greeted = 0

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes of the connection should be written, in this order."""
        if self._greeted < wire.FIXED_BYTES:
            return [self._greeting[self._greeted :]]
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
        if self._greeted < wire.FIXED_BYTES:
            self._greet(count)
            return
        self.received += count
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

    def _greet(self, count: int) -> None:
        self._greeted += count
        parsed = wire.decode(self._greeting, 0, self._greeted)
        if parsed is not None:
            header, _ = parsed
            if header.kind != wire.RESUME:
                raise RemoteProtocolError(f"a connection began with something else than RESUME: {header}")
            self._resumed(header.payload_bytes)

    def _fill(self, landing: Landing, count: int) -> None:
        landing.filled += count
        self._left -= count
        if not self._left:
            self._landing = None
            self._landed(landing)


class Payload:
    """A large payload on its way out: `view[:moved]` is cut into pieces."""

    __slots__ = ("message_id", "moved", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.message_id = 0
        self.moved = 0


class _Item(NamedTuple):
    """Bytes of a stream: a whole small frame, the header of a piece, or a piece."""

    data: bytes | memoryview
    payload: Payload | None = None
    """Whose piece it is."""
    is_last: bool = False


class Outlet:
    """Puts small frames and pieces of large payloads in a line: first come, first served, payloads piece by piece."""

    def __init__(self, arrived: Callable[[Payload], None]) -> None:
        """`arrived(payload)` is called when the peer has acknowledged the last piece of a payload."""
        self._arrived = arrived
        self._line: deque[_Item] = deque()
        """What is to be sent."""
        self._at = 0
        """`line[0].data[:at]` was sent."""
        self._kept: deque[_Item] = deque()
        """What was sent and is not acknowledged, oldest first."""
        self._start = 0
        """The bytes of the stream before `kept`, or before `line` if nothing is kept."""
        self._sent = 0
        """The bytes of the stream that are known to be sent."""
        self._offered = 0
        """The bytes of the stream that may be sent: a sealed socket tells of them only when the whole record is."""
        self._has = 0
        """The bytes of the stream that the peer is known to have."""
        self._moving: deque[Payload] = deque()
        self._pieces = 0
        """Pieces in the line; none is added as long as there are any."""
        self._takes_pieces = True
        self._greeting = b""
        """What is left to send of the connection's first frame."""
        self._flows = False
        """There is a connection, and it is known where the stream goes on."""

    def __bool__(self) -> bool:
        """Tell whether there are bytes that may be sent now."""
        return bool(self._greeting) or (self._flows and self.has_unsent)

    @property
    def has_unsent(self) -> bool:
        """Whether there are bytes that were not sent yet, or have to be sent again."""
        return bool(self._line) or (bool(self._moving) and self._takes_pieces)

    @property
    def arrived(self) -> int:
        """The bytes of the stream that the peer is known to have."""
        return self._has

    @property
    def is_in_doubt(self) -> bool:
        """Whether it is not known how much of what was sent has arrived, because the connection broke."""
        return not self._flows and self._offered > self._start

    def lane_opened(self, received: int) -> None:
        """Go on with the stream on another connection; `received` are the bytes of the other stream that are here."""
        self._greeting = wire.encode(Header(wire.RESUME, payload_bytes=received))
        self._flows = self._offered == self._start  # nothing is in doubt: the peer's RESUME can only say the same

    def lane_ended(self) -> None:
        """Send nothing until there is another connection."""
        self._greeting, self._flows = b"", False

    def resume(self, position: int) -> None:
        """The peer has the stream up to `position`: send it again from there.

        Raises:
            RemoteProtocolError: that cannot be.
        """
        if not self._has <= position <= (self._start if self._flows else self._offered):
            raise RemoteProtocolError(f"{position} bytes have arrived there, of which {self._offered} were sent")
        if not self._flows:
            self._line.extendleft(reversed(self._kept))
            self._kept.clear()
            self._has = self._sent = self._offered = position
            self._drop_arrived(self._line)
            self._at = position - self._start
            self._pieces = sum(item.payload is not None for item in self._line)
            self._flows = True

    def acknowledged(self, position: int) -> None:
        """Forget what the peer has: the stream up to `position`, or less than is known already.

        Raises:
            RemoteProtocolError: that cannot be.
        """
        if position > self._offered:
            raise RemoteProtocolError(f"{position} bytes are acknowledged, and {self._offered} were sent")
        self._has = max(self._has, position)
        self._drop_arrived(self._kept)

    def _drop_arrived(self, items: deque[_Item]) -> None:
        """Forget the first of `items`, which begin at `start`, as far as the peer has them."""
        while items and self._start + len(items[0].data) <= self._has:
            data, payload, is_last = items.popleft()
            self._start += len(data)
            if is_last and payload is not None:
                self._arrived(payload)

    def push(self, frame: bytes) -> None:
        """Append a whole frame."""
        self._line.append(_Item(frame))

    def move(self, payload: Payload) -> None:
        """Send a payload in pieces, in turn with other payloads."""
        self._moving.append(payload)

    def finish_line(self) -> None:
        """Start no further piece, so that the stream can end after a whole frame."""
        self._takes_pieces = False

    def clear(self) -> None:
        """Drop everything: nothing is sent any more."""
        self._line.clear()
        self._kept.clear()
        self._moving.clear()
        self.lane_ended()

    def buffers(self) -> list[bytes | memoryview]:
        """Return the next bytes to send, in this order."""
        if self._greeting:
            return [self._greeting]
        if not self._flows:
            return []
        if self._moving and not self._pieces and self._takes_pieces:
            self._cut_piece()
        buffers = [item.data for item in itertools.islice(self._line, _GATHER)]
        if self._at:
            buffers[0] = memoryview(buffers[0])[self._at :]
        self._offered = max(self._offered, self._sent + sum(map(len, buffers)))
        return buffers

    def _cut_piece(self) -> None:
        payload = self._moving.popleft()
        piece = payload.view[payload.moved : payload.moved + PIECE_BYTES]
        payload.moved += len(piece)
        is_last = payload.moved == len(payload.view)
        self.push(wire.encode(Header(wire.DATA, payload.message_id, len(piece))))
        self._line.append(_Item(piece, payload, is_last))
        self._pieces += 1
        if not is_last:
            self._moving.append(payload)

    def advance(self, count: int) -> None:
        """Take note that the first `count` bytes of `buffers()` were sent."""
        if self._greeting:
            self._greeting = self._greeting[count:]
            return
        self._sent += count
        self._at += count
        line = self._line
        while line and self._at >= (length := len(line[0].data)):
            item = line.popleft()
            self._kept.append(item)
            self._at -= length
            if item.payload is not None:
                self._pieces -= 1
        if self._has > self._start:  # acknowledged before the socket told that it was sent
            self._drop_arrived(self._kept)
