"""The sockets of message lanes: what they have in common, and the one through shared memory.

The memory, its control words and their rules are those of lanes (`ring`); here positions count bytes, and a message
need not begin at a multiple of anything. `sealed` has the socket that encrypts.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.errors import ConfigError
from covey.base.native import native
from covey.net.lanes.lane import PIECE_BYTES, SPIN_NS, YIELD_NS
from covey.net.lanes.ring import CONTROL_BYTES, HEAD, TAIL, RingEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    EmptyArray = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray[Any, Any]]


class MessageSocket(ABC):
    """A connected stream that a message lane uses as it uses a `socket.socket`. No method blocks."""

    __slots__ = ()

    @abstractmethod
    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send the first bytes of `buffers` and return how many; BlockingIOError if none can be sent now."""

    @abstractmethod
    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int, list[Any], int, None]:
        """Write what is there to `buffers`; return first how many bytes, 0 at the end; BlockingIOError if none is."""

    def send(self, data: bytes | memoryview) -> int:
        """As `sendmsg([data])`."""
        return self.sendmsg([data])

    def recv(self, limit: int) -> bytes:
        """Receive up to `limit` bytes, as `recvmsg_into` does."""
        data = bytearray(limit)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive as `recvmsg_into` does; return the number of bytes."""
        return self.recvmsg_into([buffer])[0]

    def setblocking(self, flag: bool) -> None:
        """Accept False only."""
        if flag:
            raise ConfigError("a socket for messages never blocks")


class RingSocket(RingEnd, MessageSocket):
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
        super().__init__(memory, capacity, doorbell, first=first)
        self._memory, self._is_first, self._is_native = memory, first, is_native
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
                self._wrote(step)
            count += at
            if at < len(view):
                break
        if not count:
            raise BlockingIOError("the ring is full")
        return count

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
                self._took(step)
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
        self._mark_asleep(writer=sending, reader=True)
        return not self.is_ready(sending=sending)

    def unpark(self, *, is_rung: bool) -> None:
        """End what `park` began; `is_rung` tells whether the doorbell is readable."""
        self._mark_awake()
        if is_rung:
            self._hear()

    # Messages that pass without Python

    def prepare_short(
        self, bell_fd: int, wake_fd: int, sizes: tuple[int, ...], *, spins: bool, empty: EmptyArray = np.empty
    ) -> None:
        """Make what moves messages, if the extension is used; `sizes` are those of `messages.lending`.

        `empty(shape, dtype)` makes the large arrays that are received.
        """
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
                empty,
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

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """Return an option of the doorbell."""
        return self._doorbell.getsockopt(level, name, size)

    def close(self) -> None:
        """Close at once, and let go of the memory. Closing twice is fine; another thread may still poll."""
        super().close()
        self._memory = self.short = None
        self._words = memoryview(bytearray(CONTROL_BYTES)).cast("Q")
        self._out = self._in = memoryview(bytearray(0))
        self._head = self._tail = 0
        self._peer_gone = True
