"""The interface of a lane: a byte pipe between two ranks, used by one executor at a time.

A lane moves *transfers*: a 64-byte header and a payload whose length both ends know. No method blocks: `transmit` and
`receive` move as many bytes as they can. When nothing moves, the executor calls `park` on each lane that it waits for,
polls their descriptors, and calls `unpark`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from covey.wire.header import TRANSFER_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES: Final = 1 << 20
"""The most bytes that are moved at once."""
SPIN_NS: Final = 50_000
"""How long a rank with a core of its own looks again and again; falling asleep and being woken costs about as much."""
YIELD_NS: Final = 200_000
"""How long a rank then gives its core to others between two looks, before it sleeps."""


class LanePath(NamedTuple):
    """One of the networks that a lane goes over."""

    local: str
    remote: str
    """The addresses of its connection; empty if it has broken."""
    share: float
    """Share of the bytes that the lane has sent, from 0.0 to 1.0."""
    bytes_per_second: float
    """While it was sending; 0.0 if that is not known."""
    is_used: bool
    """Whether it works."""


class LaneClosedError(Exception):
    """The lane has ended, and all that arrived was received. Never leaves covey: it becomes a PeerLostError."""


class Outgoing:
    """A transfer that is being sent."""

    __slots__ = ("data", "header", "nbytes", "sent")

    def __init__(self, header: bytes, data: memoryview) -> None:
        self.header = header
        self.data = data
        """The payload, as contiguous bytes."""
        self.nbytes = len(data)
        self.sent = -TRANSFER_HEADER_BYTES
        """Payload bytes sent; negative until the header is sent."""


class Incoming:
    """A transfer that is being received."""

    __slots__ = ("dest", "expected", "got", "nbytes", "peer", "wrong_header")

    def __init__(
        self, expected: bytes, dest: memoryview, wrong_header: Callable[[int, bytes, bytes], None], peer: int
    ) -> None:
        """`wrong_header(peer, expected, header)` is called if a header other than `expected` arrives, and may raise."""
        self.expected = expected
        self.dest = dest
        """Contiguous bytes."""
        self.nbytes = len(dest)
        self.wrong_header = wrong_header
        self.peer = peer
        self.got = -TRANSFER_HEADER_BYTES
        """Payload bytes received; negative until the header is received."""


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
