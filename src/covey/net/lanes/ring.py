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

import numpy as np

from covey.net.host.descriptors import track
from covey.net.lanes.lane import PIECE_BYTES, SMALL_BYTES, Incoming, LaneClosedError, LanePath, Outgoing
from covey.wire.header import HEADER_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

ALIGN: Final = 64
CONTROL_BYTES: Final = 1024
"""Space for the control words of both rings, one cache line each."""
HEAD, TAIL, WRITER_ASLEEP, READER_ASLEEP = 0, 8, 16, 24
WORDS_PER_RING: Final = 32
SPINS: Final = range(300)
"""How often a word is read before the thread sleeps: for about 25 microseconds, as long as sleeping and waking take."""


def memory_bytes(capacity: int) -> int:
    """Return the bytes of memory that a pair of rings of `capacity` bytes each needs."""
    return CONTROL_BYTES + 2 * capacity


class RingLane:
    """One end of a pair of rings in `memory`, with a connected `doorbell` socket that it takes ownership of."""

    def __init__(self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str) -> None:
        """`first` tells the two ends apart: the first end writes the first ring."""
        assert capacity % PIECE_BYTES == 0 or capacity % ALIGN == 0
        self.kind = kind
        doorbell.setblocking(False)
        self._doorbell = track(doorbell)
        self.capacity = capacity
        self._piece = min(PIECE_BYTES, capacity // 2)
        self._words: memoryview = memoryview(memory).cast("B")[:CONTROL_BYTES].cast("Q")
        rings = [
            np.frombuffer(memory, np.uint8, capacity, CONTROL_BYTES),
            np.frombuffer(memory, np.uint8, capacity, CONTROL_BYTES + capacity),
        ]
        out, self._in = rings if first else rings[::-1]
        self._out_view, self._in_view = memoryview(out), memoryview(self._in)
        self._in_typed: np.ndarray[Any, np.dtype[Any]] = self._in
        """The incoming ring, viewed as elements of the dtype that was reduced last."""
        out_base, in_base = (0, WORDS_PER_RING) if first else (WORDS_PER_RING, 0)
        self._out_head, self._out_tail = out_base + HEAD, out_base + TAIL
        self._out_reader_asleep, self._out_writer_asleep = out_base + READER_ASLEEP, out_base + WRITER_ASLEEP
        self._in_head, self._in_tail = in_base + HEAD, in_base + TAIL
        self._in_reader_asleep, self._in_writer_asleep = in_base + READER_ASLEEP, in_base + WRITER_ASLEEP
        self._head = 0  # copies of the positions that this end writes; only this end changes them
        self._tail = 0
        lock = threading.Lock()
        self._fence: Callable[[], object] = lock.release
        self._next_fence: Callable[[], object] = lock.acquire
        """Acquiring and releasing a private lock are each a fence, so the two alternate."""
        self._parked_for = (False, False)
        self._peer_gone = False

    def transmit(self, out: Outgoing) -> bool:
        words, head, capacity = self._words, self._head, self.capacity
        room = capacity - (head - words[self._out_tail])
        sent = out.sent
        if sent < 0:
            if room < HEADER_BYTES:
                return self._refuse_if_gone()
            at = head % capacity
            end = at + HEADER_BYTES + out.nbytes
            if out.nbytes <= SMALL_BYTES and room >= HEADER_BYTES + SMALL_BYTES and end <= capacity:
                self._out_view[at:end] = out.header + out.data.tobytes()
                head += HEADER_BYTES + out.nbytes + -out.nbytes % ALIGN
                sent = out.nbytes
            else:
                self._out_view[at : at + HEADER_BYTES] = out.header
                head += HEADER_BYTES
                sent = 0
            room -= head - self._head
        left = out.nbytes - sent
        if left:
            at = head % capacity
            step, edge = self._piece, capacity - at
            step = left if left < step else step
            step = room if room < step else step
            step = edge if edge < step else step
            if step < left:
                step -= step % ALIGN
            if step:
                # A memoryview keeps the interpreter's lock during the copy, which takes a tenth of a millisecond.
                # Getting the lock back from a busy thread takes five.
                self._out_view[at : at + step] = out.data[sent : sent + step]
                sent += step
                head += step + -step % ALIGN
        if head == self._head:
            return self._refuse_if_gone()
        out.sent = sent
        self._head = words[self._out_head] = head
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()
        if words[self._out_reader_asleep]:
            self._ring()
        return True

    def receive(self, incoming: Incoming) -> bool:
        words, tail, capacity = self._words, self._tail, self.capacity
        available = words[self._in_head] - tail
        if not available:
            return self._refuse_if_gone()
        got = incoming.got
        if got < 0:
            at = tail % capacity
            header = self._in_view[at : at + HEADER_BYTES]
            if header != incoming.expected:
                incoming.wrong_header(incoming.peer, incoming.expected, bytes(header))
            tail += HEADER_BYTES
            available -= HEADER_BYTES
            got = 0
        left = incoming.nbytes - got
        if left and available:
            at = tail % capacity
            step, edge = self._piece, capacity - at
            step = left if left < step else step
            step = available if available < step else step
            step = edge if edge < step else step
            if incoming.dest is not None:
                incoming.dest[got : got + step] = self._in_view[at : at + step]
            else:
                typed = self._in_typed
                if typed.dtype is not incoming.dtype:
                    typed = self._in_typed = self._in.view(incoming.dtype)
                size = typed.itemsize
                incoming.absorb(got, typed[at // size : (at + step) // size])
            got += step
            tail += step + -step % ALIGN
        incoming.got = got
        self._tail = words[self._in_tail] = tail
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()
        if words[self._in_writer_asleep]:
            self._ring()
        return True

    def spin(self, out: Outgoing | None, incoming: Incoming | None) -> bool:
        words, head, tail = self._words, self._in_head, self._tail
        if out is None:
            for _ in SPINS:  # noqa: SIM110  (any() takes twice as long)
                if words[head] != tail:
                    return True
            return False
        read, full = self._out_tail, self._head - self.capacity + HEADER_BYTES
        for _ in SPINS:  # noqa: SIM110
            if (incoming is not None and words[head] != tail) or words[read] >= full:
                return True
        return False

    def fileno(self) -> int:
        return self._doorbell.fileno()

    def park(self, *, sending: bool, receiving: bool) -> int:
        words = self._words
        if sending:
            words[self._out_writer_asleep] = 1
        if receiving:
            words[self._in_reader_asleep] = 1
        self._parked_for = (sending, receiving)
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()
        if receiving and words[self._in_head] != self._tail:
            return 0
        if sending and self.capacity - (self._head - words[self._out_tail]) >= HEADER_BYTES:
            return 0
        return 0 if self._peer_gone else select.POLLIN

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        return False  # memory has no network path

    def paths(self) -> tuple[LanePath, ...]:
        return ()

    def unpark(self) -> None:
        sending, receiving = self._parked_for
        if sending:
            self._words[self._out_writer_asleep] = 0
        if receiving:
            self._words[self._in_reader_asleep] = 0
        self._parked_for = (False, False)
        try:
            while True:
                rung = self._doorbell.recv(4096)
                if len(rung) < 4096:
                    self._peer_gone = not rung
                    return
        except BlockingIOError:
            return
        except OSError:
            self._peer_gone = True

    def _refuse_if_gone(self) -> bool:
        """Return False, or raise if the peer is gone: then nothing will ever move."""
        if self._peer_gone:
            raise LaneClosedError("the peer closed its doorbell")
        return False

    def _ring(self) -> None:
        # If the doorbell is full, it has rung already. If it is closed, `unpark` notices.
        with contextlib.suppress(OSError):
            self._doorbell.send(b"\0")

    def peek(self) -> bytes:
        if self._words[self._in_head] - self._tail < HEADER_BYTES:
            return b""
        at = self._tail % self.capacity
        return bytes(self._in_view[at : at + HEADER_BYTES])

    def shutdown(self, how: int) -> None:
        self._doorbell.shutdown(how)

    def close(self) -> None:
        self._doorbell.close()
