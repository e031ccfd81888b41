"""The interface of a lane: a byte pipe between two ranks, used by one executor at a time.

A lane moves *transfers*: a 64-byte header and a payload whose length both ends know. No method blocks: `transmit` and
`receive` move as many bytes as they can. When nothing moves, the executor calls `park` on each lane that it waits for,
polls their descriptors, and calls `unpark`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from covey.wire.header import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

SMALL_BYTES = 2048
"""A payload up to this size is sent together with its header, as one bytes object: copying costs less than a call."""
PIECE_BYTES = 1 << 20
"""The largest piece that is moved at once, so that it is still in the cache when it is reduced or copied."""


class LanePath(NamedTuple):
    """One of the networks that a lane goes over."""

    local: str
    remote: str
    """The addresses of its connection; empty if it has broken."""
    share: float
    """Of the bytes that the lane has sent, from 0.0 to 1.0."""
    bytes_per_second: float
    """While it was sending; 0.0 if that is not known."""
    is_used: bool
    """Whether it works."""


class LaneClosedError(Exception):
    """The lane has ended, and all that arrived was received. Never leaves covey: it becomes a PeerLostError."""


class Outgoing:
    """A transfer that is being sent."""

    __slots__ = ("data", "header", "nbytes", "sent")

    def __init__(self, header: bytes, data: Array) -> None:
        self.header = header
        self.data = data
        """The payload as contiguous uint8."""
        self.nbytes = data.nbytes
        self.sent = -HEADER_BYTES
        """Payload bytes sent; negative until the header is sent."""


class Incoming:
    """A transfer that is being received: into `dest` or, if that is None, piece by piece by `absorb`."""

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
        """`wrong_header(peer, expected, header)` is called if a header other than `expected` arrives, and raises."""
        self.expected = expected
        self.nbytes = nbytes
        self.wrong_header = wrong_header
        self.peer = peer
        self.dest = dest
        """Contiguous bytes."""
        self.dtype = dtype
        """The dtype of the pieces that `absorb` gets."""
        self.got = -HEADER_BYTES
        """Payload bytes received; negative until the header is received."""

    def absorb(self, offset: int, piece: Array) -> None:
        """Take whole elements that start `offset` bytes into the payload; `piece` is valid during the call only."""
        raise NotImplementedError


class Lane(Protocol):
    """A byte pipe to one peer."""

    kind: str
    """shm, unix, tcp, secure, quic or memory, as `group.lanes()` shows it."""

    def transmit(self, out: Outgoing) -> bool:
        """Send what can be sent now; return whether anything moved. Done when `out.sent == out.nbytes`."""

    def receive(self, incoming: Incoming) -> bool:
        """Receive what has arrived; return whether anything moved. Done when `incoming.got == incoming.nbytes`.

        Raises:
            LaneClosedError: the lane has ended, and all that arrived was received.
        """

    def spin(self, out: Outgoing | None, incoming: Incoming | None) -> bool:
        """Poll without sleeping for some microseconds; return whether one of the transfers may move now, or did.

        Raises:
            LaneClosedError: as for `receive`.
        """

    def fileno(self) -> int:
        """Return the descriptor to poll."""

    def park(self, *, sending: bool, receiving: bool) -> int:
        """Prepare for the executor to sleep; return the events to poll for, or 0 to try again at once."""

    def unpark(self) -> None:
        """Resume after a sleep."""

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        """Tell whether the network path is dead: what was sent is not acknowledged, although the peer may be alive.

        `has_moved` says that the link with the peer has moved to another network since the lane was opened.
        """

    def peek(self) -> bytes:
        """Return the next 64 bytes that have arrived, or fewer. `receive` may not be called afterwards."""

    def paths(self) -> tuple[LanePath, ...]:
        """Return the networks that the lane goes over, if it goes over several; on any thread."""

    def shutdown(self, how: int) -> None:
        """End the connection, as `socket.shutdown` does; what has arrived can still be received. On any thread."""

    def close(self) -> None:
        """Free everything. Closing twice is fine."""
