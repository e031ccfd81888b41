"""Lanes over several networks at once: whether they are worth it, and what they need while they are in use.

Where two machines have more than one network in common, the end of a pair that dials tries the others with a megabyte.
If one of them carries a good share of what the lane does, the lane is replaced, at an operation's boundary as in any
move, by one with a stream on each (`native/striped.c`). Once that one has sent enough, what it does is compared with
what the lane did before; if it is not clearly more, or if a network is gone, a lane over one network takes its place.

Both ends tend such lanes: what a dead network had is sent again, also while the program is in no operation, and taken
by the other end, also while that is in none. On the control loop.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from covey.base.lane_kinds import LANE_KINDS
from covey.net.host import tcp
from covey.net.lanes.stream import is_striped
from covey.runtime.lanes.tuning.path_monitor import TRIAL_BYTES, TRIAL_SECONDS
from covey.runtime.lanes.tuning.trials import LaneTrial, Rests, TrialVerdict
from covey.runtime.links.sockets import RelayedWay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.lanes.table import LaneTable
    from covey.runtime.lanes.tuning.moves import LaneMoves
    from covey.runtime.lanes.tuning.path_choice import Quality
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.peer_table import PeerTable, Routes
    from covey.runtime.peers.remote_process import RemoteProcess

LEAST_STRIPED_BYTES: Final = 8 << 20
"""A lane is worth several networks if it has sent so much."""
JUDGED_BYTES: Final = 32 << 20
"""What a lane over several networks sends before it is compared with the one before."""
LEAST_NETWORK_SHARE: Final = 0.2
"""A network is used if it carries so much of what the lane does on the best one: less is not worth its delays."""
MOST_NETWORKS: Final = 4
WIRELESS: Final = 2
"""The place of Wi-Fi in the order of interfaces. What follows, such as a VPN, sends over one of the others."""
GONE_LOOKS: Final = 2
"""How often a network must have been silent before a lane stops to use it."""


def networks_beside(used: Where | None, seen: Mapping[Where, Quality]) -> list[Where]:
    """Return the best address of each network that could carry a part of what goes to `used`. Pure.

    Only networks that both machines are in count: through routers and relays, two addresses may share one link.
    """
    if used is None or used not in seen or not _is_own_link(used, seen[used]):
        return []
    best: dict[str, Where] = {}
    for way, quality in sorted(seen.items(), key=lambda item: item[1]):
        if _is_own_link(way, quality) and quality.network != seen[used].network:
            best.setdefault(quality.network, way)
    return list(best.values())[: MOST_NETWORKS - 1]


def worth_using(used: Where, speed: float, tried: Mapping[Where, float]) -> list[Where]:
    """Return the addresses whose networks carry a good share of what the fastest does, in the order of `tried`. Pure.

    `speed` is that of the lane as it is, over `used`, which comes first if it is one of them; `tried` has the speeds of
    the others. If `used` is none of them, the fastest comes first.
    """
    best = max(speed, *tried.values())
    good = [way for way, each in tried.items() if each >= LEAST_NETWORK_SHARE * best]
    if speed >= LEAST_NETWORK_SHARE * best:
        return [used, *good]
    return sorted(good, key=lambda way: -tried[way])


def _is_own_link(way: Where, quality: Quality) -> bool:
    return not isinstance(way, RelayedWay) and not quality.is_routed and quality.medium <= WIRELESS


def sending(lane: Any) -> tuple[int, float]:
    """Return how many bytes a lane has sent, and how many of them a second while it was sending; 0 if unknown."""
    known = [facts for sock in lane.sockets() if (facts := tcp.path_facts(sock)) is not None]
    total, busy = sum(each.acknowledged for each in known), max((each.busy for each in known), default=0)
    return total, total / busy * 1e6 if busy else 0.0


@dataclass
class _Peer:
    """What is known of several networks to one peer."""

    ways: list[Where]
    """The address on each network; empty if only one is used."""
    trial: LaneTrial = field(default_factory=lambda: LaneTrial(0.0))
    """Whether more networks have turned out to be faster than one."""
    gone: int = 0
    """How often in a row one of them was silent."""
    rests: Rests = field(default_factory=Rests)

    @property
    def is_confirmed(self) -> bool:
        return self.trial.verdict is TrialVerdict.FASTER


def may_stripe(config: GroupConfig) -> bool:
    """Tell whether lanes of a process with these settings may go over several networks."""
    return config.stripe == "auto" and not config.limit and sys.platform == "linux"


class Stripes:
    """To which peers the lanes that this end dials go over several networks."""

    def __init__(
        self, routes: Routes, peers: PeerTable, table: LaneTable, moves: LaneMoves, *, is_allowed: bool
    ) -> None:
        self._routes, self._peers, self._table, self._moves, self._is_allowed = routes, peers, table, moves, is_allowed
        self._known: dict[Seat, _Peer] = {}

    def has_several(self, seat: Seat) -> bool:
        """Tell whether several networks to a peer are used, or being tried."""
        return seat in self._known and bool(self._known[seat].ways)

    async def look(self, peer: RemoteProcess, seen: Mapping[Where, Quality]) -> Where | None:
        """Take the addresses of a peer that answer now: use more networks, or fewer.

        Returns an address to move the lanes to, if it is so much faster that their own network would add nothing.
        """
        if not self._is_allowed:
            return None
        state = self._known.setdefault(peer.seat, _Peer([]))
        lanes = [
            future.result()
            for key, future in self._table.of_peer(peer.seat)
            if key.purpose == "collectives" and future.done() and future.exception() is None
        ]
        lanes = [lane for lane in lanes if LANE_KINDS[lane.kind].can_spread]
        if state.ways:
            self._review(peer, state, [lane for lane in lanes if is_striped(lane)], seen)
        busy = [
            speed
            for lane in lanes
            if not is_striped(lane)
            for sent, speed in [sending(lane)]
            if sent >= LEAST_STRIPED_BYTES
        ]
        if not busy or not state.rests.is_over(time.monotonic()):
            return None
        if state.is_confirmed and state.ways:  # a lane of another group, or of another view
            self._moves.stripe(peer.seat, state.ways)
        elif not state.ways:
            return await self._try(peer, state, max(busy), networks_beside(peer.way, seen))
        return None

    async def _try(self, peer: RemoteProcess, state: _Peer, now: float, others: list[Where]) -> Where | None:
        from covey.runtime.links.probe import throughput

        if not others or not now or peer.way is None:
            return None
        used, tried = peer.way, {}
        for way in others:
            tried[way] = await throughput(way, self._routes.credentials, TRIAL_BYTES, TRIAL_SECONDS)
        state.rests.begin(time.monotonic())
        good = worth_using(used, now, tried)
        if peer.way != used or not self._peers[peer.seat].is_dialled:
            return None
        if used not in good:
            return good[0]
        if len(good) > 1:
            state.ways, state.trial, state.gone = good, LaneTrial(now), 0
            self._moves.stripe(peer.seat, state.ways)
        return None

    def _review(self, peer: RemoteProcess, state: _Peer, striped: list[Any], seen: Mapping[Where, Quality]) -> None:
        """Stop to use several networks if one of them is gone, or if that is not faster."""
        state.gone = 0 if all(way in seen for way in state.ways) else state.gone + 1
        judged = [speed for lane in striped for sent, speed in [sending(lane)] if sent >= JUDGED_BYTES]
        if judged and not state.is_confirmed and state.trial.judge(max(judged)) is TrialVerdict.FASTER:
            state.rests.shorten()
        is_slow = state.trial.verdict is TrialVerdict.NOT_FASTER
        if is_slow or state.gone >= GONE_LOOKS or peer.way not in state.ways:
            state.rests.begin(time.monotonic())
            state.ways = []
            if striped:
                self._moves.move(peer.seat)
        elif not striped and not state.is_confirmed and state.rests.is_over(time.monotonic()):
            state.ways = []  # it was refused, or could not be opened
