"""The interface of a lane: a byte pipe between two ranks, used by one executor at a time.

A lane moves *transfers*: a 64-byte header and a payload whose length both ends know. It never blocks: `transmit`
and `receive` move what can be moved now. When nothing moves, the executor asks each lane it waits for to `park`,
polls their descriptors, and `unpark`s them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from covey.wire.header import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

SMALL_BYTES = 2048
"""A payload up to this goes out together with its header, as one string of bytes: copying costs less than a call."""
PIECE_BYTES = 1 << 20
"""Payloads move in pieces of at most this, so that a piece is still in cache when it is reduced or copied on."""


class LaneClosedError(Exception):
    """The other end is gone and nothing more will come. Never leaves covey: it becomes a PeerLostError."""


class Outgoing:
    """A transfer on its way out."""

    __slots__ = ("data", "header", "nbytes", "sent")

    def __init__(self, header: bytes, data: Array) -> None:
        self.header = header
        self.data = data
        """The payload as contiguous uint8."""
        self.nbytes = data.nbytes
        self.sent = -HEADER_BYTES
        """Payload bytes sent; negative while the header is on its way."""


class Incoming:
    """A transfer on its way in: into `dest`, or, where that is None, piece by piece through `absorb`."""

    __slots__ = ("dest", "dtype", "expected", "got", "nbytes", "peer", "wrong_header")

    def __init__(
        self,
        expected: bytes,
        nbytes: int,
        wrong_header: Callable[[int, bytes, bytes], None],
        peer: int,
        dest: memoryview | None,
        dtype: np.dtype[Any],
    ) -> None:
        """`wrong_header(peer, expected, header)` is called when another header than `expected` arrives, and raises."""
        self.expected = expected
        self.nbytes = nbytes
        self.wrong_header = wrong_header
        self.peer = peer
        self.dest = dest
        """Contiguous bytes."""
        self.dtype = dtype
        """Of the pieces that `absorb` gets."""
        self.got = -HEADER_BYTES
        """Payload bytes received; negative while the header is on its way."""

    def absorb(self, offset: int, piece: Array) -> None:
        """Take whole elements that start `offset` bytes into the payload; `piece` is valid during the call only."""
        raise NotImplementedError


class Lane(Protocol):
    """A byte pipe to one peer."""

    kind: str
    """What `group.lanes()` shows: shm, unix, tcp, secure or memory."""

    def transmit(self, out: Outgoing) -> bool:
        """Move what can be moved; tell whether anything did. Done when `out.sent == out.nbytes`."""

    def receive(self, incoming: Incoming) -> bool:
        """Move what is there; tell whether anything did. Done when `incoming.got == incoming.nbytes`.

        Raises:
            LaneClosedError: the peer is gone and all it sent was received.
        """

    def spin(self, out: Outgoing | None, incoming: Incoming | None) -> bool:
        """Try for some microseconds; tell whether one of the transfers may move now, or did.

        Raises:
            LaneClosedError: as `receive`.
        """

    def fileno(self) -> int:
        """Return the descriptor to poll."""

    def park(self, *, sending: bool, receiving: bool) -> int:
        """Announce that the executor is about to sleep; return the events to poll for, or 0 to try again at once."""

    def unpark(self) -> None:
        """The sleep is over."""

    def is_stuck(self) -> bool:
        """Tell whether what was sent gets nowhere, although the peer may be well: the path is dead."""

    def peek(self) -> bytes:
        """Return the next 64 bytes that have arrived, or fewer; the lane may not be received from afterwards."""

    def shutdown(self, how: int) -> None:
        """End the connection, as `socket.shutdown` does; what has arrived can still be received. On any thread."""

    def close(self) -> None:
        """Free everything. Closing twice is fine."""
