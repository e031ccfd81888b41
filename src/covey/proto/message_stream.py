"""The two byte streams between a pair of ranks. Payloads are received in place, and small frames overtake large ones.

A stream outlives the connections that carry it. Both ends count its bytes. A sender keeps sent bytes until the other
end acknowledges them; the first frame on every connection (RESUME) tells how much has arrived, and the rest is sent
again. So every byte of a stream arrives exactly once, in order, however often the connection breaks.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import BULK, PRIORITIES
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

PAYLOAD_PIECE_BYTES: Final = 1024 * 1024
"""Larger payloads are cut into pieces of this size; a small frame waits for one piece at most."""
SHORT_PIECE_BYTES: Final = 128 * 1024
"""The size of pieces while something more urgent moves elsewhere: to encrypt one holds up all threads."""
HURRIED_PIECE_BYTES: Final = 8 * 1024
"""The size of pieces while the stream itself carries something more urgent."""

_PIECE_AHEAD_BYTES: Final = 4096
"""How much is read past the end of a piece: enough for the next headers, little enough to copy."""
_GATHER: Final = 64
"""Buffers offered to one send call."""
_FRAMES_BYTES: Final = 64 * 1024
"""No further frame of a message is put into the line while it has so much."""


class Landing:
    """Where a payload is received: `target[:filled]` is there already. `target` may change while bytes arrive."""

    __slots__ = ("filled", "target")

    def __init__(self, target: memoryview) -> None:
        self.target = target
        self.filled = 0


class Inlet:
    """Splits the bytes of one peer into frames.

    `begin(header)` is called for each frame and says where its payload lands (None for frames without one);
    `landed(landing)` is called when that payload is complete; `resumed(position)` when a connection has begun, with the
    number of bytes of the stream in the other direction that the peer has. `heard(header, payload)` is called in place
    of both for a small message with one of the tags `listened`, if all of it is here.
    """

    def __init__(
        self,
        begin: Callable[[MessageHeader], Landing | None],
        landed: Callable[[Landing], None],
        resumed: Callable[[int], None],
        heard: Callable[[MessageHeader, bytes], None],
        eager_bytes: int,
        *,
        listened: Collection[int] = (),
    ) -> None:
        """Messages of up to `eager_bytes` travel with their header."""
        self._begin, self._landed, self._resumed, self._heard = begin, landed, resumed, heard
        self._eager_bytes, self._listened = eager_bytes, listened
        self.received = 0
        """Bytes of the stream that have arrived."""
        self._resume_frame = memoryview(bytearray(wire.FIXED_BYTES))
        self._resume_bytes = 0
        """`resume_frame[:resume_bytes]` is the start of the first frame, which is not part of the stream."""
        self._scratch = memoryview(bytearray(eager_bytes + _PIECE_AHEAD_BYTES))
        self._stop = 0
        """`scratch[:stop]` is the start of a header. While a payload lands it is 0."""
        self._landing: Landing | None = None
        self._left = 0
        """Bytes of the current payload that are still to come."""

    def lane_opened(self) -> None:
        """Continue the stream on another connection."""
        self._resume_bytes = 0

    def clear(self) -> None:
        """Drop what has arrived of a payload: nothing is received any more."""
        self._landing, self._left, self._stop = None, 0, 0

    def drop(self) -> None:
        """Let what is still to come of a payload land in memory of its own, and be dropped there."""
        if self._landing is not None:
            self._landing = Landing(memoryview(bytearray(self._left)))

    def go_on(self, landing: Landing, left: int) -> None:
        """Go on in the middle of a frame, of whose payload `left` bytes are still to come; called between frames."""
        self._landing, self._left = landing, left

    @property
    def has_begun(self) -> bool:
        """Whether the other end has said on this connection where its stream continues."""
        return self._resume_bytes == wire.FIXED_BYTES

    @property
    def is_between_frames(self) -> bool:
        """Whether the connection has begun and every byte that has arrived belongs to a whole frame."""
        return self._resume_bytes == wire.FIXED_BYTES and self._landing is None and not self._stop

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes of the connection should be written, in this order."""
        if self._resume_bytes < wire.FIXED_BYTES:
            return [self._resume_frame[self._resume_bytes :]]
        if self._landing is None:
            return [self._scratch[self._stop :]]
        filled, left = self._landing.filled, self._left
        ahead = self._scratch if left <= self._eager_bytes else self._scratch[:_PIECE_AHEAD_BYTES]
        return [self._landing.target[filled : filled + left], ahead]

    def advance(self, count: int) -> None:
        """Take note that `count` more bytes were written to `buffers()`.

        Raises:
            RemoteProtocolError: they are not frames; the stream cannot be used any more.
        """
        if self._resume_bytes < wire.FIXED_BYTES:
            self._take_resume(count)
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
                end = start + header.payload_bytes
                if end <= stop and header.kind == wire.EAGER and header.tag in self._listened:
                    self._heard(header, self._scratch[start:end].tobytes())
                    start = end
                    continue
                self._landing = self._begin(header)
                self._left = header.payload_bytes
            else:
                break
        if start and start < stop:
            self._scratch[: stop - start] = bytes(self._scratch[start:stop])
        self._stop = stop - start

    def _take_resume(self, count: int) -> None:
        self._resume_bytes += count
        parsed = wire.decode(self._resume_frame, 0, self._resume_bytes)
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
    """A large payload that is sent in pieces: `view[:moved]` is split already. `priority` is its class."""

    __slots__ = ("message_id", "moved", "priority", "view")

    def __init__(self, view: memoryview, priority: int = BULK) -> None:
        self.view, self.priority = view, priority
        self.message_id = 0
        self.moved = 0


