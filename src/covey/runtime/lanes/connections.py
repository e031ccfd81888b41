"""The connections of lanes: how this end makes them, how they become lanes, and what looks after them meanwhile.

On the control loop.

Lanes on which packets get lost use BBR, Linux's congestion control that does not take a loss for a jam.

CUBIC, which Linux uses by default, halves what it sends whenever a packet is lost. On Wi-Fi or a long line packets are
lost without a jam, and 1 % of loss makes CUBIC ten times as slow as BBR (docs/benchmarks.md). Where nothing is lost,
CUBIC is as good and shares a network better, so a lane begins with what the system uses. The kernel changes it in the
middle of a transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, ConnectError
from covey.net.host import tcp
from covey.runtime.lanes.resumption import is_direct
from covey.runtime.lanes.tuning.rate_limits import ReceivingLimit, SendingLimit
from covey.runtime.links.address_race import first_of
from covey.runtime.links.handshake import connect
from covey.runtime.tasks import Recurring
from covey.wire import door

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from covey.base.numbers import Seat
    from covey.runtime.lanes.opener import LaneOpener, Prepared
    from covey.runtime.lanes.resumption import LaneResumption
    from covey.runtime.lanes.tuning.yielding import Urgency
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.peers.peer_table import PeerTable, Routes
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks
    from covey.wire import messages

logger = logging.getLogger("covey")

LOSS_SAMPLE_EVERY: Final = 1.0
"""How often the kernel is asked how many packets were sent, and how many of them again."""
LEAST_PACKETS: Final = 500
"""Smallest sample, in packets, from which a loss rate is computed."""
LOSSY: Final = 0.005
"""A path that loses this share of its packets, or more, is a lossy one."""
LOSSY_ADDRESSES: Final = 1024
"""Addresses that are remembered as lossy; then all are forgotten."""
STRIPE_TEND_EVERY: Final = 0.2
"""How often what a dead network of a lane had is sent again, and taken, though no operation may be running."""
TEND_AGAIN_SECONDS: Final = 0.01
"""The same while there is more to take from a lane."""


@dataclass
class _Watched:
    """A connection, and what was known of it when a share of losses was last taken."""

    sock: weakref.ref[socket.socket]
    address: str
    packets: tcp.SentPackets


class PacketLosses:
    """Watches the connections of one node's lanes."""

    def __init__(self, tasks: Tasks) -> None:
        self._watched = list[_Watched]()
        self._lossy: set[str] = set()
        """Addresses to which a path is lossy: new connections to them use BBR from the beginning."""
        self._is_told = False
        self._looking = Recurring(tasks.spawn, LOSS_SAMPLE_EVERY, self._look, is_needed=lambda: self._watched)

    def watch(self, socks: Sequence[socket.socket]) -> None:
        """Watch the connections of a lane until they are closed. Only TCP of Linux tells of losses."""
        for sock in socks:
            sent = tcp.sent_packets(sock)
            if sent is None or tcp.congestion_control(sock) in ("", tcp.BBR):
                continue
            try:
                own, address = (str(name[0]) for name in (sock.getsockname(), sock.getpeername()))
            except OSError:  # it is closed already
                continue
            if own == address or (address in self._lossy and tcp.use_bbr(sock)):
                continue
            self._watched.append(_Watched(weakref.ref(sock), address, sent))
        self._looking.begin()

    def _look(self, _seconds: float) -> None:
        self._watched = [each for each in self._watched if self._is_still_watched(each)]

    def _is_still_watched(self, watched: _Watched) -> bool:
        """Look at a connection; return whether to look again: it is open, and has not changed to BBR."""
        sock = watched.sock()
        sent = None if sock is None else tcp.sent_packets(sock)
        if sock is None or sent is None:
            return False
        if sent.sent - watched.packets.sent < LEAST_PACKETS:
            return True
        lost, watched.packets = sent.lost_since(watched.packets), sent
        if lost < LOSSY:
            return True
        if len(self._lossy) >= LOSSY_ADDRESSES:
            self._lossy.clear()
        self._lossy.add(watched.address)
        if tcp.use_bbr(sock):
            logger.info(
                "%.1f %% of the packets to %s are lost: the lane uses BBR from now on", 100 * lost, watched.address
            )
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%.1f %% of the packets to %s are lost, which makes lanes slow, and this system does not let covey use "
                "BBR: as root, `modprobe tcp_bbr` and `sysctl -w net.ipv4.tcp_congestion_control=bbr`",
                100 * lost,
                watched.address,
            )
        return False


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
        (sock, _), _ = await first_of(
            ways,
            lambda way: connect(way, credentials, door.Purpose.LANE, packet_limit=peer.packet_limit),
            lambda opened: opened[0].close(),
        )
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
