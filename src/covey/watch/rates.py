"""Rates of one process and of the links from it, and the history of a run for curves. Pure.

Rates are differences of counters. Those of two answers are compared on the clock of the process itself, so that it does
not matter how long an answer was on its way.

The history is an hour, and bounded: moments of the last ten minutes are a second apart, older ones ten seconds. What
the program reported before this process began to look is in front, as far as the ranks still know it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.watch.overview import LinkSeen, Moment
from covey.watch.waits import LinkLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.wire.progress import PeerProgress, RankProgress, ReportRow

STEADY_RATE_SECONDS: Final = 2.0
"""What is concluded about speeds holds for at least so many seconds."""
SPELL_SECONDS: Final = 1.0
SPELL_OPERATIONS: Final = 2
"""What holds at every step holds in two spells one after the other, each of so many seconds and operations at least."""
ALMOST: Final = 0.9
"""Answers are about a second apart, and sometimes a little less."""
COMPARED_SECONDS: Final = 30.0
"""How far back answers are compared."""
COMPARED_FLOW_SECONDS: Final = 4.0
"""How far back what moved over links is compared."""
LEAST_RATED_US: Final = 20_000
LEAST_ACKNOWLEDGED: Final = 1 << 17
"""Microseconds of sending, and bytes, from which a speed is taken: less than that tells of round trips only."""


MEDIUM_NAMES: Final = {"local": "loopback", "wired": "cable", "wireless": "Wi-Fi"}
USUAL_SPEEDS: Final = 60
"""Speeds of a link that are kept, one a round, to know what is usual for it."""
LATELY: Final = 3
"""The last ones do not tell what is usual: the link may have changed since."""
NAMED_LINKS: Final = 1024
"""Links of one run; those of the machines that come first."""


class ProcessRates(NamedTuple):
    """What a process did since its answer before: seconds in and outside of operations in each second, and bytes."""

    compute: float | None = None
    sync: float | None = None
    sent: float | None = None
    received: float | None = None


class PeerFlow(NamedTuple):
    """What moved from one process to another rank."""

    sent: float = 0.0
    """Bytes a second."""
    speed: float | None = None
    """Bytes a second while something was being sent; None if too little was."""
    busy: float = 0.0
    """The share of the time in which the network held up what was to be sent, 0 to 1."""
    per_operation: float = 0.0
    """Bytes in each operation."""


class _Reading(NamedTuple):
    taken_ns: int
    spent_ns: int
    sequence: int
    moved: int
    progress: RankProgress | None
    """None once it is old."""


class Counters:
    """The counters of one process as it has told them lately."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def add(self, progress: RankProgress) -> None:
        """Take an answer; one that came before the last is left out."""
        readings, now = self._readings, progress.taken_ns
        if readings and now <= readings[-1].taken_ns:
            return
        if readings and progress.spent_ns < readings[-1].spent_ns:  # another process
            readings.clear()
        sequence = progress.groups[0].sequence if progress.groups else 0
        moved = progress.sent + progress.received
        readings.append(_Reading(now, progress.spent_ns, sequence, moved, progress))
        while now - readings[0].taken_ns > COMPARED_SECONDS * 1e9:
            readings.popleft()
        for at, old in enumerate(readings):
            if now - old.taken_ns <= COMPARED_FLOW_SECONDS * 1e9:
                break
            if old.progress is not None:
                readings[at] = old._replace(progress=None)

    def begin_anew(self) -> None:
        """Forget what was before the last answer: what follows is about another state of the run."""
        while len(self._readings) > 1:
            self._readings.popleft()

    def last_second(self) -> ProcessRates:
        """Return what it did between its last two answers."""
        if len(self._readings) < 2:
            return ProcessRates()
        before, after = self._readings[-2].progress, self._readings[-1].progress
        if before is None or after is None:
            return ProcessRates()
        lasted = (after.taken_ns - before.taken_ns) / 1e9
        sync = min(1.0, max(0.0, (after.spent_ns - before.spent_ns) / 1e9 / lasted))
        sent, received = max(0, after.sent - before.sent) / lasted, max(0, after.received - before.received) / lasted
        return ProcessRates(1.0 - sync, sync, sent, received)

    def steady_seconds(self) -> float | None:
        """Return how long two spells, one after the other, must be to tell how this process is doing at every step.

        Each has some operations. None if that is not known yet.
        """
        for middle in reversed(self._readings):
            last = self._readings[-1]
            seconds = (last.taken_ns - middle.taken_ns) / 1e9
            if seconds < SPELL_SECONDS * ALMOST or last.sequence - middle.sequence < SPELL_OPERATIONS:
                continue
            first = self._at(2 * seconds)
            if first is not None and middle.sequence - first.sequence >= SPELL_OPERATIONS:
                return seconds
        return None

    def shares(self, seconds: float) -> tuple[float, float] | None:
        """Return the shares of time in operations of two spells of so many seconds, up to now and before that."""
        middle, first = self._at(seconds), self._at(2 * seconds)
        if middle is None or first is None or first.taken_ns >= middle.taken_ns:
            return None
        return _share(middle, self._readings[-1]), _share(first, middle)

    def share(self, seconds: float) -> float | None:
        """Return the share of so many last seconds that it has spent in operations; None if that is not known."""
        before = self._at(seconds)
        return None if before is None else _share(before, self._readings[-1])

    def _at(self, seconds: float) -> _Reading | None:
        """Return what it told so many seconds before its last answer; None if that is not known."""
        for before in reversed(self._readings):
            if self._readings[-1].taken_ns - before.taken_ns >= seconds * ALMOST * 1e9:
                return before
        return None

    def moved(self) -> int | None:
        """Return how many bytes collectives have moved in the last seconds; None if that is not known yet."""
        before = self._at(STEADY_RATE_SECONDS)
        return None if before is None else max(0, self._readings[-1].moved - before.moved)

    def flows(self) -> dict[int, PeerFlow]:
        """Return what moved to each rank in the last second."""
        before = self._at(SPELL_SECONDS)
        if before is None or before.progress is None:
            return {}
        last, progress = self._readings[-1], self._readings[-1].progress
        assert progress is not None
        lasted, operations = (last.taken_ns - before.taken_ns) / 1e9, max(1, last.sequence - before.sequence)
        earlier: Mapping[int, PeerProgress] = {peer.rank: peer for peer in before.progress.peers}
        return {
            peer.rank: _flow(earlier[peer.rank], peer, lasted, operations)
            for peer in progress.peers
            if peer.rank in earlier
        }


