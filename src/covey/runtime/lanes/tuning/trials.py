"""Trials: a change of how lanes are sent is kept if it is clearly faster than what was there before.

Several networks (`stripes`) and more streams are judged by a `LaneTrial`. After a trial the next one comes later and
later, because each takes a little of what it wants to improve.

`StreamTrials` tries whether lanes with more streams are faster, and replaces lanes accordingly, on the control loop.
With `streams="auto"`, a sealed lane between machines begins with a number that follows from its round trip
(`lanes.kinds`). While it carries much, the end of the pair that dials measures it and lets `StreamChoice` decide; a
lane with another number of streams takes its place at an operation's boundary, as in any move. A group whose lane
carries little keeps the few streams it has: descriptors are not for nothing. A lane is measured by what its own end
sends. What the other end sends over it is not known here.

A stream that waits for acknowledgements, or slows down for each lost packet, leaves a part of a long path unused; many
streams use more of it. Where one stream fills the path, or where a bottleneck is shared, more of them gain nothing.
Only a trial tells which it is: GROWTH times as many streams are used for a while, and kept if each of LOOKS
measurements is clearly above all that were made before.
"""

from __future__ import annotations

import enum
import sys
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.lane_kinds import LANE_KINDS
from covey.base.settings import STREAMS_LIMIT
from covey.net.host import descriptors, tcp
from covey.net.lanes.stream import is_striped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.kinds import LaneRules
    from covey.runtime.lanes.table import LaneKey, LaneTable
    from covey.runtime.lanes.tuning.moves import LaneMoves
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.remote_process import RemoteProcess

CLEAR_GAIN: Final = 1.1
"""What a change must reach of the speed before it."""
FIRST_REST_SECONDS: Final = 10.0
MOST_REST_SECONDS: Final = 600.0
"""How long nothing is tried after a trial: twice as long each time."""


class Rests:
    """The pauses between trials."""

    def __init__(self) -> None:
        self._next, self._until = FIRST_REST_SECONDS, 0.0

    def begin(self, now: float) -> None:
        """Rest from now on, twice as long as the last time."""
        self._until = now + self._next
        self._next = min(MOST_REST_SECONDS, 2 * self._next)

    def is_over(self, now: float) -> bool:
        """Tell whether a trial may begin."""
        return now >= self._until

    def shorten(self) -> None:
        """Let the next rest be short: a trial has shown that something can be gained."""
        self._next = FIRST_REST_SECONDS


class TrialVerdict(enum.Enum):
    """What is known of a trial."""

    UNDECIDED = "undecided"
    FASTER = "faster"
    NOT_FASTER = "not faster"


class LaneTrial:
    """A change that is being tried, and the speed before it."""

    def __init__(self, before: float, looks: int = 1) -> None:
        """It is faster if it was so `looks` times in a row; once is enough if a speed is that of a long time."""
        self.before = before
        self._left = looks
        self.verdict = TrialVerdict.UNDECIDED

    def judge(self, speed: float) -> TrialVerdict:
        """Take a speed that was measured with the change. A verdict stays what it is."""
        if self.verdict is TrialVerdict.UNDECIDED:
            self._left -= 1
            if speed < CLEAR_GAIN * self.before:
                self.verdict = TrialVerdict.NOT_FASTER
            elif self._left <= 0:
                self.verdict = TrialVerdict.FASTER
        return self.verdict


GROWTH: Final = 4
LEAST_GROWTH: Final = 2
"""What a trial multiplies the number of streams by, and the least that is worth one."""
LOOKS: Final = 3
"""Speeds that are measured at least before a trial, and with it."""
REMEMBERED: Final = 8
"""Speeds before a trial that it is compared with, if so many are known: the more, the rarer is a gain by chance."""
WINDOW_BYTES: Final = 1 << 20
WINDOW_SECONDS: Final = 0.75
"""Bytes that a lane sends, and seconds in which it is sending, before a speed is taken from them: a busy lane has one
at each look of the path monitor."""
LEAST_SENDING_SHARE: Final = 0.1
"""The share of the time in which a lane must be sending: one that is hardly used has nothing to gain."""
FAR_ROUND_TRIP: Final = 0.002
"""The shortest round trip at which streams are tried: below, a single one waits for the processor and not for
acknowledgements."""
REPLACEMENT_SECONDS: Final = 30.0
"""How long after a failure a replacement is asked for again: the link may have been gone for a moment."""


