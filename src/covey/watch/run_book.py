"""What a collector remembers of one run from round to round, and what views are shown of it. Pure.

Ranks that were lost stay in the list, so that rows keep their places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from covey.base.numbers import operation_name
from covey.base.version import __version__
from covey.watch import verdict
from covey.watch.happenings import TimeLine
from covey.watch.overview import Moment, RankSeen, RunSeen
from covey.watch.rates import SPELL_SECONDS, STEADY_RATE_SECONDS, Counters, Curves, LinkBook
from covey.watch.waits import RankPosition, SlowLink, long_operation, slow_link, slow_rank, waits
from covey.wire.messages import RANKS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.watch.asking import HeardProcess, RunEnd
    from covey.watch.overview import RankState, RunState
    from covey.watch.waits import LinkLoad, Waits
    from covey.wire.progress import RankProgress, ReportRow

SILENT_AFTER: Final = 2.5
"""A rank that has not answered for so long is silent."""
GONE_AFTER: Final = 4.0
"""A run of which no process is linked for so long is over."""
FORGOTTEN_AFTER: Final = 60.0
"""A process that has not answered for so long, and has no rank, is forgotten."""
TOLD_STATES: Final[dict[str, RankState]] = {"lost": "lost", "excluded": "lost", "left": "left", "leaving": "left"}
"""The state of a rank that others are in doubt about."""
NO_SPEEDS: Final[Mapping[tuple[str, str], float]] = {}
GONE: Final = ("lost", "left", "joining")
"""States of ranks that take no part in operations."""


@dataclass
class KnownProcess:
    """One process of a run, as it was heard last."""

    heard: HeardProcess
    """The last time that it answered, or was seen at all."""
    progress: RankProgress | None = None
    arrived: float = 0.0
    asked: float = 0.0
    """When it was asked for what it has answered last."""
    counters: Counters = field(default_factory=Counters)


class RunBook:
    """One run."""

    def __init__(self, id: str, name: str, at: float) -> None:
        self.id, self.name, self.first_seen = id, name, at
        self.curves = Curves()
        self.last_seen = at
        self._told: dict[str, KnownProcess] = {}
        self._by_rank: dict[int, str] = {}
        """The key of the process that has each rank now, or had it last."""
        self._generation = -1
        self._time_line = TimeLine()
        self._links = LinkBook()
        self._slow: Steady[tuple[int, float]] = Steady()
        self._narrow: Steady[SlowLink] = Steady()
        self._waits: tuple[str, ...] = ()
        self._is_joining = True
        self._fault: tuple[int, str] | None = None
        self._end: RunEnd | None = None
        self._best: RunSeen | None = None
        self._has_begun = False
        self._lost: dict[int, str] = {}
        """By rank of this generation: why it was lost."""
        self.is_over = False
        self.wants_reports = True
        """Whether what was reported before this process looked is not known yet."""

    # What was heard

    def take(self, heard: Sequence[HeardProcess], now: float, at: float) -> None:
        """Take what the processes of this run have said in one round."""
        answered = [each for each in heard if each.has_answered]
        if heard:
            self.last_seen = now
        if answered:
            self.is_over = False
        for each in heard:
            told = self._told.get(each.key)
            if told is None:
                if not each.has_answered:
                    continue
                told = self._told[each.key] = KnownProcess(each)
            told.heard = each
            if each.progress is not None:
                self._progressed(told, each.progress)
            elif each.has_answered:
                told.arrived = each.arrived
        missing = self._told.keys() - {each.key for each in heard}
        for key in missing:
            told = self._told[key]
            told.heard = _unheard(told.heard)
            if now - told.arrived > FORGOTTEN_AFTER and key not in self._by_rank.values():
                del self._told[key]
        self._is_joining = not any(told.progress is not None for told in self._told.values())
        self._waits = _waits_of([each for each in answered if each.tell is not None and each.tell.wait is not None])
        if now - self.last_seen > GONE_AFTER:
            self.is_over = True

    def end(self, end: RunEnd) -> None:
        """Note that the run is over, and how."""
        self.is_over, self._end = True, end
        if end.fault and self._fault is None:
            self._fault = -1, end.fault

    def begin_curves(self, rows: Sequence[ReportRow]) -> None:
        """Take what the program has reported since it began."""
        self.curves.begin(rows)
        self.wants_reports = False

    def _progressed(self, told: KnownProcess, progress: RankProgress) -> None:
        told.progress, told.arrived, told.asked = progress, told.heard.arrived, told.heard.asked
        told.counters.add(progress)
        if progress.generation > self._generation:
            self._generation = progress.generation
            if self._has_begun:
                self._by_rank.clear()  # ranks are numbered anew
                self._lost.clear()
        if progress.generation == self._generation and 0 <= progress.rank < RANKS_LIMIT:
            self._by_rank[progress.rank] = told.heard.key
            self._has_begun = True
        has_machines = len({each.heard.machine for each in self._told.values()}) > 1
        for event in progress.events:
            self._time_line.take(event, ahead=told.heard.clock_offset, has_machines=has_machines)
        for group in progress.groups:
            if group.fault and self._fault is None:
                self._fault = progress.rank, group.fault
        if all(not group.fault for group in progress.groups) and self._fault and self._fault[0] == progress.rank:
            self._fault = None  # it goes on with another group

    # What is shown

    def seen(
        self,
        now: float,
        at: float,
        machines: Mapping[str, str],
        speeds: Mapping[tuple[str, str], float] = NO_SPEEDS,
        *,
        can_stop: bool,
        can_checkpoint: bool,
    ) -> RunSeen:
        """Return the run as views show it, and add a moment to its history.

        `machines` has names by id, and `speeds` what links between them can carry of which no more is known.
        """
        current = {rank: self._told[key] for rank, key in sorted(self._by_rank.items()) if key in self._told}
        doubts = self._doubts(current, now)
        there = {rank: told for rank, told in current.items() if not self._is_gone(rank, doubts)}
        positions = [_position(rank, told, now) for rank, told in there.items() if told.progress is not None]
        waiting = waits(positions)
        if any(
            each.since >= STEADY_RATE_SECONDS for each in waiting.values()
        ):  # one long wait says nothing of every step
            for told in current.values():
                told.counters.begin_anew()
        waited_for = {rank for each in waiting.values() for rank in each.waits_for}
        ranks = [
            self._rank(rank, told, now, waiting.get(rank), doubts.get(rank), is_waited_for=rank in waited_for)
            for rank, told in current.items()
        ]
        ranks += self._joining(now)
        live = [rank for rank in ranks if rank.state not in GONE]
        told_of = [current[rank.rank] for rank in live]
        values, who, row_step = _combined(told_of)
        state = self._state()
        sync = _mean([rank.sync for rank in live])
        compute = _mean([rank.compute for rank in live])
        step_seconds = compute + sync if row_step is not None and compute is not None and sync is not None else None
        sent = _sum([rank.sent_per_second for rank in live])
        links, loads = self._links.look(
            [
                (told.heard.machine, told.progress, told.counters)
                for told in there.values()
                if told.progress is not None
            ],
            {rank: told.heard.machine for rank, told in there.items()},
        )
        long = long_operation(positions, now)
        moved = [each for told in there.values() if (each := told.counters.moved()) is not None]
        facts = verdict.RunFacts(
            name=self.name,
            state=state,
            ranks=ranks,
            machines=machines,
            waits=self._waits,
            fault="" if self._fault is None else self._fault[1],
            fault_rank=None if self._fault is None or self._fault[0] < 0 else self._fault[0],
            outcome="" if self._end is None else self._end.outcome,
            change=self._time_line.last("lost", "left", "joined"),
            has_state=self._has_state(),
            generation=self._generation,
            size=max((told.progress.live for told in told_of if told.progress is not None), default=len(live)),
            is_recovering=any(told.progress.is_recovering for told in told_of if told.progress is not None),
            now=at,
            waited={rank: each.since for rank, each in waiting.items()},
            slow=self._slow_rank(there, ranks),
            slow_link=self._slow_link(there, loads, now),
            long=long,
            moved=sum(moved) / STEADY_RATE_SECONDS if moved else None,
            has_reports=any(told.progress is not None and told.progress.reported for told in current.values()),
            runs_for=now - self.first_seen,
            reports=values,
            step=row_step,
            tells_less=self._tell_less(machines),
            own_version=__version__,
        )
        seen = RunSeen(
            id=self.id,
            name=self.name,
            state=state,
            began=min((told.progress.began for told in current.values() if told.progress is not None), default=None),
            program=next((told.progress.program for told in current.values() if told.progress is not None), ""),
            sentence=verdict.of_run(facts),
            ranks=tuple(ranks),
            links=tuple(
                replace(link, bytes_per_second=speeds.get((link.source, link.target)))
                if link.bytes_per_second is None
                else link
                for link in links
            ),
            reports=values,
            reported_by=who,
            step=row_step,
            step_seconds=step_seconds,
            compute_seconds=compute if row_step is not None else None,
            sync_seconds=sync if row_step is not None else None,
            samples_per_second=_samples(values, step_seconds, told_of),
            saved=_saved([told.progress for told in told_of if told.progress is not None]),
            happenings=self._time_line.shown(),
            can_stop=can_stop and not self.is_over,
            can_checkpoint=can_checkpoint and state == "running",
        )
        if state == "running":
            self.curves.add(
                Moment(at, row_step, dict(values), step_seconds, seen.compute_seconds, seen.sync_seconds, sent)
            )
            self._best = seen
        elif self.is_over and self._best is not None and not ranks:
            seen = replace(self._best, state=state, sentence=seen.sentence, can_stop=False, can_checkpoint=False)
        return seen

    def _state(self) -> RunState:
        if self.is_over:
            has_failed = self._fault is not None or (self._end is not None and self._end.has_failed)
            return "failed" if has_failed else "ended"
        return "waiting" if self._is_joining else "running"

    def _rank(
        self,
        rank: int,
        told: KnownProcess,
        now: float,
        waiting: Waits | None,
        doubt: tuple[str, str] | None,
        *,
        is_waited_for: bool,
    ) -> RankSeen:
        progress, heard = told.progress, told.heard
        age = max(0.0, now - told.arrived)
        group = progress.groups[0] if progress is not None and progress.groups else None
        is_silent = age > SILENT_AFTER
        state: RankState = "active"
        reason = ""
        if rank in self._lost:
            state, reason = "lost", self._lost[rank]
        elif doubt is not None and (known := TOLD_STATES.get(doubt[0])) is not None:
            state, reason = known, doubt[1]
            if known == "lost":
                self._lost[rank] = reason
                self._time_line.explain(self._generation, rank, reason)
        elif heard.process == "ended" or self.is_over:
            state, reason = ("left" if self.is_over else "lost"), "its process has ended"
        elif heard.process == "stopped":
            state, reason = "stopped", f"process {heard.pid} is stopped"
        elif is_silent:
            state, reason = "silent", doubt[1] if doubt is not None else f"it has not answered for {age:.0f} s"
        elif is_waited_for:
            state, reason = "late", "other ranks are in an operation that it has not begun"
        elif waiting is not None:
            state = "waiting"
        if progress is None:
            return RankSeen(rank, heard.machine, heard.pid, state, reason, age=age)
        compute, sync, sent, received = told.counters.last_second()
        report = progress.report
        if report is not None and report.step is not None and report.compute >= 0:
            compute, sync = report.compute, report.sync
        is_in = group is not None and group.is_running
        return RankSeen(
            rank=rank,
            machine=heard.machine,
            pid=progress.pid,
            state=state,
            reason=reason,
            step=None if report is None else report.step,
            operation=operation_name(group.operation) if group is not None and is_in else "",
            operation_age=None if group is None or not group.sequence else group.age_ns / 1e9 + age,
            sequence=None if group is None else group.sequence,
            waits_for=() if waiting is None or state in ("lost", "left") else waiting.waits_for,
            compute=compute,
            sync=sync,
            sent_per_second=sent,
            received_per_second=received,
            saved=_saved([progress]),
            codec=progress.codec,
            codec_reason=progress.codec_reason,
            plan=progress.plan,
            age=age,
        )

    def _joining(self, now: float) -> list[RankSeen]:
        """Return the processes that wait for the run; they have no ranks yet."""
        found = []
        for told in self._told.values():
            tell = told.heard.tell
            if tell is not None and tell.state == "joining" and told.heard.key not in self._by_rank.values():
                found.append(RankSeen(-1, told.heard.machine, told.heard.pid, "joining", age=now - told.arrived))
        return sorted(found, key=lambda each: (each.machine, each.pid))

    def _doubts(self, current: Mapping[int, KnownProcess], now: float) -> dict[int, tuple[str, str]]:
        """Return what the ranks that answer say of those that are not well: the state that most name, and why."""
        votes: dict[int, dict[str, list[str]]] = {}
        for told in current.values():
            if told.progress is None or now - told.arrived > SILENT_AFTER:
                continue
            if told.progress.generation != self._generation:
                continue
            for doubt in told.progress.doubts:
                votes.setdefault(doubt.rank, {}).setdefault(doubt.state, []).append(doubt.why)
        found = {}
        for rank, states in votes.items():
            fresh = current.get(rank)
            state, reasons = max(sorted(states.items()), key=lambda each: len(each[1]))
            is_well = fresh is not None and fresh.progress is not None and now - fresh.arrived <= SILENT_AFTER
            if is_well and state not in ("excluded", "left", "leaving"):
                continue  # it answers, and nothing follows yet
            found[rank] = state, next(filter(None, reasons), "")
        return found

    def _is_gone(self, rank: int, doubts: Mapping[int, tuple[str, str]]) -> bool:
        return rank in self._lost or (rank in doubts and doubts[rank][0] in TOLD_STATES)

    def _has_state(self) -> bool:
        """Tell whether those that joined last have got the state of the run."""
        joined, restored = self._time_line.last("joined"), self._time_line.last("restored")
        return joined is not None and restored is not None and restored.generation == joined.generation

    def _slow_rank(self, there: Mapping[int, KnownProcess], ranks: Sequence[RankSeen]) -> tuple[int, float] | None:
        """Return the rank for which the others wait at every step, if it was so in two rounds one after the other."""
        if any(rank.state not in ("active", "waiting", "late") for rank in ranks if rank.rank in there):
            return self._slow.take(None, None)
        looks = _last_step_and_second(there) or _two_spells(there)
        found = [slow_rank(shares) for shares in looks]
        if len(found) < 2 or found[0] is None or found[1] is None or found[0][0] != found[1][0]:
            return self._slow.take(None, None)
        return self._slow.take(found[0][0], (found[0][0], min(found[0][1], found[1][1])))

    def _slow_link(self, there: Mapping[int, KnownProcess], loads: Sequence[LinkLoad], now: float) -> SlowLink | None:
        """Return the link that the ranks wait for most of the time, and what is usual for it."""
        fresh = [told.counters.share(SPELL_SECONDS) for told in there.values() if now - told.arrived <= SILENT_AFTER]
        load = slow_link(loads, [share for share in fresh if share is not None])
        if load is None:
            return self._narrow.take(None, None)
        found = SlowLink(load, self._links.usual(load.source, load.target))
        held = self._narrow.take("a link", found)
        return found if found.has_fallen else held

    def _tell_less(self, machines: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return the machines, with their releases, of processes that do not know the question."""
        found = {
            (machines.get(told.heard.machine, told.heard.machine), told.heard.version)
            for told in self._told.values()
            if told.heard.tells_less
        }
        return sorted(found)


