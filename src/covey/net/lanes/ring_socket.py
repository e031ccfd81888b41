"""The messages of two ranks of one host through shared memory: a stream of bytes in each direction.

The memory, its control words and their rules are those of `ring.RingLane`; here positions count bytes, and a transfer
need not begin at a multiple of anything.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.native import native
from covey.net.host.descriptors import track
from covey.net.lanes.lane import PIECE_BYTES
from covey.net.lanes.message_socket import MessageSocket
from covey.net.lanes.ring import CONTROL_BYTES, HEAD, READER_ASLEEP, TAIL, WORDS_PER_RING, WRITER_ASLEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SPIN_NS: Final = 50_000
YIELD_NS: Final = 200_000
"""How long a compiled receive looks again and again, and then gives its core to others, before it sleeps."""


class RingSocket(MessageSocket):
    """One end of a pair of rings, with a connected `doorbell` that it takes ownership of.

    The descriptor is that of the doorbell, and says nothing about bytes: a thread that wants to sleep calls `park`
    first, and `unpark` afterwards.
    """

    family: Final = socket.AF_UNIX

    def __init__(
        self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, is_native: bool = False
    ) -> None:
        """`first` tells the two ends apart: the first end writes the first ring. `is_native` lets messages pass without
        Python."""
        doorbell.setblocking(False)
        self._doorbell = track(doorbell)
        self.capacity = capacity
        self._memory, self._is_first, self._is_native = memory, first, is_native
        self._words: memoryview = memoryview(memory).cast("B")[:CONTROL_BYTES].cast("Q")
        both = memoryview(memory).cast("B")[CONTROL_BYTES : CONTROL_BYTES + 2 * capacity]
        rings = [both[:capacity], both[capacity:]]
        self._out, self._in = rings if first else rings[::-1]
        self._out_words, self._in_words = (0, WORDS_PER_RING) if first else (WORDS_PER_RING, 0)
        self._head = self._tail = 0
        """Copies of the positions that this end writes; only this end changes them."""
        lock = threading.Lock()
        self._fence: Callable[[], object] = lock.release
        self._next_fence: Callable[[], object] = lock.acquire
        """See `ring.RingLane`."""
        self._peer_gone = False
        self.short: Any = None
        """Moves messages while the streams are lent to it; None without the extension."""

    # Bytes

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send the first bytes of `buffers` and return how many.

        Raises:
            BlockingIOError: the ring is full.
            ConnectionError: the peer has hung up, or broke the rules.
        """
        if self._peer_gone:
            raise BrokenPipeError("the peer closed its doorbell")
        count = 0
        for buffer in buffers:
            view, at = memoryview(buffer), 0
            while at < len(view):
                start = self._head % self.capacity
                step = min(len(view) - at, self._room(), self.capacity - start, PIECE_BYTES)
                if not step:
                    break
                self._out[start : start + step] = view[at : at + step]
                at += step
                self._head += step
                self._publish(self._out_words + HEAD, self._head, self._out_words + READER_ASLEEP)
            count += at
            if at < len(view):
                break
        if not count:
            raise BlockingIOError("the ring is full")
        return count

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

    def _publish(self, word: int, position: int, asleep: int) -> None:
        self._words[word] = position
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()
        if self._words[asleep]:
            with contextlib.suppress(OSError):  # a full doorbell has rung already, and `unpark` notices a closed one
                self._doorbell.send(b"\0")

    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int, list[Any], int, None]:
        """Write what is there to `buffers`; return first how many bytes, 0 if the peer has hung up and nothing is left.

        Raises:
            BlockingIOError: nothing is there.
            ConnectionError: the peer broke the rules.
        """
        is_gone, count = self._peer_gone, 0  # what was written before the peer hung up is there
        for buffer in buffers:
            view, at = memoryview(buffer), 0
            while at < len(view):
                start = self._tail % self.capacity
                step = min(len(view) - at, self._available(), self.capacity - start, PIECE_BYTES)
                if not step:
                    break
                view[at : at + step] = self._in[start : start + step]
                at += step
                self._tail += step
                self._publish(self._in_words + TAIL, self._tail, self._in_words + WRITER_ASLEEP)
            count += at
            if at < len(view):
                break
        if not count and not is_gone:
            raise BlockingIOError("nothing has arrived")
        return count, [], 0, None

    # Waiting

    def is_ready(self, *, sending: bool) -> bool:
        """Tell whether there is something to receive, or room for more if `sending`."""
        if self._words[self._in_words + HEAD] != self._tail or self._peer_gone:
            return True
        return sending and self._head - self._words[self._out_words + TAIL] != self.capacity

    def park(self, *, sending: bool) -> bool:
        """Ask for a ring of the doorbell when that changes; return False if there is no need to sleep."""
        if sending:
            self._words[self._out_words + WRITER_ASLEEP] = 1
        self._words[self._in_words + READER_ASLEEP] = 1
        self._fence, self._next_fence = self._next_fence, self._fence
        self._fence()
        return not self.is_ready(sending=sending)

    def unpark(self, *, is_rung: bool) -> None:
        """End what `park` began; `is_rung` tells whether the doorbell is readable."""
        self._words[self._out_words + WRITER_ASLEEP] = self._words[self._in_words + READER_ASLEEP] = 0
        if is_rung:
            try:
                while len(rung := self._doorbell.recv(4096)) == 4096:
                    pass
                self._peer_gone = not rung
            except BlockingIOError:
                pass
            except OSError:  # it broke, or another thread has closed it meanwhile
                self._peer_gone = True

    # Messages that pass without Python

    def prepare_short(self, bell_fd: int, wake_fd: int, sizes: tuple[int, ...], *, spins: bool) -> None:
        """Make what moves messages, if the extension is used; `sizes` are those of `messages.lending`."""
        if self._is_native:
            self.short = native().module.MessageEnd(
                self._memory,
                self.capacity,
                self._doorbell.fileno(),
                self._is_first,
                bell_fd,
                wake_fd,
                DTYPES,
                np.ndarray,
                np.empty,
                SPIN_NS if spins else 0,
                YIELD_NS,
                sizes,
            )

    def lend(self, state: tuple[int, ...]) -> None:
        """Let messages pass without Python; `state` is that of the streams."""
        self.short.lend(self._head, self._tail, *state)

    def take_back(self) -> tuple[tuple[int, ...], bytes, tuple[Any, ...] | None, bool]:
        """Let none pass; return the state of the streams, the last bytes that were sent, the long message that is under
        way, and whether a thread waits. See `long_messages.c`."""
        (self._head, self._tail, *state), kept, unfinished, has_waiting = self.short.take_back()
        return tuple(state), kept, unfinished, has_waiting

    # The rest of a socket

    def shutdown(self, how: int) -> None:
        """Hang up; what is in the rings can still be read."""
        self._doorbell.shutdown(how)

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option of the doorbell."""
        return self._doorbell.getsockopt(level, name, size)

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 once closed."""
        return self._doorbell.fileno()

    def close(self) -> None:
        """Close at once, and let go of the memory. Closing twice is fine; another thread may still poll."""
        self._doorbell.close()
        self._memory = self.short = None
        self._words = memoryview(bytearray(CONTROL_BYTES)).cast("Q")
        self._out = self._in = memoryview(bytearray(0))
        self._head = self._tail = 0
        self._peer_gone = True