class SpeedWindow:
    """Turns counters of a lane, which only grow, into speeds of one stretch of time after the other."""

    def __init__(self) -> None:
        self._sent, self._busy, self._since = 0, list[float](), 0.0

    def take(self, sent: int, busy: Sequence[float], now: float) -> float | None:
        """Return the bytes a second since the last stretch, while the lane was sending; None if it is not over.

        `sent` is what all streams have sent so far, and `busy` the seconds in which each of them was sending.
        """
        is_known = len(self._busy) == len(busy)
        seconds = max((later - before for before, later in zip(self._busy, busy, strict=False)), default=0.0)
        if is_known and (sent - self._sent < WINDOW_BYTES or seconds < WINDOW_SECONDS):
            return None
        speed = (sent - self._sent) / seconds if is_known else None
        is_hardly_used = seconds < LEAST_SENDING_SHARE * (now - self._since)
        self._sent, self._busy, self._since = sent, list(busy), now
        return None if is_hardly_used else speed


class StreamChoice:
    """The number of streams of the lanes with one peer."""

    def __init__(self, first: int) -> None:
        """`first` is the number that lanes have before anything was tried."""
        self.count = self._kept = first
        """How many streams lanes should have; and how many have turned out to be best."""
        self.reason = ""
        """Why, in words; empty before the first trial."""
        self._trial: LaneTrial | None = None
        self._rests = Rests()
        self._speeds: deque[float] = deque(maxlen=REMEMBERED)
        """The last ones that were measured with `count` streams."""

    @property
    def is_trying(self) -> bool:
        """Whether `count` is only tried."""
        return self._trial is not None

    def take(self, streams: int, speed: float, now: float, most: int) -> TrialVerdict | None:
        """Take a speed of a lane with so many streams; return the verdict, if there is one on a trial.

        `most` is the largest number that may be tried now.
        """
        if streams != self.count:  # the lane is still to be replaced
            return None
        self._speeds.append(speed)
        if self._trial is not None:
            return self._judge(self._trial, speed, now)
        wanted = min(most, GROWTH * streams)
        if len(self._speeds) >= LOOKS and wanted >= LEAST_GROWTH * streams and self._rests.is_over(now):
            self._trial = LaneTrial(max(self._speeds), LOOKS)
            self._speeds.clear()
            self.count = wanted
            self.reason = f"to find out whether more than {_spelled(self._trial.before)} is possible"
        return None

    def _judge(self, trial: LaneTrial, speed: float, now: float) -> TrialVerdict | None:
        verdict = trial.judge(speed)
        if verdict is TrialVerdict.UNDECIDED:
            return None
        compared = f"{_spelled(speed)} instead of {_spelled(trial.before)}"
        if verdict is TrialVerdict.FASTER:
            self._kept, self._trial = self.count, None
            self.reason = compared
            self._rests.shorten()
        else:
            self._give_up(f"{self.count} were not faster, {compared}", now)
        return verdict

    def refused(self, now: float) -> None:
        """Note that no lane with the number that is tried can be opened: descriptors are short, or the peer refuses."""
        if self._trial is not None:
            self._give_up(f"{self.count} could not be opened", now)

    def _give_up(self, reason: str, now: float) -> None:
        self.count, self._trial, self.reason = self._kept, None, reason
        self._speeds.clear()
        self._rests.begin(now)


def _spelled(speed: float) -> str:
    return f"{speed / 1e6:.3g} MB/s"


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