def _last_step_and_second(there: Mapping[int, KnownProcess]) -> list[dict[int, float]]:
    """Return the shares of time in operations, of the last step and of the last second, if all programs tell steps."""
    steps: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for rank, told in there.items():
        report = None if told.progress is None else told.progress.report
        share = told.counters.share(SPELL_SECONDS)
        if report is None or report.compute < 0 or report.compute + report.sync <= 0 or share is None:
            return []
        steps[rank], seconds[rank] = report.sync / (report.compute + report.sync), share
    return [steps, seconds]


def _two_spells(there: Mapping[int, KnownProcess]) -> list[dict[int, float]]:
    """Return the shares of time in operations of two spells one after the other, of equal length for all ranks."""
    steady = [told.counters.steady_seconds() for told in there.values()]
    known = [seconds for seconds in steady if seconds is not None]
    if len(known) < len(steady) or not known:
        return []
    spells = {rank: told.counters.shares(max(known)) for rank, told in there.items()}
    if any(each is None for each in spells.values()):
        return []
    return [{rank: each[at] for rank, each in spells.items() if each} for at in range(2)]


Found = TypeVar("Found")


class Steady(Generic[Found]):
    """Holds what two rounds say one after the other, so that a moment makes no sentence come and go."""

    def __init__(self) -> None:
        self._before: object = None
        self._held: tuple[object, Found | None] = None, None

    def take(self, about: object, found: Found | None) -> Found | None:
        """Take what one round has found, and about whom; return what two rounds in a row have said last."""
        if about == self._before or about == self._held[0]:
            self._held = about, found
        self._before = about
        return self._held[1]


