"""The connections of lanes: how this end makes them, how they become lanes, and what looks after them meanwhile.

On the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, ConnectError
from covey.runtime.lanes.resumption import is_direct
from covey.runtime.lanes.tuning.packet_losses import PacketLosses
from covey.runtime.lanes.tuning.receiving_limit import ReceivingLimit
from covey.runtime.lanes.tuning.sending_limit import SendingLimit
from covey.runtime.links.address_race import connect_any
from covey.wire import door

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from covey.base.numbers import Seat
    from covey.runtime.lanes.opener import LaneOpener, Prepared
    from covey.runtime.lanes.resumption import LaneResumption
    from covey.runtime.lanes.tuning.urgency import Urgency
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.peers.peer_table import PeerTable, Routes
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks
    from covey.wire import messages


STRIPE_TEND_EVERY: Final = 0.2
"""How often what a dead network of a lane had is sent again, and taken, though no operation may be running."""
TEND_AGAIN_SECONDS: Final = 0.01
"""The same while there is more to take from a lane."""


class LaneConnections:
    """Dials the connections of lanes, and keeps the limits of this machine on those that are open."""

    def __init__(
        self,
        routes: Routes,
        openers: dict[str, LaneOpener],
        limit: float,
        peers: PeerTable,
        tasks: Tasks,
        urgency: Callable[[int], Urgency],
    ) -> None:
        """`openers` are by kind, and `limit` is the setting.

        `urgency` tells how the lanes of a group share the limit with others.
        """
        self._routes, self._openers, self._peers = routes, openers, peers
        self.limit = SendingLimit(limit, peers, tasks, urgency)
        """Spaces out what the lanes send, if there is a limit here or at the other end."""
        self._receiving_limit = ReceivingLimit(limit, peers, tasks)
        """Tells peers how fast they may send, if there is a limit."""
        self._losses = PacketLosses(tasks)
        """Changes how lanes send on which packets get lost."""

    def watch(self, socks: Sequence[socket.socket], group: int, peer: Seat) -> None:
        """Look after the connections of a group's lane to a peer, until they are closed."""
        self.limit.watch(socks, group, peer)
        self._receiving_limit.watch(socks, peer)
        self._losses.watch(socks)

    def own_port(self, kind: str) -> int:
        """Return the UDP port at which this end accepts lanes of a kind: 0 if it does so where links are accepted.

        Raises:
            ConfigError, OSError: it cannot accept any.
        """
        return self._openers[kind].port()

    async def dial(
        self,
        peer: RemoteProcess,
        kind: str,
        prove: Callable[[socket.socket], Awaitable[None]],
        *,
        udp_port: int = 0,
        only: Sequence[Where] = (),
    ) -> socket.socket:
        """Connect to a peer for a lane, at the first of its addresses that works, or of `only` those; then `prove` it.

        A peer that hangs up may not know the cluster's new secret: the previous one is tried while it is valid.

        Raises:
            ConnectError: no address works, or `prove` has raised it.
            ConfigError: there is no address.
        """
        ways = self._openers[kind].ways(list(only) or self._routes.to(peer, kind), udp_port)
        if not ways:
            raise ConfigError(f"{self._peers.name_of(peer.seat)} has no address that can be dialled from here")
        *others, last = self._routes.credentials.good()
        for credentials in others:
            with contextlib.suppress(ConnectError):
                return await self._dial(ways, credentials, peer, prove)
        return await self._dial(ways, last, peer, prove)

    async def _dial(
        self,
        ways: list[Where],
        credentials: LinkCredentials,
        peer: RemoteProcess,
        prove: Callable[[socket.socket], Awaitable[None]],
    ) -> socket.socket:
        sock = await connect_any(ways, credentials, door.Purpose.LANE, packet_limit=peer.packet_limit)
        try:
            await prove(sock)
        except BaseException:
            sock.close()
            raise
        return sock


class StripedLanes:
    """The open lanes of one process that go over several networks, whichever end has dialled them."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._lanes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_tending = False

    def watch(self, lane: Any) -> None:
        """Tend a lane until it is closed."""
        self._lanes.add(lane)
        if not self._is_tending:
            self._is_tending = True
            self._tasks.spawn(self._tend())

    async def _tend(self) -> None:
        try:
            while self._lanes and not self._tasks.is_closing:
                has_more = False
                for lane in list(self._lanes):
                    if lane.sockets()[0].fileno() < 0:
                        self._lanes.discard(lane)
                    else:
                        has_more = lane.tend() or has_more
                await asyncio.sleep(TEND_AGAIN_SECONDS if has_more else STRIPE_TEND_EVERY)
        finally:
            self._is_tending = False


class LaneMaker:
    """Makes lanes of the connections of an offer, and has them looked after."""

    def __init__(
        self,
        openers: dict[str, LaneOpener],
        connections: LaneConnections,
        resumption: LaneResumption,
        striped: StripedLanes,
    ) -> None:
        """`openers` are by kind."""
        self._openers, self._connections, self._resumption, self._striped = openers, connections, resumption, striped

    async def dialled(
        self, prepared: Prepared, peer: Seat, socks: list[socket.socket], offer: messages.Offer, udp_port: int
    ) -> Any:
        """Return the lane (for collectives) or the socket (for messages) of connections that this end has dialled.

        `prepared` is what it made before, and `udp_port` where the peer accepts QUIC.
        """
        directs = self._begin(peer, socks, offer)
        opened = await self._openers[offer.kind].dialled(prepared, socks, offer, directs)
        return self._look_after(opened, peer, offer, udp_port, is_resumable=directs is not None)

    async def accepted(self, peer: Seat, socks: list[socket.socket], offer: messages.Offer) -> Any:
        """Return the lane (for collectives) or the socket (for messages) of connections that this end has accepted."""
        directs = self._begin(peer, socks, offer)
        opened = await self._openers[offer.kind].accepted(socks, offer, directs)
        return self._look_after(opened, peer, offer, 0, is_resumable=directs is not None)

    def _begin(self, peer: Seat, socks: list[socket.socket], offer: messages.Offer) -> list[bool] | None:
        """Have connections looked after; for a resumable lane, tell of each whether it is direct."""
        if not offer.capacity:
            self._connections.watch(socks, offer.group, peer)
        is_resumable = offer.purpose != "messages" and self._resumption.is_wanted(peer, offer.kind)
        return [is_direct(sock) for sock in socks] if is_resumable else None

    def _look_after(self, opened: Any, peer: Seat, offer: messages.Offer, udp_port: int, *, is_resumable: bool) -> Any:
        if offer.is_striped:
            self._striped.watch(opened)
        if is_resumable:
            self._resumption.watch(opened, peer, offer, udp_port)
        return opened