class _Item(NamedTuple):
    """Bytes of a stream: a whole small frame, the header of a piece, or a piece."""

    data: bytes | memoryview
    payload: Payload | None = None
    """The payload of which it is a piece."""
    is_last: bool = False


_data_of: Callable[[_Item], bytes | memoryview] = operator.itemgetter(0)


class Outlet:
    """Queues small frames and pieces of large payloads; payloads of a class take turns piece by piece.

    A class is served only while those above it have nothing to send. What is in the line stays there: a few frames, and
    one piece. So the frames of messages wait with the owner of the outlet, in order of their classes, until the line
    has room; frames about the streams themselves go into the line at once.
    """

    def __init__(
        self,
        arrived: Callable[[Payload], None],
        next_frame: Callable[[int], bytes | None],
        peer: int,
        ready: set[int],
    ) -> None:
        """`arrived(payload)` is called when the peer has acknowledged the last piece of a payload.

        `next_frame(least)` returns the next frame of a message of the class `least`, or of one above it, if there is
        one. The peer is in `ready` while there are bytes that may be sent now: what `buffers` returns.
        """
        self._arrived, self._next_frame, self._peer, self._ready = arrived, next_frame, peer, ready
        self.piece_bytes = PAYLOAD_PIECE_BYTES
        """Payloads are cut into pieces of this size from now on."""
        self._frames = 0
        """Frames of messages that wait with the owner."""
        self._line: deque[_Item] = deque()
        """Items to send."""
        self._at = 0
        """`line[0].data[:at]` was sent."""
        self._unacknowledged: deque[_Item] = deque()
        """Items that were sent and are not acknowledged, oldest first."""
        self._start = 0
        """The bytes of the stream before `unacknowledged`, or before `line` if that is empty."""
        self._sent = 0
        """The bytes of the stream that are known to be sent."""
        self._offered = 0
        """The bytes of the stream that may be sent: a sealed socket reports them only with the whole record."""
        self._has = 0
        """The bytes of the stream that the peer is known to have."""
        self._moving: tuple[deque[Payload], ...] = tuple(deque() for _ in PRIORITIES)
        """By class."""
        self._payloads = 0
        """How many there are in all."""
        self._pieces = 0
        """Pieces in the line; none is added while there are any."""
        self._takes_pieces = True
        self._resume_frame = b""
        """The unsent rest of the connection's first frame."""
        self._flows = False
        """Whether there is a connection and it is known where the stream continues."""

    @property
    def has_unsent(self) -> bool:
        """Whether there are bytes that were not sent yet, or have to be sent again."""
        return bool(self._line or self._frames or (self._payloads and self._takes_pieces))

    @property
    def is_clear(self) -> bool:
        """Whether the frame of a message may go into the line at once: none waits, and nothing is in front of it."""
        return not (self._line or self._frames)

    @property
    def arrived(self) -> int:
        """The bytes of the stream that the peer is known to have."""
        return self._has

    @property
    def sent(self) -> int:
        """The bytes of the stream that were sent."""
        return self._sent

    @property
    def end(self) -> int:
        """Where the stream ends with all frames that were pushed, whether they were sent or not."""
        return self._sent - self._at + sum(len(item.data) for item in self._line)

    @property
    def is_idle(self) -> bool:
        """Whether there is a connection and everything was sent on it."""
        is_flowing = self._flows and not self._resume_frame
        return is_flowing and not (self._payloads or self._frames or self._line or self._at)

    def passed(self, sent: int, arrived: int, kept: bytes) -> None:
        """Take note that the stream went on by other means while this was idle.

        `sent` and `arrived` are its bytes that were sent, and that the peer has; `kept` are the last that were sent,
        among them all that the peer may not have.
        """
        self._has = arrived
        self._drop_arrived(self._unacknowledged)
        if kept:
            self._unacknowledged.append(_Item(kept))
        self._sent = self._offered = sent
        self._start = sent - sum(len(item.data) for item in self._unacknowledged)

    def go_on(self, payload: Payload, count: int) -> None:
        """Send a payload of whose frames the first `count` bytes have passed by other means, after `passed`."""
        self.piece_bytes = PAYLOAD_PIECE_BYTES
        self.move(payload)
        while count and self._payloads:
            self._cut_piece()
            taken = min(count, sum(len(item.data) for item in self._line))
            self._offered = self._sent + taken
            self.advance(taken)
            count -= taken

    @property
    def is_in_doubt(self) -> bool:
        """Whether the connection broke and it is not known how much of the sent bytes has arrived."""
        return not self._flows and self._offered > self._start

    def lane_opened(self, received: int) -> None:
        """Continue the stream on another connection; `received` are the bytes received of the other stream."""
        self._resume_frame = wire.encode(MessageHeader(wire.RESUME, payload_bytes=received))
        self._flows = self._offered == self._start  # nothing is in doubt: the peer's RESUME can only say the same
        self._ready.add(self._peer)

    def lane_ended(self) -> None:
        """Send nothing until there is another connection."""
        self._resume_frame, self._flows = b"", False
        self._ready.discard(self._peer)

    def resume(self, position: int) -> None:
        """Send the stream again from `position`: the peer has the bytes before it.

        Raises:
            RemoteProtocolError: that is impossible.
        """
        if not self._has <= position <= (self._start if self._flows else self._offered):
            raise RemoteProtocolError(f"{position} bytes have arrived there, of which {self._offered} were sent")
        if not self._flows:
            self._line.extendleft(reversed(self._unacknowledged))
            self._unacknowledged.clear()
            self._has = self._sent = self._offered = position
            self._drop_arrived(self._line)
            self._at = position - self._start
            self._pieces = sum(item.payload is not None for item in self._line)
            self._flows = True
        if self.has_unsent:
            self._ready.add(self._peer)

    def acknowledged(self, position: int) -> None:
        """Drop what the peer has: the stream up to `position`, which may be less than known already.

        Raises:
            RemoteProtocolError: that is impossible.
        """
        if position > self._offered:
            raise RemoteProtocolError(f"{position} bytes are acknowledged, and {self._offered} were sent")
        self._has = max(self._has, position)
        self._drop_arrived(self._unacknowledged)

    def _drop_arrived(self, items: deque[_Item]) -> None:
        """Drop the first of `items`, which begin at `start`, as far as the peer has them."""
        while items and self._start + len(items[0].data) <= self._has:
            data, payload, is_last = items.popleft()
            self._start += len(data)
            if is_last and payload is not None:
                self._arrived(payload)

    def push(self, frame: bytes) -> None:
        """Append a whole frame."""
        self._line.append(_Item(frame))
        if self._flows:
            self._ready.add(self._peer)

    def push_if_clear(self, frame: bytes) -> bool:
        """Append a frame if nothing is in front of it, as `is_clear` says; return whether it was."""
        if self._line or self._frames:
            return False
        self._line.append(_Item(frame))
        if self._flows:
            self._ready.add(self._peer)
        return True

    def queue_frame(self) -> None:
        """Take note that one more frame of a message waits."""
        self._frames += 1
        if self._flows:
            self._ready.add(self._peer)

    def push_frames(self) -> None:
        """Put all frames that wait into the line, whatever it has: nothing follows them."""
        self._take_frames(BULK, math.inf)

    def move(self, payload: Payload) -> None:
        """Send a payload in pieces, in turn with other payloads of its class."""
        self._moving[payload.priority].append(payload)
        self._payloads += 1
        if self._flows and self._takes_pieces:
            self._ready.add(self._peer)

    def finish_line(self) -> None:
        """Start no further piece, so that the stream can end after a whole frame."""
        self._takes_pieces = False
        if not self._resume_frame and self.is_clear:
            self._ready.discard(self._peer)

    def clear(self) -> None:
        """Drop everything: nothing is sent any more."""
        self._line.clear()
        self._unacknowledged.clear()
        self._frames = self._payloads = 0
        for payloads in self._moving:
            payloads.clear()
        self.lane_ended()

    def buffers(self) -> list[bytes | memoryview]:
        """Return the next bytes to send, in this order."""
        if self._resume_frame:
            return [self._resume_frame]
        if not self._flows:
            return []
        if self._frames:
            moving = next((c for c, payloads in enumerate(self._moving) if payloads), BULK)
            self._take_frames(moving if self._takes_pieces else BULK, _FRAMES_BYTES)
        if self._payloads and not self._pieces and self._takes_pieces:
            self._cut_piece()
        buffers = list(map(_data_of, itertools.islice(self._line, _GATHER)))
        if self._at:
            buffers[0] = memoryview(buffers[0])[self._at :]
        self._offered = max(self._offered, self._sent + sum(map(len, buffers)))
        return buffers

    def _take_frames(self, least: int, most: float) -> None:
        """Put frames of the class `least`, and of those above it, into the line, until it has `most` bytes."""
        taken = sum(len(item.data) for item in self._line if item.payload is None)
        while self._frames and taken < most and (frame := self._next_frame(least)) is not None:
            self._frames -= 1
            self._line.append(_Item(frame))
            taken += len(frame)

    def _cut_piece(self) -> None:
        payloads = next(payloads for payloads in self._moving if payloads)
        payload = payloads.popleft()
        piece = payload.view[payload.moved : payload.moved + min(PAYLOAD_PIECE_BYTES, self.piece_bytes)]
        payload.moved += len(piece)
        is_last = payload.moved == len(payload.view)
        self.push(wire.encode(MessageHeader(wire.DATA, payload.message_id, len(piece))))
        self._line.append(_Item(piece, payload, is_last))
        self._pieces += 1
        if is_last:
            self._payloads -= 1
        else:
            payloads.append(payload)

    def advance(self, count: int) -> None:
        """Take note that the first `count` bytes of `buffers()` were sent."""
        if self._resume_frame:
            self._resume_frame = self._resume_frame[count:]
            if not self._resume_frame and not (self._flows and self.has_unsent):
                self._ready.discard(self._peer)
            return
        self._sent += count
        self._at += count
        line = self._line
        while line and self._at >= (length := len(line[0].data)):
            item = line.popleft()
            self._unacknowledged.append(item)
            self._at -= length
            if item.payload is not None:
                self._pieces -= 1
        if self._has > self._start:  # acknowledged before the socket reported it as sent
            self._drop_arrived(self._unacknowledged)
        if not (line or self._frames or (self._payloads and self._takes_pieces)):
            self._ready.discard(self._peer)
