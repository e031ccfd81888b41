"""Makes overviews of what sources have heard, and remembers runs from round to round. Pure, except for its lock."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from covey.watch import verdict
from covey.watch.overview import GpuSeen, MachineSeen, Overview
from covey.watch.run_book import RunBook

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from covey.watch.asking import HeardProcess, LookRound, MachineHeard
    from covey.watch.overview import Moment

ENDED_SECONDS: Final = 600.0
"""How long a run that is over is still shown."""
BOOK_RUNS_LIMIT: Final = 64
"""Runs that are remembered; those that ended first are forgotten first."""
BOOK_MACHINES_LIMIT: Final = 1024
SILENT_SECONDS: Final = 300.0
"""How long a machine that does not answer any more is still shown."""
TOO_EARLY_SECONDS: Final = 3.0
"""Seconds in which it is too early to say that no process answers."""


class RunBooks:
    """All that is known of the runs."""

    def __init__(self, cluster: str, *, own_id: str) -> None:
        self._cluster, self._own_id = cluster, own_id
        self._lock = threading.Lock()
        self._serial = 0
        self._books: dict[str, RunBook] = {}
        """By id."""
        self._ids: dict[tuple[str, str], str] = {}
        """By the name and the key of a run: its id."""
        self._keys: dict[str, str] = {}
        """By id: the key of a run."""
        self._machines: dict[str, tuple[float, MachineHeard]] = {}
        """By id: when each was heard last, and how."""
        self._began: float | None = None

    def history(self, run_id: str, since: float) -> tuple[Moment, ...]:
        """Return the moments of a run. On any thread."""
        with self._lock:
            book = self._books.get(run_id)
            return () if book is None else book.curves.since(since)

    def wanted(self) -> set[str]:
        """Return the keys of the runs whose earlier reports are not known yet."""
        with self._lock:
            return {self._keys[id] for id, book in self._books.items() if book.wants_reports and id in self._keys}

    def key_of(self, run_id: str) -> str:
        """Return the key by which sources know a run; empty if it is not known. On any thread."""
        with self._lock:
            return self._keys.get(run_id, "")

    def overview(self, rounds: Sequence[LookRound]) -> Overview:
        """Return the overview after a round of every source."""
        with self._lock:
            return self._overview(rounds)

    def _overview(self, rounds: Sequence[LookRound]) -> Overview:
        now, at = max(each.now for each in rounds), max(each.at for each in rounds)
        self._began = now if self._began is None else self._began
        heard: dict[str, list[HeardProcess]] = {}
        for each in (each for one in rounds for each in one.heard):
            if each.run or each.run_key:
                heard.setdefault(self._id(each, now), []).append(each)
        machines = self._take_machines(rounds, heard, now)
        names = {machine.id: machine.name for machine in machines}
        reports = {key: rows for one in rounds for key, rows in one.reports.items()}
        ended = {key: end for one in rounds for key, end in one.ended.items()}
        stoppable = frozenset[str]().union(*(one.stoppable for one in rounds))
        speeds = {pair: speed for one in rounds for pair, speed in one.speeds.items()}
        runs = []
        for id, book in list(self._books.items()):
            book.take(heard.get(id, ()), now, at)
            if (end := ended.get(self._keys.get(id, ""))) is not None:
                book.end(end)
            if (rows := reports.get(self._keys.get(id, ""))) is not None:
                book.begin_curves(rows)
            if book.is_over and now - book.last_seen > ENDED_SECONDS:
                self._forget(id)
                continue
            can_stop = book.name in stoppable and bool(heard.get(id))
            runs.append(book.seen(now, at, names, speeds, can_stop=can_stop, can_checkpoint=True))
        runs.sort(key=lambda run: (run.name, run.id))
        applicants = tuple(each for one in rounds for each in one.applicants)
        self._serial += 1
        can_approve, approver = (
            any(one.can_approve for one in rounds),
            next((o.approver for o in rounds if o.approver), ""),
        )
        facts = verdict.AllFacts(
            cluster=self._cluster,
            machines=machines,
            runs=runs,
            has_searched=now - self._began >= TOO_EARLY_SECONDS,
            agents=sum(machine.is_agent for one in rounds for machine in one.machines),
            agents_refuse=any(one.others_run for one in rounds),
            own_id=self._own_id if self._cluster else "",
            applicants=[each.name for each in applicants],
            can_approve=can_approve,
            approver=approver,
        )
        return Overview(
            serial=self._serial,
            taken=at,
            cluster=self._cluster,
            sentence=verdict.of_all(facts),
            machines=machines,
            runs=tuple(runs),
            applicants=applicants,
            can_approve=can_approve,
            approver="" if can_approve else approver,
        )

    def _id(self, heard: HeardProcess, now: float) -> str:
        """Return the id of the run of a process; a run that has begun keeps the id that it had while it waited."""
        key = (heard.run, heard.run_key)
        if key in self._ids:
            return self._ids[key]
        waiting = self._ids.get((heard.run, ""))
        if waiting is not None and heard.run_key and waiting not in self._keys:
            id = waiting
        elif not heard.run_key and (
            running := [id for (run, _), id in self._ids.items() if run == heard.run and not self._books[id].is_over]
        ):
            return running[-1]  # it waits for a run that goes on
        else:
            id = heard.run
            while id in self._books:
                id = f"{heard.run}-{heard.run_key[-8:]}" if id == heard.run and heard.run_key else f"{id}+"
            self._books[id] = RunBook(id, heard.run, now)
            while len(self._books) > BOOK_RUNS_LIMIT:
                self._forget(
                    min(self._books, key=lambda each: (not self._books[each].is_over, self._books[each].last_seen))
                )
        self._ids[key] = id
        if heard.run_key:
            self._keys[id] = heard.run_key
        return id

    def _forget(self, id: str) -> None:
        del self._books[id]
        self._keys.pop(id, None)
        self._ids = {key: each for key, each in self._ids.items() if each != id}

    def _take_machines(
        self, rounds: Sequence[LookRound], heard: Mapping[str, Collection[HeardProcess]], now: float
    ) -> tuple[MachineSeen, ...]:
        for machine in (machine for one in rounds for machine in one.machines):
            known = self._machines.get(machine.id)
            self._machines[machine.id] = (
                now,
                machine if known is None else _merged(known[1] if known[0] == now else None, machine),
            )
        self._machines = {
            id: (at, each) for id, (at, each) in self._machines.items() if now - at < SILENT_SECONDS
        }  # fmt: skip
        for id in sorted(self._machines, key=lambda id: self._machines[id][0])[
            : max(0, len(self._machines) - BOOK_MACHINES_LIMIT)
        ]:
            del self._machines[id]
        busy = {each.machine for processes in heard.values() for each in processes}
        refused = {name: why for one in rounds for name, why in one.refused.items()}
        short = _short_names(each for _, each in self._machines.values())
        found = [
            replace(_machine(each, now - at, id in busy), name=short[id]) for id, (at, each) in self._machines.items()
        ]
        names = {machine.name for machine in found}
        found += [
            MachineSeen(id=f"refused:{name}", name=name, state="refused", problem=why)
            for name, why in sorted(refused.items())[:64]
            if name not in names
        ]
        return tuple(sorted(found, key=lambda machine: (machine.name, machine.id)))


def _short_names(machines: Iterable[MachineHeard]) -> dict[str, str]:
    """Return what machines are called, by id: a name without the letters of the id, if no other machine has it."""
    names = {machine.id: machine.name for machine in machines}
    short = {id: name.rpartition("-")[0] or name for id, name in names.items()}
    often = Counter(short.values())
    return {id: each if often[each] == 1 else names[id] for id, each in short.items()}


def _merged(before: MachineHeard | None, machine: MachineHeard) -> MachineHeard:
    """Return a machine that two sources have heard of in one round."""
    if before is None:
        return machine
    return replace(
        before,
        is_here=before.is_here or machine.is_here,
        readings=machine.readings if machine.is_here or before.readings is None else before.readings,
    )


def _machine(heard: MachineHeard, age: float, is_busy: bool) -> MachineSeen:
    readings = heard.readings
    gpus = tuple(
        GpuSeen(gpu.name, gpu.busy, gpu.memory_used, gpu.memory_total, gpu.temperature)
        for gpu in (readings.gpus if readings is not None else ())
    ) or tuple(GpuSeen(name) for name in heard.accelerators)
    is_silent = age > TOO_EARLY_SECONDS
    return MachineSeen(
        id=heard.id,
        name=heard.name,
        host=heard.host,
        address=heard.address,
        version=heard.version,
        site="" if heard.site is None else f"site {heard.site}",
        state="silent" if is_silent else "running" if is_busy else "ready",
        problem=heard.problem
        or ("it does not answer any more; `covey doctor` looks for the cause" if is_silent else ""),
        is_here=heard.is_here,
        cores=readings.cores if readings is not None and readings.cores else heard.cores,
        processor=None if readings is None else readings.processor,
        memory_used=None if readings is None else readings.memory_used,
        memory_total=readings.memory_total if readings is not None and readings.memory_total else heard.memory,
        temperature=None if readings is None else readings.temperature,
        gpus=gpus,
        age=age,
    )
