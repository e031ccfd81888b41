"""The kinds of lanes: which kind a pair of ranks uses, how large it is, and how connected sockets become a lane.

Both ends choose the kind from facts that both know, so that no peer can choose one that third parties can read. One
fact is known to one end only: whether its executor can use shared memory. If it cannot, the lane is a unix socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.net.host.machine import usable_cores
from covey.net.lanes import shm
from covey.runtime.lanes.resumption import is_direct

if TYPE_CHECKING:
    import socket

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.net.lanes.factory import LaneFactory
    from covey.runtime.lanes.connections import LaneConnections, StripedLanes
    from covey.runtime.lanes.resumption import LaneResumption
    from covey.runtime.peers.peer_table import PeerTable
    from covey.wire import messages

SMALL_RING_BYTES: Final = 128 << 10
LARGE_RINGS_TOTAL_BYTES: Final = 64 << 20
"""Rings have `ring_bytes` until a process has this many bytes of them, then they are small: a program may have dozens
of groups. By default a ring stays in the cache: a larger one is not faster, and with eight ranks on a host half as
fast."""
STREAMS_BY_ROUND_TRIP: Final = ((0.02, 1), (0.06, 4))
"""Connections of a lane, by round trip in seconds: on each the kernel sends a few megabytes without acknowledgement."""
STREAMS_FAR: Final = 8
HELPED_STREAMS: Final = 2
"""Connections of a near lane whose ranks have HELPED_CORES each: a thread of the lane seals while the other one opens.
It can go on with one connection while the kernel is busy with the other."""
HELPED_CORES: Final = 2
SEALED_KINDS: Final = ("secure", "quic")
"""Kinds whose bytes are encrypted by the lane itself, whatever carries them."""


class LaneRules:
    """Which kinds of lanes this process offers to its peers, and accepts from them."""

    def __init__(self, config: GroupConfig, peers: PeerTable, factory: LaneFactory, *, is_clear: bool) -> None:
        """`is_clear` tells whether the run goes without encryption, which the user has allowed."""
        self._config, self._peers, self._factory, self._is_clear = config, peers, factory, is_clear

    @property
    def demands_memory(self) -> bool:
        """Whether the settings demand shared memory, so that nothing may take its place."""
        return self._config.lanes == "shm"

    @property
    def most_streams(self) -> int:
        """How many connections a lane of this process may have."""
        return self._factory.most_streams

    def kind_to(self, peer: Seat) -> str:
        """Return the kind of lane that this process and a peer use, if both can; equal on all ranks.

        Raises:
            ConfigError: the settings demand a kind that this pair cannot have.
        """
        forced, here = self._config.lanes, self._peers.is_here(peer)
        in_clear = here or self._is_clear
        if (
            forced in ("memory", *SEALED_KINDS)
            or (forced in ("shm", "unix") and here)
            or (forced == "tcp" and in_clear)
        ):
            return forced
        name = self._peers.name_of(peer)
        if forced in ("shm", "unix"):
            raise ConfigError(f"lanes={forced!r} works on one host only, but {name} is on another")
        if forced == "tcp":
            raise ConfigError(f"lanes='tcp' is not encrypted, and {name} is on another host; use auto or secure")
        if here:
            return "shm" if shm.has_memory() else "unix"
        return "tcp" if in_clear else "secure"

    def offered_kind(self, peer: Seat, purpose: str) -> str:
        """Return the kind of lane to offer to a peer for this purpose; ConfigError as `kind_to`."""
        kind = self.kind_to(peer)
        if kind != "shm":
            return kind
        obstacle = self._factory.ring_obstacle
        if obstacle and self.demands_memory:
            raise ConfigError(f"lanes='shm': {obstacle}; use unix or auto")
        if purpose == "messages" and not shm.keeps_order():  # Python moves some of their bytes
            return "unix"
        return "unix" if obstacle else "shm"

    def acceptable_kinds(self, peer: Seat, purpose: str) -> set[str]:
        """Return the kinds that a lane that a peer offers may have."""
        kind = self.offered_kind(peer, purpose)
        return {"shm", "unix"} if kind == "shm" else {kind}  # unix, if the peer had no shared memory

    def is_refused_ring(self, peer: Seat, kind: str, purpose: str) -> bool:
        """Tell whether an offer is refused only because the executor of this end cannot use shared memory."""
        return kind == "shm" == self.kind_to(peer) and self.offered_kind(peer, purpose) == "unix"

    def ring_capacity(self, in_use: int) -> int:
        """Return the bytes of the next ring, if the open rings occupy `in_use` bytes."""
        large, small = self._ring_sizes()
        return large if in_use + 2 * large <= LARGE_RINGS_TOTAL_BYTES else small

    def acceptable_capacities(self, kind: str, purpose: str) -> tuple[int, ...]:
        """Return the ring sizes that an offered lane of this kind may have; 0 where it has no rings."""
        if not is_ring(kind):
            return (0,)
        return (*self._ring_sizes(), 0) if purpose == "messages" else self._ring_sizes()  # those of calls have none

    def _ring_sizes(self) -> tuple[int, int]:
        return self._config.ring_bytes, min(self._config.ring_bytes, SMALL_RING_BYTES)

    def stream_count(self, peer: Seat, kind: str, purpose: str) -> int:
        """Return how many connections a lane gets."""
        if purpose == "messages" or kind not in SEALED_KINDS or self.most_streams == 1:
            return 1
        wanted = self._config.streams
        if wanted != "auto":
            return int(wanted)
        return streams_for(self._peers[peer].round_trip, usable_cores(), 1 + len(self._peers.here))


def is_ring(kind: str) -> bool:
    """Tell whether a lane is made of two rings in memory that both ends see."""
    return kind in ("shm", "memory")


def streams_for(round_trip: float, cores: int, ranks_here: int) -> int:
    """Return the connections of a secure lane: more if one would wait for acknowledgements, or if cores are idle.

    `cores` are those of this host that the executor may use, and `ranks_here` the ranks on it.
    """
    near = HELPED_STREAMS if cores >= HELPED_CORES * ranks_here else 1
    return max(near, next((count for limit, count in STREAMS_BY_ROUND_TRIP if round_trip < limit), STREAMS_FAR))


class LaneMaker:
    """Makes lanes of connected sockets, and of memory that both ends see."""

    def __init__(
        self, factory: LaneFactory, connections: LaneConnections, resumption: LaneResumption, striped: StripedLanes
    ) -> None:
        self._factory, self._connections, self._resumption, self._striped = factory, connections, resumption, striped

    def of_memory(self, memory: Any, sock: socket.socket, offer: messages.Offer, *, dialler: bool) -> Any:
        """Return the lane (for collectives) or the socket (for messages) that memory and a connected socket make."""
        if offer.purpose != "messages":
            return self._factory.ring(memory, offer.capacity, sock, first=dialler, kind=offer.kind)
        return self._factory.ring_socket(memory, offer.capacity, sock, first=dialler)

    def of_sockets(
        self, peer: Seat, socks: list[socket.socket], offer: messages.Offer, *, dialler: bool, udp_port: int = 0
    ) -> Any:
        """Return the lane (for collectives) or the socket (for messages) of sockets that a peer is connected to.

        `udp_port` is where the peer accepts QUIC, if the lane goes by QUIC and this end has dialled it.
        """
        factory = self._factory
        self._connections.watch(socks, offer.group, peer)
        if offer.purpose != "messages":
            is_resumable = self._resumption.is_wanted(peer, offer.kind)
            directs = [is_direct(sock) for sock in socks] if is_resumable else None
            if offer.is_striped:
                lane = factory.striped(socks, offer.secret, offer.lane, dialler=dialler, directs=directs)
                self._striped.watch(lane)
            elif offer.kind in SEALED_KINDS:
                lane = factory.sealed(
                    socks, offer.secret, offer.lane, dialler=dialler, directs=directs, kind=offer.kind
                )
            else:
                lane = factory.stream(socks[0], offer.kind, directs=directs)
            if is_resumable:
                self._resumption.watch(lane, peer, offer, udp_port)
            return lane
        if offer.kind not in SEALED_KINDS:
            return socks[0]
        from covey.net.lanes.sealed import SealedSocket  # slow to import, and not needed by ranks of one host

        return SealedSocket(socks[0], offer.secret, offer.lane, dialler=dialler)
