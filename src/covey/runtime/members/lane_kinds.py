"""The kinds of lanes: which kind a pair of ranks uses, how large it is, and how connected sockets become a lane.

Both ends choose the kind from facts that both know, so that no peer can choose one that third parties can read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.net.lanes import shm

if TYPE_CHECKING:
    import socket

    from covey.base.numbers import Seat
    from covey.net.lanes.factory import LaneFactory
    from covey.runtime.members.node import Node
    from covey.runtime.members.peers import Peer
    from covey.wire import messages

SMALL_RING_BYTES: Final = 128 << 10
LARGE_RINGS_TOTAL_BYTES: Final = 64 << 20
"""Rings have `ring_bytes` until a process has this many bytes of them, then they are small: a program may have dozens
of groups. By default a ring stays in the cache: a larger one is not faster, and with eight ranks on a host half as
fast."""
STREAMS_BY_ROUND_TRIP: Final = ((0.02, 1), (0.06, 4))
"""Connections of a lane, by round trip in seconds: on each the kernel sends a few megabytes without acknowledgement."""
STREAMS_FAR: Final = 8


def kind_to(node: Node, peer: Seat) -> str:
    """Return the kind of lane that this node and a peer use.

    Raises:
        ConfigError: the settings demand a kind that this pair cannot have.
    """
    forced = node.config.lanes
    contact = node.peers[peer].contact
    here = contact is not None and contact.host == node.host
    in_clear = here or node.credentials.tls is None  # without TLS between hosts, the user has allowed it
    if forced in ("memory", "secure") or (forced in ("shm", "unix") and here) or (forced == "tcp" and in_clear):
        return forced
    name = node.generation_table.name_of(peer)
    if forced in ("shm", "unix"):
        raise ConfigError(f"lanes={forced!r} works on one host only, but {name} is on another")
    if forced == "tcp":
        raise ConfigError(f"lanes='tcp' is not encrypted, and {name} is on another host; use auto or secure")
    if here:
        return "shm" if shm.usable() else "unix"
    return "tcp" if in_clear else "secure"


def acceptable_kinds(node: Node, peer: Seat) -> set[str]:
    """Return the kinds that a lane that a peer offers may have."""
    kind = kind_to(node, peer)
    return {"shm", "unix"} if kind == "shm" else {kind}  # unix, if the peer had no shared memory


def is_ring(kind: str) -> bool:
    """Tell whether a lane is made of two rings in memory that both ends see."""
    return kind in ("shm", "memory")


def ring_capacity(node: Node, in_use: int) -> int:
    """Return the bytes of the next ring, if the open rings occupy `in_use` bytes."""
    large, small = _ring_sizes(node)
    return large if in_use + 2 * large <= LARGE_RINGS_TOTAL_BYTES else small


def acceptable_capacities(node: Node, kind: str) -> tuple[int, ...]:
    """Return the ring sizes that an offered lane of this kind may have; 0 where it has no rings."""
    return _ring_sizes(node) if is_ring(kind) else (0,)


def _ring_sizes(node: Node) -> tuple[int, int]:
    return node.config.ring_bytes, min(node.config.ring_bytes, SMALL_RING_BYTES)


def stream_count(node: Node, peer: Peer, kind: str, purpose: str) -> int:
    """Return how many connections a lane gets: more where one would spend its time waiting for acknowledgements."""
    if purpose != "collectives" or kind != "secure":
        return 1
    wanted = node.config.streams
    if wanted != "auto":
        return int(wanted)
    return next((count for limit, count in STREAMS_BY_ROUND_TRIP if peer.round_trip < limit), STREAMS_FAR)


def lane_of_memory(
    factory: LaneFactory, memory: Any, sock: socket.socket, offer: messages.Offer, *, dialler: bool
) -> Any:
    """Return the lane (for collectives) or the socket (for messages) that memory and a connected socket make."""
    if offer.purpose == "collectives":
        return factory.ring(memory, offer.capacity, sock, first=dialler, kind=offer.kind)
    return factory.ring_socket(memory, offer.capacity, sock, first=dialler)


def lane_of_sockets(factory: LaneFactory, socks: list[socket.socket], offer: messages.Offer, *, dialler: bool) -> Any:
    """Return the lane (for collectives) or the socket (for messages) that connected sockets make."""
    if offer.purpose == "collectives":
        if offer.kind == "secure":
            return factory.sealed(socks, offer.secret, offer.lane, dialler=dialler)
        return factory.stream(socks[0], offer.kind)
    if offer.kind != "secure":
        return socks[0]
    from covey.net.lanes.sealed_socket import SealedSocket  # slow to import, and not needed by ranks of one host

    return SealedSocket(socks[0], offer.secret, offer.lane, dialler=dialler)
