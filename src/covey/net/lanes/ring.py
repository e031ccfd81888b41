"""A lane through memory that both ends share: one ring of bytes in each direction.

There are no locks, so a killed peer leaves none locked. Each control word has one writer: the writer of a ring moves
`head`, its reader moves `tail`, and each end marks itself asleep in a word of its own. x86-64 makes stores visible in
order, so once `head` has moved, the bytes before it are visible; machines with a weaker order must not use this lane
between processes (see `shm.obstacle`), only the compiled one.

An end that has nothing to do marks itself asleep, checks once more, and polls the doorbell socket. The other end checks
the mark after every move, and rings. Both store a word of their own and then load one of the other end; even x86 may
reorder these, so there is a fence between them.
"""

from __future__ import annotations

import contextlib
import select
import threading
from typing import TYPE_CHECKING, Any, Final

from covey.net.host.descriptors import track
from covey.net.lanes.lane import PIECE_BYTES, Incoming, LaneClosedError, LanePath, Outgoing
from covey.wire.header import TRANSFER_HEADER_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

ALIGN: Final = 64
CONTROL_BYTES: Final = 1024
"""Space for the control words of both rings, one cache line each."""
HEAD, TAIL, WRITER_ASLEEP, READER_ASLEEP = 0, 8, 16, 24
WORDS_PER_RING: Final = 32


def memory_bytes(capacity: int) -> int:
    """Return the bytes of memory that a pair of rings of `capacity` bytes each needs."""
    return CONTROL_BYTES + 2 * capacity


