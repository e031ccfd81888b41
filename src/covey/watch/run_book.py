"""What a collector remembers of one run from round to round, and what views are shown of it. Pure.

Rates are differences of counters between two answers of one process. Ranks that were lost stay in the list, so that
rows keep their places.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from covey.base.operations import operation_name
from covey.base.text import printable
from covey.base.version import __version__
from covey.watch import verdict
from covey.watch.curves import Curves
from covey.watch.overview import Happening, LinkSeen, Moment, RankSeen, RunSeen, Sentence
from covey.watch.waits import RankPosition, slow_rank, waits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.watch.answers import HeardProcess
    from covey.watch.overview import Level, RankState, RunState
    from covey.watch.waits import Waits
    from covey.wire.progress import RankProgress, ReportRow
    from covey.wire.reports import PastEvent

HAPPENINGS_LIMIT: Final = 200
SILENT_AFTER: Final = 2.5
"""A rank that has not answered for so long is silent."""
GONE_AFTER: Final = 4.0
"""A run of which no process has answered for so long is over."""
WINDOW_SECONDS: Final = 10.0
"""What slow ranks are judged by."""
RANKS_LIMIT: Final = 4096
MEDIA: Final = {"local": "loopback", "wired": "cable", "wireless": "Wi-Fi"}
LEVELS: Final[dict[str, Level]] = {"lost": "warning", "refused": "warning", "suspected": "warning"}
STATES: Final[dict[str, RankState]] = {"lost": "lost", "excluded": "lost", "left": "left", "leaving": "left"}
"""The state of a rank that others are in doubt about."""


@dataclass
class KnownProcess:
    """One process of a run, as it was heard last."""

    heard: HeardProcess
    """The last time that it answered, or was seen at all."""
    progress: RankProgress | None = None
    before: tuple[float, RankProgress] | None = None
    """The answer before."""
    arrived: float = 0.0
    first_seen: float = 0.0
    window: deque[tuple[int, int]] = field(default_factory=deque)
    """Times on its clock, and the time in operations until then."""


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
        self._happenings: dict[tuple[object, ...], Happening] = {}
        """By what tells events apart: several ranks may tell the same one."""
        self._waits: tuple[str, ...] = ()
        self._is_joining = True
        self._fault: tuple[int, str] | None = None
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
        if answered:
            self.last_seen, self.is_over = now, False
        for each in heard:
            told = self._told.get(each.key)
            if told is None:
                if not each.has_answered:
                    continue
                told = self._told[each.key] = KnownProcess(each, first_seen=now)
            told.heard = each
            if each.progress is not None:
                self._progressed(told, each.progress, each.arrived)
            elif each.has_answered:
                told.arrived = each.arrived
        missing = self._told.keys() - {each.key for each in heard}
        for key in missing:
            told = self._told[key]
            told.heard = _unheard(told.heard)
        self._is_joining = not any(told.progress is not None for told in self._told.values())
        self._waits = _waits_of([each for each in answered if each.tell is not None and each.tell.wait is not None])
        if now - self.last_seen > GONE_AFTER:
            self.is_over = True

    def end(self, fault: str) -> None:
        """Note that the run is over; `fault` is the error with which it failed, if it did."""
        self.is_over = True
        if fault and self._fault is None:
            self._fault = -1, fault

    def begin_curves(self, rows: Sequence[ReportRow]) -> None:
        """Take what the program has reported since it began."""
        self.curves.begin(rows)
        self.wants_reports = False

    def _progressed(self, told: KnownProcess, progress: RankProgress, arrived: float) -> None:
        if told.progress is not None and told.progress.taken_ns < progress.taken_ns:
            told.before = told.arrived, told.progress
        told.progress, told.arrived = progress, arrived
        told.window.append((progress.taken_ns, progress.spent_ns))
        while told.window and progress.taken_ns - told.window[0][0] > WINDOW_SECONDS * 1e9:
            told.window.popleft()
        if progress.generation > self._generation:
            self._generation = progress.generation
            if self._has_begun:
                self._by_rank.clear()  # ranks are numbered anew
                self._lost.clear()
        if progress.generation == self._generation and 0 <= progress.rank < RANKS_LIMIT:
            self._by_rank[progress.rank] = told.heard.key
            self._has_begun = True
        for event in progress.events:
            self._happened(event)
        for group in progress.groups:
            if group.fault and self._fault is None:
                self._fault = progress.rank, group.fault
        if all(not group.fault for group in progress.groups) and self._fault and self._fault[0] == progress.rank:
            self._fault = None  # it goes on with another group

    def _happened(self, event: PastEvent) -> None:
        is_view = event.kind in ("lost", "left", "view")
        key = (event.kind, event.generation, event.view, event.ranks, "" if is_view else event.text)
        about = ", ".join(event.names) or (
            f"rank{'s' * (len(event.ranks) > 1)} {', '.join(map(str, event.ranks[:16]))}" if event.ranks else ""
        )
        parts = [about, event.text, f"recovered in {event.phases['redo']:.0f} ms" if "redo" in event.phases else ""]
        text = printable(": ".join(filter(None, parts)) or f"generation {event.generation}", 300)
        level = LEVELS.get(event.kind, "note")
        if event.kind == "report" and "finite again" not in event.text:
            level = "warning"
        happening = Happening(event.time, event.kind, text, event.ranks[:64], level)
        if (known := self._happenings.get(key)) is not None and "redo" not in event.phases:
            return  # another rank has told it
        self._happenings[key] = happening if known is None else replace(happening, at=known.at)
        if len(self._happenings) > HAPPENINGS_LIMIT:
            del self._happenings[next(iter(self._happenings))]

    # What is shown

    def seen(
        self, now: float, at: float, machines: Mapping[str, str], *, can_stop: bool, can_checkpoint: bool
    ) -> RunSeen:
        """Return the run as views show it, and add a moment to its history."""
        current = {rank: self._told[key] for rank, key in sorted(self._by_rank.items()) if key in self._told}
        waiting = waits([_position(rank, told, now) for rank, told in current.items() if told.progress is not None])
        if waiting:  # one long wait says nothing about who is slow at every step
            for told in current.values():
                told.window.clear()
        doubts = self._doubts(current, now)
        waited_for = {rank for each in waiting.values() for rank in each.waits_for}
        ranks = [
            self._rank(rank, told, now, waiting.get(rank), doubts.get(rank), is_waited_for=rank in waited_for)
            for rank, told in current.items()
        ]
        ranks += self._joining(now)
        live = [rank for rank in ranks if rank.state not in ("lost", "left", "joining")]
        told_of = [current[rank.rank] for rank in live if rank.rank in current]
        values, who, row_step = _combined(told_of)
        state = self._state()
        sync = _mean([rank.sync for rank in live])
        compute = _mean([rank.compute for rank in live])
        step_seconds = compute + sync if row_step is not None and compute is not None and sync is not None else None
        sent = _sum([rank.sent_per_second for rank in live])
        sentence = self._sentence(state, ranks, waiting, current, values, row_step, machines, now, at)
        seen = RunSeen(
            id=self.id,
            name=self.name,
            state=state,
            began=min((told.progress.began for told in current.values() if told.progress is not None), default=None),
            program=next((told.progress.program for told in current.values() if told.progress is not None), ""),
            sentence=sentence,
            ranks=tuple(ranks),
            links=tuple(_links(current)),
            reports=values,
            reported_by=who,
            step=row_step,
            step_seconds=step_seconds,
            compute_seconds=compute if row_step is not None else None,
            sync_seconds=sync if row_step is not None else None,
            samples_per_second=_samples(values, step_seconds, told_of),
            saved=_saved([told.progress for told in told_of if told.progress is not None]),
            happenings=tuple(self._happenings.values()),
            can_stop=can_stop and not self.is_over,
            can_checkpoint=can_checkpoint and state == "running",
        )
        if state == "running":
            self.curves.add(
                Moment(at, row_step, dict(values), step_seconds, seen.compute_seconds, seen.sync_seconds, sent)
            )
            self._best = seen
        elif self.is_over and self._best is not None and not ranks:
            seen = self._best
        return seen

    def _state(self) -> RunState:
        if self.is_over:
            return "failed" if self._fault is not None else "ended"
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
        elif doubt is not None and (known := STATES.get(doubt[0])) is not None:
            state, reason = known, doubt[1]
            if known == "lost":
                self._lost[rank] = reason
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
        compute, sync, sent, received = _rates(told)
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
            is_waiting = told.progress is None and told.heard.has_answered and not told.heard.tells_less
            if is_waiting and told.heard.tell is not None and told.heard.tell.state == "joining":
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

    def _sentence(
        self,
        state: str,
        ranks: Sequence[RankSeen],
        waiting: Mapping[int, Waits],
        current: Mapping[int, KnownProcess],
        values: Mapping[str, float],
        step: int | None,
        machines: Mapping[str, str],
        now: float,
        at: float,
    ) -> Sentence:
        shares = {
            rank.rank: share
            for rank in ranks
            if rank.rank in current and rank.state in ("active", "waiting", "late")
            and (share := _share(current[rank.rank])) is not None
        }  # fmt: skip
        less = [
            (machines.get(told.heard.machine, told.heard.machine), told.heard.version)
            for told in self._told.values()
            if told.heard.tells_less
        ]
        return verdict.of_run(
            verdict.RunFacts(
                name=self.name,
                state=state,
                ranks=ranks,
                machines=machines,
                waits=self._waits,
                fault="" if self._fault is None else self._fault[1],
                fault_rank=None if self._fault is None or self._fault[0] < 0 else self._fault[0],
                lost=[event for event in self._happenings.values() if event.kind == "lost"],
                now=at,
                waited={rank: each.since for rank, each in waiting.items()},
                slow=slow_rank(shares),
                has_reports=any(told.progress is not None and told.progress.reported for told in current.values()),
                runs_for=now - self.first_seen,
                reports=values,
                step=step,
                tells_less=sorted(set(less)),
                own_version=__version__,
            )
        )


def _unheard(heard: HeardProcess) -> HeardProcess:
    return replace(heard, progress=None, tell=None, tells_less=False)


def _position(rank: int, told: KnownProcess, now: float) -> RankPosition:
    assert told.progress is not None
    is_silent = now - told.arrived > SILENT_AFTER or told.heard.process in ("stopped", "ended")
    return RankPosition(rank, told.arrived, told.progress.groups, is_silent=is_silent)


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


def _rates(told: KnownProcess) -> tuple[float | None, float | None, float | None, float | None]:
    """Return seconds outside of operations and in them, of the last second, and bytes sent and received per second."""
    if told.before is None or told.progress is None:
        return None, None, None, None
    before, after = told.before[1], told.progress
    lasted = (after.taken_ns - before.taken_ns) / 1e9
    if lasted <= 0:
        return None, None, None, None
    sync = min(1.0, max(0.0, (after.spent_ns - before.spent_ns) / 1e9 / lasted))
    sent, received = max(0, after.sent - before.sent) / lasted, max(0, after.received - before.received) / lasted
    return 1.0 - sync, sync, sent, received


def _share(told: KnownProcess) -> float | None:
    """Return the share of the last seconds that a process has spent in operations."""
    if len(told.window) < 3:
        return None
    (first, spent_first), (last, spent_last) = told.window[0], told.window[-1]
    if last - first < 2e9 or spent_last <= spent_first:
        return None
    return min(1.0, (spent_last - spent_first) / (last - first))


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


def _links(current: Mapping[int, KnownProcess]) -> list[LinkSeen]:
    """Return the links between machines, one for each direction."""
    machine_of = {rank: told.heard.machine for rank, told in current.items()}
    found: dict[tuple[str, str], LinkSeen] = {}
    for told in current.values():
        if told.progress is None:
            continue
        before = {} if told.before is None else {peer.rank: peer for peer in told.before[1].peers}
        lasted = 0.0 if told.before is None else (told.progress.taken_ns - told.before[1].taken_ns) / 1e9
        for peer in told.progress.peers:
            source, target = told.heard.machine, machine_of.get(peer.rank)
            if target is None or source == target:
                continue
            sent = None
            if lasted > 0 and peer.rank in before:
                sent = max(0, peer.sent - before[peer.rank].sent) / lasted
            known = found.get((source, target))
            rate = peer.rate if peer.rate >= 0 else None
            trip = peer.round_trip if peer.round_trip >= 0 else None
            found[source, target] = LinkSeen(
                source=source,
                target=target,
                lane=peer.lane or (known.lane if known is not None else ""),
                medium=MEDIA.get(peer.medium, "") or (known.medium if known is not None else ""),
                relay="relayed" if peer.is_relayed else known.relay if known is not None else "",
                bytes_per_second=_most(rate, known.bytes_per_second if known is not None else None),
                sent_per_second=_sum([sent, known.sent_per_second if known is not None else None]),
                round_trip=_least(trip, known.round_trip if known is not None else None),
            )
    return [found[key] for key in sorted(found)]


def _most(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
