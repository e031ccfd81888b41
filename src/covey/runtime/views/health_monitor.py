"""Connects `proto.health` with the peers of a node: reports lost ones, and shows suspicion in their state.

On the control loop.

A pulled cable ends no connection, a stopped process answers nothing, a busy one answers late. What tells them apart:
the kernel of another machine acknowledges what it receives while it runs and can be reached, and the keeper of a
process reports whether the process exists.

The core gets a clock that runs on while the machine sleeps. After a sleep a tick is late then, as after a stop of the
process, and all deadlines start anew: else peers that were heard before count as silent while the network comes up.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.numbers import Seat
from covey.net.host.machine import waking_clock
from covey.proto import health
from covey.runtime.counters import process
from covey.runtime.peers.remote_process import PeerEvent, PeerState
from covey.runtime.tasks import CoreDriver
from covey.runtime.views.process_table import LOOK_CLOSELY_EVERY, LOOK_CLOSELY_SECONDS, ProcessStatus
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.errors import ConfigError
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

AGEING: Final = 1.05
"""Factor by which a stored round trip is inflated per new sample, so that old offsets expire."""


class HealthListener(Protocol):
    """Acts on the opinions of health."""

    def silent(self, seat: Seat, reason: str, cause: health.Cause) -> None:
        """A peer should be given up."""

    def trusted(self, seat: Seat) -> None:
        """Such a peer is heard again."""

    def unheard(self, seat: Seat) -> None:
        """A peer is not heard on its link, but may be heard on another."""


class ClockOffsets:
    """The best measurement for each peer: that of the shortest round trip. On the control loop; any thread may read."""

    def __init__(self) -> None:
        self._best: dict[Seat, tuple[float, float]] = {}
        """By seat: the round trip, made longer with every measurement since, and the offset."""

    def measured(self, seat: Seat, round_trip: float, offset: float) -> None:
        """Take a measurement, in seconds; half of the round trip is the most by which the offset can be wrong."""
        best = self._best.get(seat)
        if best is None or round_trip <= best[0] * AGEING:
            self._best[seat] = round_trip, offset
        else:
            self._best[seat] = best[0] * AGEING, best[1]

    def offsets(self) -> dict[Seat, float]:
        """Return by how many seconds the clock of each peer is ahead."""
        return {seat: offset for seat, (_, offset) in sorted(self._best.copy().items())}


class HealthMonitor:
    """Judges the peers of one node."""

    def __init__(
        self,
        peers: PeerTable,
        host: str,
        config: GroupConfig,
        listener: HealthListener,
        *,
        tell_of_peer: Callable[[str, RemoteProcess], None],
        clocks: ClockOffsets,
        tasks: Tasks,
    ) -> None:
        """Begin without an opinion; `tell_of_peer` adds an event that shows one, and `host` is this one."""
        self._peers, self._host, self._listener = peers, host, listener
        self._tell_of_peer, self._clocks, self._tasks = tell_of_peer, clocks, tasks
        silences = health.Silences(config.heartbeat, config.host_silence, config.process_silence)
        self._health = health.Health(host, waking_clock(), silences)
        self._pings: dict[Seat, tuple[int, float]] = {}
        """By seat: the number of the last ping, and when it was sent."""
        self._process_table: dict[Seat, ProcessStatus] = {}
        """By seat: processes of this host, as the kernel reports them."""
        self._watched: set[Seat] = set()
        self._given_up: set[Seat] = set()
        self._driver = CoreDriver(self._health, self, is_ticking=False, clock=waking_clock)

    async def keep(self) -> None:
        """Judge all peers until cancelled."""
        for peer in self._peers.values():
            self.watch(peer)
        try:
            await self._driver.run()
        finally:
            self._driver.close()

    def watch(self, peer: RemoteProcess) -> None:
        """Begin to judge a peer, or trust it again in the next generation."""
        if peer.seat in self._watched and peer.seat not in self._given_up:
            return  # otherwise every pair would ping at the start of each generation
        self._watched.add(peer.seat)
        is_here = peer.contact is not None and peer.contact.host == self._host
        if is_here and peer.card.pid and peer.life and peer.seat not in self._process_table:
            self._process_table[peer.seat] = ProcessStatus(peer.life, peer.card.pid, time.monotonic())
        if peer.contact is not None and not peer.is_excluded and not peer.has_left and peer.life:
            self._health.watch(_id(peer.seat), peer.contact.host, waking_clock())
            peer.note(PeerEvent.TRUSTED)
            if peer.link is not None:
                self._health.link_up(_id(peer.seat), waking_clock())
            self._driver.settle_soon()

    def link_up(self, peer: RemoteProcess) -> None:
        """Note a new link with a peer."""
        self._health.link_up(_id(peer.seat), waking_clock())
        self._show(peer)
        self._driver.settle_soon()

    def link_rests(self, seat: Seat) -> None:
        """Note that the link with a peer rests."""
        self._pings.pop(seat, None)
        self._health.link_rests(_id(seat))

    def link_lost(self, seat: Seat) -> None:
        """Note that the link with a peer ended; on this host, ask the kernel whether the process ended, too."""
        self._health.link_lost(_id(seat), waking_clock())
        self._show(self._peers[seat])
        self._driver.settle_soon()
        if seat in self._process_table:
            self._look(seat, time.monotonic() + LOOK_CLOSELY_SECONDS)

    def _look(self, seat: Seat, until: float) -> None:
        status, now = self._process_table.get(seat), time.monotonic()
        if status is None or self._tasks.is_closing or self._peers[seat].link is not None:
            return
        status.look(now)
        if status.state is health.ProcessState.EXITED:
            self._health.vouched(_id(seat), status.state, waking_clock())
            self._driver.settle_soon()
        elif now < until:
            asyncio.get_running_loop().call_later(LOOK_CLOSELY_EVERY, self._look, seat, until)

    def heard(self, seat: Seat) -> None:
        """Note that a peer sent a message of any kind."""
        self._health.heard(_id(seat), waking_clock())
        if self._peers[seat].is_suspected or seat in self._given_up:
            self._driver.settle_soon()

    def vouched(self, peer: RemoteProcess, value: int) -> None:
        """Take what the keeper of a peer reports about its process."""
        with contextlib.suppress(ValueError):  # a value of a later version
            self._health.vouched(_id(peer.seat), health.ProcessState(value), waking_clock())
            self._driver.settle_soon()

    def answered(self, seat: Seat, number: int, clock: float) -> None:
        """Take the answer to a ping; `clock` is the peer's, in seconds since 1970."""
        sent, at = self._pings.pop(seat, (-1, 0.0))
        if sent == number:
            taken = time.monotonic() - at
            self._peers[seat].last_ping = taken
            self._health.round_trip(_id(seat), taken)
            process.heartbeats_answered += 1
            self._clocks.measured(seat, taken, clock + taken / 2 - time.time())

    def is_unheard(self, seat: Seat) -> bool:
        """Tell whether a peer is not heard on its link."""
        return self._health.is_unheard(_id(seat))

    def forget(self, seat: Seat) -> None:
        """Judge a peer no more."""
        self._health.forget(_id(seat))
        self._process_table.pop(seat, None)
        self._watched.discard(seat)
        self._given_up.discard(seat)

    # Effects

    def perform(self, effect: health.Effect) -> None:
        """Perform one effect of the core."""
        seat = Seat(int.from_bytes(effect.peer, "big"))
        peer = self._peers[seat]
        self._show(peer)
        match effect:
            case health.SendPing():
                self._ping(peer)
            case health.Dead(_, cause, reason):
                self._given_up.add(seat)
                reason = reason.replace(f"host {_host(peer)}", f"host {peer.card.host_name}".rstrip())
                self._listener.silent(seat, reason, cause)
            case health.Unheard():
                self._listener.unheard(seat)
            case health.Trust() if seat in self._given_up:
                self._given_up.discard(seat)
                self._listener.trusted(seat)
            case health.Suspect():  # shown as the state of the peer
                process.suspicions += 1
            case health.Trust():
                pass

    def settled(self) -> None:
        """All that follows from an effect is done by then."""

    def failed(self, error: ConfigError) -> None:
        """Raise: no effect of this core writes to disk."""
        raise error

    def _show(self, peer: RemoteProcess) -> None:
        """Make the opinion of health the state of a peer."""
        is_suspected = self._health.is_suspected(_id(peer.seat))
        before = peer.state
        peer.note(PeerEvent.SUSPECTED if is_suspected else PeerEvent.TRUSTED)
        if peer.state is before:
            return
        if peer.state is PeerState.SUSPECTED:
            self._tell_of_peer("suspected", peer)
        elif before is PeerState.SUSPECTED:
            self._tell_of_peer("recovered", peer)

    def _ping(self, peer: RemoteProcess) -> None:
        if peer.link is None:
            return
        if peer.contact is not None and peer.contact.host != self._host:
            age = peer.link.acknowledged_seconds_ago()
            if age is not None:
                self._health.acknowledged(_id(peer.seat), waking_clock() - age)
        number = secrets.randbits(32)
        self._pings[peer.seat] = number, time.monotonic()
        process.heartbeats_sent += 1
        self._peers.send(peer.seat, messages.Ping(number))


def _id(seat: Seat) -> bytes:
    return seat.to_bytes(4, "big")


def _host(peer: RemoteProcess) -> str:
    return peer.contact.host if peer.contact is not None else ""