def _unheard(heard: HeardProcess) -> HeardProcess:
    return replace(heard, progress=None, tell=None, tells_less=False)


def _position(rank: int, told: KnownProcess, now: float) -> RankPosition:
    assert told.progress is not None
    is_silent = now - told.arrived > SILENT_AFTER or told.heard.process in ("stopped", "ended")
    return RankPosition(rank, told.arrived, told.asked, told.progress.groups, is_silent=is_silent)


def _waits_of(heard: Sequence[HeardProcess]) -> tuple[str, ...]:
    """Return what processes wait for: the first text, then their troubles."""
    lines: dict[str, None] = {}
    for each in heard:
        assert each.tell is not None
        assert each.tell.wait is not None
        lines.setdefault(each.tell.wait.text)
    for each in heard:
        assert each.tell is not None
        assert each.tell.wait is not None
        for trouble in (*each.tell.wait.seeds, *each.tell.wait.refused, *each.tell.wait.problems):
            lines.setdefault(f"{trouble.where}: {trouble.why}")
    return tuple(lines)[:16]


def _combined(told: Sequence[KnownProcess]) -> tuple[dict[str, float], str, int | None]:
    """Return what the program reports, who, and the step.

    Where all ranks report a name, it is the mean over the ranks that have reported the last step that all have; else
    the value of the lowest rank that reports it.
    """
    rows = [
        (each.progress.rank, each.progress.report)
        for each in told
        if each.progress is not None and each.progress.report is not None
    ]
    if not rows:
        return {}, "", None
    steps = [row.step for _, row in rows if row.step is not None]
    names = sorted({name for _, row in rows for name in row.values})
    values: dict[str, float] = {}
    all_report = len(rows) == len(told) and len(rows) > 1
    for name in names:
        found = [row.values[name] for _, row in rows if name in row.values]
        if all_report and len(found) == len(rows):
            values[name] = (
                found[0]
                if len(set(found)) == 1
                else math.fsum(found) / len(found)
                if all(map(math.isfinite, found))
                else next(value for value in found if not math.isfinite(value))
            )
        else:
            values[name] = found[0]
    who = f"mean of {len(rows)} ranks" if all_report else f"rank {rows[0][0]}"
    return values, who, max(steps, default=None)


def _samples(values: Mapping[str, float], step_seconds: float | None, told: Sequence[KnownProcess]) -> float | None:
    """Return the samples per second of all ranks that report them."""
    if "samples" not in values or not step_seconds:
        return None
    total = 0.0
    for each in told:
        report = each.progress.report if each.progress is not None else None
        if report is not None:
            total += report.values.get("samples", 0.0)
    return total / step_seconds if math.isfinite(total) else None


def _saved(progress: Sequence[RankProgress]) -> float | None:
    plain = sum(each.plain for each in progress)
    return max(0.0, 1.0 - sum(each.coded for each in progress) / plain) if plain else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