def _share(first: _Reading, last: _Reading) -> float:
    return min(1.0, max(0.0, (last.spent_ns - first.spent_ns) / (last.taken_ns - first.taken_ns)))


def _flow(before: PeerProgress, after: PeerProgress, lasted: float, operations: int) -> PeerFlow:
    acknowledged, busy = after.acknowledged - before.acknowledged, after.busy_us - before.busy_us
    if acknowledged < 0 or busy < 0:  # another lane
        return PeerFlow()
    is_enough = busy >= LEAST_RATED_US and acknowledged >= LEAST_ACKNOWLEDGED
    return PeerFlow(
        acknowledged / lasted,
        acknowledged / busy * 1e6 if is_enough else None,
        min(1.0, busy / 1e6 / lasted),
        acknowledged / operations,
    )


class LinkBook:
    """The links between the machines of a run, one for each direction, and what is usual for each."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, str], deque[float]] = {}
        """What each has carried lately, a round at a time."""
        self._whole: dict[tuple[str, str], float | None] = {}
        """What each has carried since its lanes were opened."""

    def look(
        self, told: Iterable[tuple[str, RankProgress, Counters]], machine_of: Mapping[int, str]
    ) -> tuple[list[LinkSeen], list[LinkLoad]]:
        """Return the links, and what they carry now.

        `told` has the machine, the last answer and the counters of each process; `machine_of` the machine of each rank.
        """
        links: dict[tuple[str, str], LinkSeen] = {}
        flows: dict[tuple[str, str], list[PeerFlow]] = {}
        for source, progress, counters in told:
            moved = counters.flows()
            for peer in progress.peers:
                target = machine_of.get(peer.rank)
                pair = source, target or ""
                if target in (None, source) or (pair not in links and len(links) >= NAMED_LINKS):
                    continue
                flow = moved.get(peer.rank, PeerFlow())
                links[pair] = _joined(links.get(pair), *pair, peer, flow, is_known=peer.rank in moved)
                flows.setdefault(pair, []).append(flow)
        self._whole = {pair: link.bytes_per_second for pair, link in links.items()}
        self._speeds = {pair: self._speeds.get(pair) or deque(maxlen=USUAL_SPEEDS) for pair in links}
        for pair, speeds in self._speeds.items():
            if known := [flow.speed for flow in flows[pair] if flow.speed is not None]:
                speeds.append(max(known))
                links[pair] = replace(links[pair], bytes_per_second=max(known))
        loads = [
            LinkLoad(
                *pair,
                sum(flow.sent for flow in each),
                max(flow.busy for flow in each),
                max(flow.per_operation for flow in each),
            )
            for pair, each in flows.items()
        ]
        return [links[pair] for pair in sorted(links)], loads

    def usual(self, source: str, target: str) -> float | None:
        """Return what a link carried before the last seconds; None if that is not known."""
        before = list(self._speeds.get((source, target), ()))[:-LATELY]
        return median(before) if len(before) >= LATELY else self._whole.get((source, target))


def _joined(
    known: LinkSeen | None, source: str, target: str, peer: PeerProgress, flow: PeerFlow, *, is_known: bool
) -> LinkSeen:
    """Return a link of which one more pair of processes has told."""
    trip = peer.round_trip if peer.round_trip >= 0 else None
    rate = peer.rate if peer.rate >= 0 else None
    sent = flow.sent if is_known else None
    if known is None:
        known = LinkSeen(source, target)
    return LinkSeen(
        source=source,
        target=target,
        lane=peer.lane or known.lane,
        medium=MEDIUM_NAMES.get(peer.medium, "") or known.medium,
        relay="a relay" if peer.is_relayed else known.relay,
        bytes_per_second=max((each for each in (rate, known.bytes_per_second) if each is not None), default=None),
        sent_per_second=known.sent_per_second if sent is None else sent + (known.sent_per_second or 0.0),
        round_trip=min((each for each in (trip, known.round_trip) if each is not None), default=None),
    )


CURVE_SECONDS: Final = 3600.0
FINE_SECONDS: Final = 600.0
COARSE_EVERY: Final = 10.0
EARLIER_LIMIT: Final = 1000
"""Moments from before this process looked."""
MOMENTS_LIMIT: Final = 2 * int(FINE_SECONDS + CURVE_SECONDS / COARSE_EVERY)
"""Moments at most, whatever the clock does."""


class Curves:
    """The moments of one run."""

    def __init__(self) -> None:
        self._rows: Sequence[ReportRow] = ()
        self._earlier: tuple[Moment, ...] = ()
        """The rows as moments, none of which is later than the first moment that was seen."""
        self._has_seen = False
        """Whether a moment was added in which the program had reported."""
        self._coarse: list[Moment] = []
        self._fine: list[Moment] = []

    def begin(self, rows: Sequence[ReportRow]) -> None:
        """Take what was reported before; of more rows than are kept, evenly many."""
        self._rows = rows[:: max(1, -(-len(rows) // EARLIER_LIMIT))]
        self._put_rows_in_front()

    def _put_rows_in_front(self) -> None:
        seen = (moment for moment in (*self._coarse, *self._fine) if _tells(moment))
        first = next(seen, None)
        self._earlier = tuple(
            Moment(
                row.at if first is None else min(row.at, first.at),
                row.step,
                dict(row.values),
                None if row.compute < 0 else row.compute + row.sync,
                None if row.compute < 0 else row.compute,
                None if row.sync < 0 else row.sync,
            )
            for row in self._rows
            if first is None or _is_before(row, first)
        )

    def add(self, moment: Moment) -> None:
        """Add a moment, and thin out old ones."""
        self._fine.append(moment)
        if not self._has_seen and _tells(moment):
            self._has_seen = True
            self._put_rows_in_front()
        oldest = 0
        while oldest < len(self._fine) and self._fine[oldest].at < moment.at - FINE_SECONDS:
            past = self._fine[oldest]
            if not self._coarse or not 0 <= past.at - self._coarse[-1].at < COARSE_EVERY:
                self._coarse.append(past)
            oldest += 1
        del self._fine[:oldest]
        while self._coarse and (
            self._coarse[0].at < moment.at - CURVE_SECONDS or len(self._coarse) > MOMENTS_LIMIT // 2
        ):
            del self._coarse[0]
        del self._fine[: max(0, len(self._fine) - MOMENTS_LIMIT // 2)]

    def since(self, at: float) -> tuple[Moment, ...]:
        """Return the moments after a time, oldest first."""
        moments = (*self._earlier, *self._coarse, *self._fine)
        return tuple(sorted((moment for moment in moments if moment.at > at), key=lambda moment: moment.at))

    def __len__(self) -> int:
        return len(self._earlier) + len(self._coarse) + len(self._fine)


def _tells(moment: Moment) -> bool:
    return moment.step is not None or bool(moment.reports)


def _is_before(row: ReportRow, moment: Moment) -> bool:
    """Tell whether a row came before a moment, whose time is when its round of questions began, not its answer."""
    return row.at < moment.at or (row.step is not None and moment.step is not None and row.step < moment.step)