class RingEnd:
    """One end of a pair of rings in `memory`, with a connected `doorbell` socket that it takes ownership of."""

    def __init__(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool) -> None:
        """`first` tells the two ends apart: the first end writes the first ring."""
        doorbell.setblocking(False)
        self._doorbell = track(doorbell)
        self.capacity = capacity
        whole = memoryview(memory).cast("B")
        self._words: memoryview = whole[:CONTROL_BYTES].cast("Q")
        rings = [whole[CONTROL_BYTES:][:capacity], whole[CONTROL_BYTES + capacity :][:capacity]]
        self._out, self._in = rings if first else rings[::-1]
        self._out_words, self._in_words = (0, WORDS_PER_RING) if first else (WORDS_PER_RING, 0)
        self._head = self._tail = 0
        """Copies of the positions that this end writes; only this end changes them."""
        lock = threading.Lock()
        self._fence: Callable[[], object] = lock.release
        self._next_fence: Callable[[], object] = lock.acquire
        """Acquiring and releasing a private lock are each a fence, so the two alternate."""
        self._peer_gone = False

    def _room(self) -> int:
        used = self._head - self._words[self._out_words + TAIL]
        if not 0 <= used <= self.capacity:
            raise ConnectionAbortedError("the peer wrote an impossible position into the shared memory")
        return self.capacity - used

    def _available(self) -> int:
        there = self._words[self._in_words + HEAD] - self._tail
        if not 0 <= there <= self.capacity:
            raise ConnectionAbortedError("the peer wrote an impossible position into the shared memory")
        return there

    def _wrote(self, nbytes: int) -> None:
        """Let the other end see bytes that were written."""
        self._head += nbytes
        self._publish(self._out_words + HEAD, self._head, self._out_words + READER_ASLEEP)

    def _took(self, nbytes: int) -> None:
        """Let the other end use the room of bytes that were read."""
        self._tail += nbytes
        self._publish(self._in_words + TAIL, self._tail, self._in_words + WRITER_ASLEEP)

    def _publish(self, word: int, position: int, asleep: int) -> None:
        self._words[word] = position
        self._order()
        if self._words[asleep]:
            with contextlib.suppress(OSError):  # a full doorbell has rung already, and `_hear` notices a closed one
                self._doorbell.send(b"\0")

    def _order(self) -> None:
        """Let no load that follows overtake the stores before."""
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()

    def _mark_asleep(self, *, writer: bool, reader: bool) -> None:
        """Ask for a ring of the doorbell when something changes; look once more afterwards."""
        if writer:
            self._words[self._out_words + WRITER_ASLEEP] = 1
        if reader:
            self._words[self._in_words + READER_ASLEEP] = 1
        self._order()

    def _mark_awake(self) -> None:
        self._words[self._out_words + WRITER_ASLEEP] = self._words[self._in_words + READER_ASLEEP] = 0

    def _hear(self) -> None:
        """Take what the doorbell has, and notice that the other end has closed it."""
        try:
            while len(rung := self._doorbell.recv(4096)) == 4096:
                pass
            self._peer_gone = not rung
        except BlockingIOError:
            pass
        except OSError:  # it broke, or another thread has closed it meanwhile
            self._peer_gone = True

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once closed."""
        return self._doorbell.fileno()

    def shutdown(self, how: int) -> None:
        """Hang up; what is in the rings can still be read."""
        self._doorbell.shutdown(how)

    def close(self) -> None:
        """Close the doorbell. Closing twice is fine."""
        self._doorbell.close()


class RingLane(RingEnd):
    """A lane through rings. Every header and payload begins at a multiple of ALIGN."""

    def __init__(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str) -> None:
        """See RingEnd."""
        assert capacity % ALIGN == 0
        super().__init__(memory, capacity, doorbell, first=first)
        self.kind = kind

    def transmit(self, out: Outgoing) -> bool:
        room = self._checked(self._room)
        at = self._head % self.capacity
        if out.sent < 0 and room >= TRANSFER_HEADER_BYTES:
            self._out[at : at + TRANSFER_HEADER_BYTES] = out.header
            self._wrote(TRANSFER_HEADER_BYTES)
            out.sent = 0
            return True
        left = out.nbytes - out.sent
        step = min(left, room, self.capacity - at, PIECE_BYTES)
        if step < left:
            step -= step % ALIGN
        if out.sent < 0 or not step:
            return self._refuse_if_gone()
        # A memoryview keeps the interpreter's lock during the copy, which takes a tenth of a millisecond.
        # Getting the lock back from a busy thread takes five.
        self._out[at : at + step] = out.data[out.sent : out.sent + step]
        self._wrote(step + -step % ALIGN)
        out.sent += step
        return True

    def receive(self, incoming: Incoming) -> bool:
        available = self._checked(self._available)
        if not available:
            return self._refuse_if_gone()
        at, got = self._tail % self.capacity, incoming.got
        if got < 0:
            header = self._in[at : at + TRANSFER_HEADER_BYTES]
            if header != incoming.expected:
                incoming.wrong_header(incoming.peer, incoming.expected, bytes(header))
            self._took(TRANSFER_HEADER_BYTES)
            incoming.got = 0
            return True
        step = min(incoming.nbytes - got, available, self.capacity - at, PIECE_BYTES)
        incoming.dest[got : got + step] = self._in[at : at + step]
        self._took(step + -step % ALIGN)
        incoming.got += step
        return True

    def _checked(self, count: Callable[[], int]) -> int:
        try:
            return count()
        except ConnectionAbortedError as error:
            raise LaneClosedError(str(error)) from error

    def _refuse_if_gone(self) -> bool:
        """Return False, or raise if the peer is gone: then nothing will ever move."""
        if self._peer_gone:
            raise LaneClosedError("the peer closed its doorbell")
        return False

    def park(self, *, sending: bool, receiving: bool) -> int:
        self._mark_asleep(writer=sending, reader=receiving)
        may_send = sending and self.capacity - (self._head - self._words[self._out_words + TAIL]) >= ALIGN
        may_move = may_send or (receiving and self._words[self._in_words + HEAD] != self._tail)
        return 0 if may_move or self._peer_gone else select.POLLIN

    def unpark(self) -> None:
        self._mark_awake()
        self._hear()

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        return False  # memory has no network path

    def paths(self) -> tuple[LanePath, ...]:
        return ()

    def peek(self) -> bytes:
        if self._words[self._in_words + HEAD] - self._tail < TRANSFER_HEADER_BYTES:
            return b""
        at = self._tail % self.capacity
        return bytes(self._in[at : at + TRANSFER_HEADER_BYTES])
