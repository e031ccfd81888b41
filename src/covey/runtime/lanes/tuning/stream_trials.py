"""Tries whether lanes with more streams are faster, and replaces lanes accordingly. On the control loop.

With `streams="auto"`, a sealed lane between machines begins with a number that follows from its round trip
(`lanes.kinds`). While it carries much, the end of the pair that dials measures it and lets
`tuning.stream_choice` decide; a lane with another number of streams takes its place at an operation's boundary, as in
any move. A group whose lane carries little keeps the few streams it has: descriptors are not for nothing.

A lane is measured by what its own end sends. What the other end sends over it is not known here.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.lane_kinds import LANE_KINDS
from covey.base.settings import STREAMS_LIMIT
from covey.net.host import descriptors, tcp
from covey.net.lanes.stream import is_striped
from covey.runtime.lanes.tuning.stream_choice import SpeedWindow, StreamChoice
from covey.runtime.lanes.tuning.trials import TrialVerdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.kinds import LaneRules
    from covey.runtime.lanes.table import LaneKey, LaneTable
    from covey.runtime.lanes.tuning.moves import LaneMoves
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.remote_process import RemoteProcess

FAR_ROUND_TRIP: Final = 0.002
"""The shortest round trip at which streams are tried: below, a single one waits for the processor and not for
acknowledgements."""
REPLACEMENT_SECONDS: Final = 30.0
"""How long after a failure a replacement is asked for again: the link may have been gone for a moment."""


class _PeerStreams(NamedTuple):
    """What is known of streams to one peer, over one path."""

    way: Where | None
    choice: StreamChoice


def may_try_streams(config: GroupConfig) -> bool:
    """Tell whether more streams may be tried: not with a set number, nor with a limit, which they would share."""
    kind = LANE_KINDS.get(config.lanes)
    is_free = config.streams == "auto" and not config.limit and (kind is None or kind.can_spread)
    return is_free and sys.platform == "linux"


class StreamTrials:
    """The lanes of one process whose number of streams is chosen by trials."""

    def __init__(
        self,
        groups: GroupRegistry,
        table: LaneTable,
        rules: LaneRules,
        moves: LaneMoves,
        tell: Callable[[str, RemoteProcess, str], None],
        *,
        is_allowed: bool,
    ) -> None:
        """`tell` adds an event about a peer."""
        self._groups, self._table, self._rules, self._moves, self._tell = groups, table, rules, moves, tell
        self._is_allowed = is_allowed
        self._peers: dict[Seat, _PeerStreams] = {}
        self._windows: weakref.WeakKeyDictionary[Any, SpeedWindow] = weakref.WeakKeyDictionary()
        """By lane."""
        self._asked: weakref.WeakKeyDictionary[Any, tuple[int, float]] = weakref.WeakKeyDictionary()
        """By lane: the streams of the replacement that was asked for last, and when."""

    def is_trying(self, seat: Seat) -> bool:
        """Tell whether a number of streams to a peer is being tried."""
        return seat in self._peers and self._peers[seat].choice.is_trying

    def reason(self, seat: Seat) -> str:
        """Return why the lanes with a peer have the streams that they have; empty if this end did not choose."""
        return self._peers[seat].choice.reason if seat in self._peers else ""

    def look(self, peers: list[RemoteProcess]) -> None:
        """Measure the lanes with peers that this end dials, and replace those that should have other streams."""
        if not self._is_allowed:
            return
        lanes: dict[Seat, list[tuple[LaneKey, Any]]] = {peer.seat: [] for peer in peers}
        for key, lane in self._table.open_lanes("collectives"):
            if key.peer in lanes and LANE_KINDS[lane.kind].can_spread and not is_striped(lane) and _is_far(lane):
                lanes[key.peer].append((key, lane))
        for peer in peers:
            if lanes[peer.seat]:
                self._look(peer, lanes[peer.seat], time.monotonic())

    def _look(self, peer: RemoteProcess, lanes: list[tuple[LaneKey, Any]], now: float) -> None:
        known = self._peers.get(peer.seat)
        if known is None or known.way != peer.way:
            first = self._rules.stream_count(peer.seat, self._rules.kind_to(peer.seat), "collectives")
            known = self._peers[peer.seat] = _PeerStreams(peer.way, StreamChoice(first))
        choice, speeds = known.choice, {}
        for key, lane in lanes:
            speed = self._speed(lane, now)
            if speed is not None:
                speeds[key] = speed, lane
        fit = {key: found for key, found in speeds.items() if len(found[1].sockets()) == choice.count}
        if fit:
            key = max(fit, key=lambda each: fit[each][0])
            speed, lane = fit[key]
            if choice.take(choice.count, speed, now, self._most(key)) is TrialVerdict.FASTER:
                self._tell("lane", peer, f"{lane.kind} lane keeps {choice.count} streams: {choice.reason}")
        for key, lane in lanes:
            if len(lane.sockets()) != choice.count and (key in speeds or lane in self._asked):
                self._replace(key, lane, choice, now)

    def _speed(self, lane: Any, now: float) -> float | None:
        facts = [each for sock in lane.sockets() if (each := tcp.path_facts(sock)) is not None]
        if len(facts) < len(lane.sockets()):
            return None
        sent = sum(each.acknowledged for each in facts)
        return self._windows.setdefault(lane, SpeedWindow()).take(sent, [each.busy / 1e6 for each in facts], now)

    def _most(self, key: LaneKey) -> int:
        """Return the most streams that a lane can use at once: no more than a usual transfer has records."""
        from covey.wire.seal import SPREAD_RECORD_LIMIT  # slow to import, and not needed by ranks of one host

        group = self._groups.get(key.group)
        sent, sends = (0, 0) if group is None else group.sent_to(key.peer)
        return min(STREAMS_LIMIT, sent // max(1, sends) // SPREAD_RECORD_LIMIT)

    def _replace(self, key: LaneKey, lane: Any, choice: StreamChoice, now: float) -> None:
        """Have a lane replaced by one with the chosen streams, unless that is under way, or has just failed."""
        count, moves = choice.count, self._moves
        asked, when = self._asked.get(lane, (0, 0.0))
        if moves.is_replacing(key):
            return
        if asked == count and now < when + REPLACEMENT_SECONDS:
            choice.refused(now)  # if it is a trial
            return
        if count > len(lane.sockets()) and count > descriptors.left() // 2:  # the program needs some, too
            choice.refused(now)
            return
        self._asked[lane] = count, now
        moves.reopen(key, count)


def _is_far(lane: Any) -> bool:
    """Tell whether acknowledgements take so long that a stream may wait for them."""
    facts = tcp.path_facts(lane.sockets()[0])
    return facts is not None and facts.round_trip >= FAR_ROUND_TRIP
