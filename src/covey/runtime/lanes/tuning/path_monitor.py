"""Looks for better paths to the peers while the run goes on, and moves their lanes. On the control loop.

A cable is plugged in, Wi-Fi fades, an address changes: the end of a pair that dials probes the other one's addresses
every few seconds, and at once when interfaces of this machine or addresses of the peer change. `tuning.path_choice`
decides; `lanes.tuning.moves` moves. The link stays where it is as long as it works: if its path dies, it is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, ConnectError
from covey.base.lane_kinds import LANE_KINDS
from covey.net.host import tcp
from covey.net.lanes.stream import is_resumable
from covey.runtime.lanes.tuning.path_choice import MoveReason, PathChoice, Quality
from covey.runtime.links.limits import DialLimits
from covey.runtime.links.sockets import RelayedSocket, RelayedWay, next_packet_limit
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.numbers import Seat
    from covey.net.discovery.interfaces import Interface
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.table import LaneTable
    from covey.runtime.lanes.tuning.moves import LaneMoves
    from covey.runtime.lanes.tuning.stripes import Stripes
    from covey.runtime.lanes.tuning.trials import StreamTrials
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.probe import Sounding
    from covey.runtime.peers.peer_table import PeerTable, Routes
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

TICK_SECONDS: Final = 1.0
"""How often the interfaces of this machine are listed, and how soon a better path is looked at again."""
PROBE_EVERY: Final = 5.0
"""How often the addresses of a peer are probed while nothing changes..."""
PEERS_IN_TIME: Final = 8
"""... of so many peers; of more, less often, so that probes cost the same."""
TRIAL_BYTES: Final = 1 << 20
TRIAL_SECONDS: Final = 0.3
"""A path of the same kind is tried with so much before lanes that are in use move there."""
CLEARLY_FASTER: Final = 1.3
"""What a trial must reach of the speed that the lanes have now."""
SAME_SECONDS: Final = 2.0
"""Both ends notice that a lane is stuck. What is noticed so soon after a move is about the path before."""
AVOID_SECONDS: Final = 120.0
"""How long lanes do not move to a network in which one got stuck."""
_PASSING: Final = (ConfigError, ConnectError, OSError)
"""No interface is up, or no descriptor is free: the next look may be better."""


class PathMonitor:
    """Watches the paths to the peers that this process dials."""

    def __init__(
        self,
        routes: Routes,
        peers: PeerTable,
        tasks: Tasks,
        groups: GroupRegistry,
        table: LaneTable,
        moves: LaneMoves,
        stripes: Stripes,
        trials: StreamTrials,
        tell: Callable[[str, RemoteProcess, str], None],
        *,
        has_limit: bool,
    ) -> None:
        """`tell` adds an event about a peer. A limit leaves room on the line, so that no path seems faster."""
        self._routes, self._peers, self._tasks, self._groups = routes, peers, tasks, groups
        self._table, self._moves, self._stripes, self._trials = table, moves, stripes, trials
        self._tell, self._has_limit = tell, has_limit
        self._limits = DialLimits()  # peers name the addresses, and may name others every second
        self._choices: dict[Seat, PathChoice] = {}
        self._due: dict[Seat, float] = {}
        """When the addresses of a peer are probed next."""
        self._known: dict[Seat, object] = {}
        """What the ways to a peer depended on when they were probed last."""
        self._seen: dict[Seat, dict[Where, Quality]] = {}
        """The addresses of a peer that answered when they were probed last."""
        self._moved_at: dict[Seat, float] = {}
        self._avoided: dict[Seat, tuple[str, float]] = {}
        """The network in which a lane with a peer got stuck, and until when no lane moves there."""
        self._is_watching = False

    def stuck(self, seat: Seat) -> None:
        """Leave the path of a lane whose bytes are not acknowledged; probes, which are short, may still pass there.

        If there is no other path, or a lane got stuck there, too, lanes that are opened from now on send shorter
        packets: the MTU of the path may be smaller than that of the interface. The end that dials chooses the path, and
        is told if it is not this one.
        """
        peer, now = self._peers[seat], time.monotonic()
        if peer.contact is None or self._peers.is_here(seat):
            return
        if not peer.is_dialled:
            self._peers.send(seat, messages.MoveLane(0, 0, "leave", 0))
            return
        if now < self._moved_at.get(seat, 0.0) + SAME_SECONDS:
            return
        seen, used = self._seen.get(seat, {}), peer.way
        network = seen[used].network if used in seen else ""
        avoided, until = self._avoided.get(seat, ("", 0.0))
        left = {network, avoided} if now < until else {network}
        others = [way for way, each in seen.items() if each.network not in left]
        if network and others:
            self._avoided[seat] = network, now + AVOID_SECONDS
            best = min(others, key=lambda way: seen[way])
            self._move(peer, best, seen[best].round_trip, MoveReason.STUCK)
        elif limit := next_packet_limit(peer.packet_limit):
            self._moved_at[seat] = now
            before, peer.packet_limit = peer.packet_limit, limit
            above = f"packets above {before} bytes" if before else "long packets"
            text = f"{above} seem not to pass (MTU): lanes send packets of {limit} bytes at most"
            logger.warning("%s: %s", self._peers.name_of(seat), text)
            self._tell("mtu", peer, text)
            self._moves.replace_messages(seat)  # they would be found out one by one

    def start(self) -> None:
        """Watch until the node closes."""
        if not self._is_watching:
            self._is_watching = True
            self._tasks.spawn(self._watch())

    async def _watch(self) -> None:
        while not self._tasks.is_closing:
            await asyncio.sleep(TICK_SECONDS)
            self._look_at_lanes()
            peers = [peer for peer in self._peers.values() if self._is_watched(peer)]
            if not peers:
                continue
            self._trials.look([peer for peer in peers if not self._stripes.has_several(peer.seat)])
            from covey.net.discovery.interfaces import recent_interfaces  # of no use to ranks that share memory

            try:
                own = recent_interfaces(self._routes.interfaces)
            except _PASSING:
                continue
            networks = [(each.name, each.kind, each.networks) for each in own]
            now, pause = time.monotonic(), PROBE_EVERY * max(1.0, len(peers) / PEERS_IN_TIME)
            for peer in peers:
                assert peer.contact is not None
                facts = networks, peer.contact.addresses
                if self._known.get(peer.seat) != facts:
                    self._known[peer.seat], self._due[peer.seat] = facts, now
            due = [peer for peer in peers if self._due[peer.seat] <= now]
            for peer in due:
                self._due[peer.seat] = now + pause
            await asyncio.gather(*(self._look(peer, own) for peer in due))

    def _look_at_lanes(self) -> None:
        """Leave the paths of lanes that are stuck, though no thread of their groups may be looking.

        A send returns when the kernel has the message, and the program may then wait for the rank that waits for it.
        """
        for key, lane in self._table.open_lanes("collectives"):
            if LANE_KINDS[lane.kind].is_of_network and not is_resumable(lane) and lane.is_stuck():
                self.stuck(key.peer)
                if (group := self._groups.get(key.group)) is not None:
                    group.lane_stuck(key.peer, key.attempt)
        for key, sock in self._table.open_lanes("messages"):
            if tcp.is_stuck(sock):
                self.stuck(key.peer)
                self._moves.replace(key)

    def _is_watched(self, peer: RemoteProcess) -> bool:
        """Tell whether this end dials the lanes of a peer on another host."""
        is_up = peer.link is not None and not peer.is_gone
        return is_up and peer.is_dialled and peer.contact is not None and not self._peers.is_here(peer.seat)

    async def _look(self, peer: RemoteProcess, own: list[Interface]) -> None:
        """Probe the addresses of a peer, and move its lanes if one of them is better for long enough."""
        from covey.runtime.links.probe import sound

        try:
            ways: list[Where] = [way for way in self._routes.to(peer, "tcp") if not isinstance(way, str)]
        except _PASSING:
            return
        if len(ways) < 2:
            await self._look_at_stripes(peer, {})
            return
        trips = {way: trip for way in ways if (trip := self._routes.round_trip(way)) is not None}
        ways, used = [way for way in ways if way not in trips], self._used(peer, ways)
        found = await asyncio.gather(*(sound(way, self._routes.credentials, self._limits) for way in ways))
        seen = {way: _quality(each, own) for way, each in zip(ways, found, strict=True) if each.round_trip >= 0}
        seen |= {way: Quality(0, True, trip, way[0], is_relayed=True) for way, trip in trips.items()}
        self._seen[peer.seat] = seen
        network, until = self._avoided.get(peer.seat, ("", 0.0))
        if time.monotonic() < until:
            seen = {way: each for way, each in seen.items() if way == used or each.network != network}
        choice = self._choices.setdefault(peer.seat, PathChoice())
        better = choice.look(used, seen, time.monotonic())
        if choice.is_undecided:
            self._due[peer.seat] = 0.0
        if not self._is_watched(peer):
            return
        if better is None:
            faster = None if choice.is_undecided else await self._look_at_stripes(peer, seen)
            if faster is not None:
                self._move(peer, faster, seen[faster].round_trip, MoveReason.FASTER)
            return
        way, reason = better
        if reason.needs_trial and not await self._is_faster(peer, way, reason):
            return
        self._move(peer, way, seen[way].round_trip, reason)

    async def _look_at_stripes(self, peer: RemoteProcess, seen: dict[Where, Quality]) -> Where | None:
        """Use more networks or fewer, unless a number of streams is being tried; see `Stripes.look`."""
        return None if self._trials.is_trying(peer.seat) else await self._stripes.look(peer, seen)

    def _used(self, peer: RemoteProcess, ways: list[Where]) -> Where | None:
        """Return the way of a peer's lanes. After its link has left a relay, that is not the way of the link."""
        for _, future in self._table.of_peer(peer.seat):
            if future.done() and future.exception() is None:
                with contextlib.suppress(AttributeError, IndexError, OSError):  # no sockets, or ended ones
                    sock = future.result().sockets()[0]
                    address = sock.getpeername()[:2]
                    relayed = (way for way in ways if isinstance(way, RelayedWay) and way[:2] == address)
                    if isinstance(sock, RelayedSocket) and (way := next(relayed, None)) is not None:
                        return way
        return peer.way

    async def _is_faster(self, peer: RemoteProcess, way: Where, reason: MoveReason) -> bool:
        """Try a path, if the lanes are in use: what they send may be why the round trip of theirs is long."""
        from covey.runtime.links.probe import throughput

        now = self._speed(peer.seat)
        if now is None or self._has_limit:  # which a trial would ignore
            return reason is MoveReason.ROUND_TRIP
        tried = await throughput(way, self._routes.credentials, TRIAL_BYTES, TRIAL_SECONDS)
        return tried >= CLEARLY_FASTER * now

    def _speed(self, seat: Seat) -> float | None:
        """Return how many bytes a second the fastest lane for collectives with a peer has sent; None if none has."""
        speeds = []
        for key, future in self._table.of_peer(seat):
            if key.purpose == "collectives" and future.done() and future.exception() is None:
                with contextlib.suppress(AttributeError):  # a lane without sockets
                    speeds.append(sum(tcp.sending_speed(sock) or 0.0 for sock in future.result().sockets()))
        return max(speeds, default=0.0) or None

    def _move(self, peer: RemoteProcess, way: Where, round_trip: float, reason: MoveReason) -> None:
        name = self._peers.name_of(peer.seat)
        self._moved_at[peer.seat] = time.monotonic()
        logger.info("lanes with %s move from %s to %s: %s", name, peer.way and peer.way[0], way[0], reason.value)
        peer.way, peer.round_trip = way, round_trip
        self._moves.move(peer.seat)


def _quality(found: Sounding, own: list[Interface]) -> Quality:
    """Return what a probe has found, with the interface by which it left."""
    from covey.net.discovery.interfaces import preference_of

    interface = next((each for each in own if found.local in each.addresses), None)
    assert found.way is not None
    remote = ipaddress.ip_address(found.way[0].partition("%")[0])
    medium = preference_of(interface)
    is_near = interface is not None and any(
        remote.version == each.version and remote in each.network for each in interface.networks
    )
    network = interface.name if interface is not None and is_near else found.way[0]
    return Quality(medium, not is_near, found.round_trip, network, isinstance(found.way, RelayedWay))
