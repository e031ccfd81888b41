"""Where a collector hears of runs: a cluster that it visits, and the runs of this machine. On the collector's thread.

A source keeps its links open from round to round. Every call has a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError, RemoteProtocolError
from covey.base.text import printable
from covey.net.host.runs import local_runs
from covey.net.keys import charter, owner, trust
from covey.net.keys.identity import id_text, machine_name, own_machine, short_id
from covey.proto.health import ProcessState
from covey.runtime.metrics.flight import fault_of
from covey.runtime.metrics.inspection import PROGRESS, READINGS, REPORTS
from covey.runtime.peers.local_visit import LocalVisit
from covey.runtime.views.process_table import ProcessStatus
from covey.watch.answers import HeardProcess, LookRound, MachineHeard
from covey.watch.overview import Applicant
from covey.wire import messages
from covey.wire.machine import machine_of
from covey.wire.progress import NO_EVENTS, decode_progress, decode_readings, decode_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from covey.agent.callers import Terminal
    from covey.net.host.runs import LocalRunFound
    from covey.watch.answers import Process
    from covey.wire.progress import RankProgress, Readings, ReportRow

ANSWER_SECONDS: Final = 0.8
"""How long processes may take to answer in one round."""
LINK_SECONDS: Final = 0.3
"""How long a rank of this machine may take to accept a link, in one round."""
TELL_EVERY: Final = 10.0
"""How often one member of a run is asked who is in it, and which machines ask to join."""
PROGRAMS_EVERY: Final = 5.0
"""How often agents are asked which programs they run."""
RECOVERY_SECONDS: Final = 15.0
"""How long an event of a loss is asked for again, until it says how long the recovery took."""
HERE: Final = "here"
CHECKPOINT_SECONDS: Final = 5.0
MOST_PAUSE: Final = 16
"""A process that answers without pages is asked in every second round, then every fourth, up to this one."""


class RoundSource(Protocol):
    """Something that can be looked at, once a second."""

    def look(self, wanted: Collection[str]) -> LookRound:
        """Ask everybody once; of the runs with these keys also all that their programs have reported."""

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        """Ask a run for a checkpoint; CoveyError if none of its processes answers."""

    def close(self) -> None: ...


class EventNumbers:
    """How many events of each run are known, and which process is asked for further ones."""

    def __init__(self) -> None:
        self._tellers: dict[str, str] = {}
        """By run: the process that is asked."""
        self._next: dict[str, int] = {}
        """By process."""

    def page(self, run_key: str, key: str) -> int:
        """Return the page of the question to a process."""
        return self._next.get(key, 0) if self._tellers.get(run_key) == key else NO_EVENTS

    def told(self, run_key: str, answers: dict[str, RankProgress], now: float) -> None:
        """Note what processes of a run have told, and choose who tells in the next round."""
        teller = self._tellers.get(run_key)
        if teller in answers:
            progress = answers[teller]
            waiting = [
                at
                for at, event in enumerate(progress.events)
                if event.kind in ("lost", "left", "view")
                and "redo" not in event.phases
                and now - event.time < RECOVERY_SECONDS
            ]
            again = len(progress.events) - waiting[0] if waiting else 0
            self._next[teller] = max(0, progress.next_event - again)
        elif answers:
            self._tellers[run_key] = min(answers, key=lambda key: (answers[key].rank, key))

    def forget(self, keys: Collection[str]) -> None:
        """Forget all processes but these."""
        self._next = {key: number for key, number in self._next.items() if key in keys}


class Pauses:
    """Asks processes less often that answer without pages: they are asked too often, or do not know the question."""

    def __init__(self) -> None:
        self._pauses: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def is_due(self, key: str) -> bool:
        """Tell whether to ask a process in this round."""
        left = self._left.get(key, 0)
        self._left[key] = max(0, left - 1)
        return left == 0

    def answered(self, key: str, *, has_pages: bool) -> None:
        """Note an answer."""
        if has_pages:
            self._pauses.pop(key, None)
            self._left.pop(key, None)
        else:
            pause = self._pauses[key] = min(MOST_PAUSE, 2 * self._pauses.get(key, 1))
            self._left[key] = pause - 1


def read_progress(answer: object) -> RankProgress | None:
    """Return what a process has told; None if it told nothing that can be read."""
    if isinstance(answer, messages.Inspected) and answer.what == PROGRESS and answer.pages and answer.body:
        with contextlib.suppress(RemoteProtocolError):
            return decode_progress(answer.body)
    return None


def has_pages(answer: object) -> bool:
    """Tell whether an answer to a question has pages."""
    return isinstance(answer, messages.Inspected) and answer.pages > 0


def read_reports(answer: object) -> tuple[ReportRow, ...] | None:
    """Return the reports that a process has told; None if it told nothing that can be read."""
    if isinstance(answer, messages.Inspected) and answer.what == REPORTS and answer.pages:
        with contextlib.suppress(RemoteProtocolError):
            return decode_reports(answer.body).rows
    return None


class LocalSource:
    """The runs of `covey run -n` of this user, on this machine."""

    def __init__(
        self, readings: Callable[[], Readings], *, machine: str = HERE, name: str = "", only: str = ""
    ) -> None:
        """`readings` reads how this machine is used. `only` is the one run to look at, by name or process."""
        self._readings, self._machine, self._name, self._only = readings, machine, name, only
        self._visits: dict[int, LocalVisit] = {}
        """By the process of the keeper."""
        self._keys: dict[int, str] = {}
        """By the process of the keeper: the runs of the last round."""
        self._events = EventNumbers()
        self._pauses = Pauses()
        self._processes: dict[str, ProcessStatus] = {}
        self._told: dict[str, HeardProcess] = {}
        """By key: what each process said last."""
        self._lock = threading.Lock()
        """One question at a time."""

    def look(self, wanted: Collection[str]) -> LookRound:
        at, now = time.time(), time.monotonic()
        runs = [run for run in local_runs() if not self._only or self._only in (run.name, str(run.pid))]
        with self._lock:
            over = {pid: key for pid, key in self._keys.items() if pid not in {run.pid for run in runs}}
            ended = {key: self._fault(key) for key in over.values()}
            self._keys = {run.pid: _key(run) for run in runs}
            for pid in over.keys() & self._visits.keys():
                self._visits.pop(pid).leave()
            heard = [each for run in runs for each in self._ask(run)]
            reports = {
                key: rows for run in runs if (key := _key(run)) in wanted and (rows := self._reports(run)) is not None
            }
        keys = {each.key for each in heard}
        self._events.forget(keys)
        self._told = {key: each for key, each in self._told.items() if key in keys}
        self._processes = {key: each for key, each in self._processes.items() if key in keys}
        here = MachineHeard(self._machine, self._name, is_here=True, readings=self._readings())
        names = frozenset(run.name for run in runs)
        return LookRound(at, now, "", tuple(heard), (here,), reports=reports, stoppable=names, ended=ended)

    def _ask(self, run: LocalRunFound) -> Iterable[HeardProcess]:
        visit = self._visits.get(run.pid)
        try:
            if visit is None:
                visit = self._visits[run.pid] = LocalVisit(run, run.token())
            if len(visit.ranks) < run.size:
                visit.link(LINK_SECONDS)
        except CoveyError:  # it has just ended
            return []
        run_key = _key(run)
        keys = {rank: f"{run_key}:{rank}" for rank in range(run.size)}
        due = {rank: key for rank, key in keys.items() if rank in visit.ranks and self._pauses.is_due(key)}
        questions = {rank: messages.Inspect(PROGRESS, self._events.page(run_key, key)) for rank, key in due.items()}
        answers = visit.ask_each(questions, ANSWER_SECONDS)
        arrived = time.monotonic()
        told: dict[str, RankProgress] = {}
        for rank, answer in answers.items():
            if answer is not None:
                self._pauses.answered(keys[rank], has_pages=has_pages(answer))
            if (progress := read_progress(answer)) is not None:
                told[keys[rank]] = progress
        self._events.told(run_key, told, time.time())
        return [self._heard(run, keys[rank], answers.get(rank), told.get(keys[rank]), arrived) for rank in keys]

    def _heard(
        self, run: LocalRunFound, key: str, answer: object, progress: RankProgress | None, arrived: float
    ) -> HeardProcess:
        before = self._told.get(key)
        pid = progress.pid if progress is not None else before.pid if before is not None else 0
        heard = HeardProcess(
            key=key,
            run=printable(run.name, 100),
            run_key=_key(run),
            machine=self._machine,
            pid=pid,
            version="" if progress is None else progress.version,
            arrived=arrived,
            progress=progress,
            tells_less=isinstance(answer, messages.Inspected) and not answer.pages,
            process=self._kernel(key, pid),
        )
        if progress is not None:
            self._told[key] = heard
        return heard

    def _kernel(self, key: str, pid: int) -> Process:
        if not pid:
            return "unknown"
        status, now = self._processes.get(key), time.monotonic()
        if status is None or status.pid != pid:
            status = self._processes[key] = ProcessStatus(b"", pid, now)
        status.look(now)
        kernel: dict[ProcessState, Process] = {ProcessState.STOPPED: "stopped", ProcessState.EXITED: "ended"}
        return kernel.get(status.state, "runs")

    def _fault(self, run_key: str) -> str:
        """Return the error with which a run has failed, as its ranks have written it down; empty if they have not."""
        pids = {each.pid for each in self._told.values() if each.run_key == run_key}
        return fault_of(pids)

    def _reports(self, run: LocalRunFound) -> tuple[ReportRow, ...] | None:
        visit = self._visits.get(run.pid)
        reporting = [
            each.progress.rank
            for key, each in self._told.items()
            if each.run_key == _key(run) and each.progress is not None and each.progress.reported
        ]
        if visit is None or not reporting:
            return None
        answers = visit.ask(messages.Inspect(REPORTS), ANSWER_SECONDS)
        found = [rows for _, answer in sorted(answers.items()) if (rows := read_reports(answer))]
        return found[0] if found else None

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        with self._lock:
            run = next((run for run in local_runs() if _key(run) == run_key), None)
            visit = None if run is None else self._visits.get(run.pid)
            answer = None if visit is None else visit.ask_one(_checkpoint(), CHECKPOINT_SECONDS)
        if answer is None:
            raise DeadlineError(f"no rank of the run answered within the timeout of {CHECKPOINT_SECONDS:g} s")
        return answer

    def keeper_of(self, run_key: str) -> int:
        """Return the process of the keeper of a run that goes on; ConfigError if it is over."""
        for run in local_runs():
            if _key(run) == run_key:
                return run.pid
        raise ConfigError("the run is over")

    def close(self) -> None:
        with self._lock:
            for visit in self._visits.values():
                with contextlib.suppress(CoveyError, TimeoutError):
                    visit.leave()
            self._visits.clear()


def _key(run: LocalRunFound) -> str:
    return f"{run.name}:{run.pid}"


def _checkpoint() -> messages.RequestCheckpoint:
    import secrets

    return messages.RequestCheckpoint(secrets.token_hex(8), "")


class ClusterSource:
    """The machines and runs of a cluster."""

    def __init__(self, terminal: Terminal, *, only: str = "") -> None:
        """`only` is the one run to look at."""
        self._terminal, self._visit, self._only = terminal, terminal.visit, only
        self._cluster = terminal.visit.mesh.cluster
        self._events = EventNumbers()
        self._pauses = Pauses()
        self._lock = threading.Lock()
        """One question to a process at a time."""
        self._tells: dict[str, tuple[float, messages.Tell]] = {}
        """By process: what it said of its run, and when."""
        self._run_of: dict[str, tuple[str, str]] = {}
        """By process: the name and the key of its run."""
        self._readings: dict[str, Readings] = {}
        self._programs: dict[str, list[tuple[Any, int]]] = {}
        """By run: the agents that have started it, and its number there."""
        self._refused_by_agents = False
        self._asked_programs = -PROGRAMS_EVERY
        self._own = own_machine()

    def look(self, wanted: Collection[str]) -> LookRound:
        with self._lock:
            return self._look(wanted)

    def _look(self, wanted: Collection[str]) -> LookRound:
        visit, at = self._visit, time.time()
        members = visit.members()
        cards = {_process(state.card): state for state in members}
        asked = {
            key: messages.Inspect(PROGRESS, self._events.page(self._run_of.get(key, ("", ""))[1], key))
            for key in cards
            if self._pauses.is_due(key)
        }
        answers = dict(
            zip(asked, visit.ask_each([(cards[key].card, q) for key, q in asked.items()], ANSWER_SECONDS), strict=True)
        )
        now = time.monotonic()
        told: dict[str, RankProgress] = {}
        by_run: dict[str, dict[str, RankProgress]] = {}
        for key, answer in answers.items():
            if isinstance(answer, messages.Inspected):
                self._pauses.answered(key, has_pages=has_pages(answer))
            if (progress := read_progress(answer)) is not None:
                told[key] = progress
                self._run_of[key] = printable(progress.run, 100), f"{progress.run}:{progress.run_id.hex()}"
                by_run.setdefault(self._run_of[key][1], {})[key] = progress
        for run_key, progressed in by_run.items():
            self._events.told(run_key, progressed, at)
        tells = self._ask_runs(cards, answers, told, now)
        heard = [
            self._heard(key, state, answers.get(key), told.get(key), tells.get(key), now)
            for key, state in cards.items()
        ]
        found = [each for each in heard if not self._only or each.run == self._only]
        self._forget(cards.keys())
        machines = self._machines(members)
        denied, allowed = charter.lists(visit.mesh.cluster)
        return LookRound(
            at,
            now,
            self._cluster.name,
            tuple(found),
            machines,
            self._applicants(tells.values(), denied | (allowed or frozenset()), now),
            {printable(name, 100): printable(why) for name, why in list(visit.mesh.problems.refusals.items())},
            can_approve=owner.held(self._cluster) is not None,
            approver=_approver(visit.mesh.cluster),
            reports=self._reports(wanted, by_run, cards),
            stoppable=frozenset(self._programs),
            others_run=self._refused_by_agents,
        )

    def _ask_runs(
        self, cards: dict[str, messages.PeerReport], answers: dict[str, Any], told: dict[str, RankProgress], now: float
    ) -> dict[str, messages.Tell]:
        """Ask those for their state that wait for a run or tell less, and now and then one member of each run."""
        last_told = {key: at for key, (at, _) in self._tells.items()}
        due = [key for key, answer in answers.items() if isinstance(answer, messages.Inspected) and key not in told]
        for run_key in {self._run_of[key][1] for key in told}:
            members = sorted((key for key in told if self._run_of[key][1] == run_key), key=lambda key: told[key].rank)
            if all(now - last_told.get(key, -TELL_EVERY) >= TELL_EVERY for key in members):
                due.append(members[0])
        replies = self._visit.ask_all([cards[key].card for key in due], messages.Ask(), ANSWER_SECONDS)
        for key, reply in zip(due, replies, strict=True):
            if isinstance(reply, messages.Tell):
                self._tells[key] = now, reply
                if key not in told:
                    self._run_of[key] = printable(reply.run, 100), self._run_of.get(key, ("", ""))[1]
        return {key: tell for key, (at, tell) in self._tells.items() if key in cards and now - at < 2 * TELL_EVERY}

    def _heard(
        self,
        key: str,
        state: messages.PeerReport,
        answer: object,
        progress: RankProgress | None,
        tell: messages.Tell | None,
        now: float,
    ) -> HeardProcess:
        run, run_key = self._run_of.get(key, ("", ""))
        is_running = tell is not None and tell.state == "running"
        was_less = isinstance(answer, messages.Inspected) and not answer.pages
        return HeardProcess(
            key=key,
            run=run,
            run_key=run_key,
            machine=machine_of(state.card).hex(),
            pid=state.card.pid,
            version=state.card.version,
            arrived=now,
            progress=progress,
            tell=tell if progress is None and isinstance(answer, messages.Inspected) else None,
            tells_less=was_less and is_running,
            clock_offset=state.clock_offset,
        )

    def _machines(self, members: Sequence[messages.PeerReport]) -> tuple[MachineHeard, ...]:
        agents = self._visit.agents()
        found: dict[str, MachineHeard] = {}
        asked: dict[str, messages.Card] = {}
        here = self._own.hex()
        for card, is_agent in [*((card, True) for card in agents), *((state.card, False) for state in members)]:
            machine = machine_of(card)
            id = machine.hex()
            asked.setdefault(id, card)
            if id not in found:
                hardware = card.hardware
                address = card.contact.addresses[0] if card.contact.addresses else None
                found[id] = MachineHeard(
                    id,
                    machine_name(card.name, machine),
                    card.host_name,
                    "" if address is None else address.ip,
                    card.version,
                    is_agent=is_agent,
                    is_here=id == here,
                    cores=None if hardware is None else hardware.cores,
                    memory=None if hardware is None else hardware.memory,
                    accelerators=() if hardware is None else hardware.accelerators,
                )
        self._read(asked)
        return tuple(
            replace(each, readings=self._readings.get(each.id))
            for each in sorted(found.values(), key=lambda m: (m.name, m.id))
        )

    def _read(self, asked: dict[str, messages.Card]) -> None:
        """Ask one process of each machine how the machine is used: its agent, or else a rank."""
        due = {id: card for id, card in asked.items() if self._pauses.is_due(f"readings {id}")}
        answers = self._visit.ask_all(list(due.values()), messages.Inspect(READINGS), ANSWER_SECONDS)
        self._readings = {id: each for id, each in self._readings.items() if id in asked}
        for id, answer in zip(due, answers, strict=True):
            if isinstance(answer, messages.Inspected):
                self._pauses.answered(f"readings {id}", has_pages=has_pages(answer))
            if isinstance(answer, messages.Inspected) and answer.what == READINGS and answer.pages:
                with contextlib.suppress(RemoteProtocolError):
                    self._readings[id] = decode_readings(answer.body)

    def _applicants(
        self, tells: Iterable[messages.Tell], answered: frozenset[bytes], now: float
    ) -> tuple[Applicant, ...]:
        waiting = {each.id: each for tell in tells for each in tell.waiting}
        waiting |= {each.id: each for each in self._visit.mesh.rules.waiting()}
        return tuple(
            Applicant(id_text(each.id), short_id(each.id), printable(each.name, 100), each.ip)
            for _, each in sorted(waiting.items())
            if each.id not in answered | self._cluster.denied
        )

    def _reports(
        self, wanted: Collection[str], by_run: dict[str, dict[str, RankProgress]], cards: dict[str, messages.PeerReport]
    ) -> dict[str, tuple[ReportRow, ...]]:
        found: dict[str, tuple[ReportRow, ...]] = {}
        for run_key, members in by_run.items():
            reporting = sorted((each.rank, key) for key, each in members.items() if each.reported)
            if run_key in wanted and reporting:
                with contextlib.suppress(CoveyError):
                    card = cards[reporting[0][1]].card
                    rows = read_reports(self._visit.ask(card, messages.Inspect(REPORTS), ANSWER_SECONDS))
                    if rows is not None:
                        found[run_key] = rows
        return found

    def _forget(self, keys: Collection[str]) -> None:
        self._events.forget(keys)
        self._tells = {key: each for key, each in self._tells.items() if key in keys}
        self._run_of = {key: each for key, each in self._run_of.items() if key in keys}

    def ask_programs(self) -> None:
        """Ask the agents which programs they run; on a thread of its own, every few seconds."""
        book = trust.trusted(self._cluster)
        programs: dict[str, list[tuple[Any, int]]] = {}
        agents = self._terminal.agents(book)
        refusals = 0
        for agent in agents:
            try:
                for page in agent.stream("programs"):
                    for each in page:
                        if each.code is None and agent.machine in book:
                            programs.setdefault(each.run, []).append((agent, each.number))
            except AuthError:
                refusals += 1
            except CoveyError:
                continue
        self._programs = programs
        self._refused_by_agents = bool(agents) and refusals == len(agents)

    def agents_of(self, run: str) -> list[tuple[Any, int]]:
        """Return the agents of trusted machines that have started a run, each with the number of its program."""
        return self._programs.get(run, [])

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        keys = {key for key, (_, its) in self._run_of.items() if its == run_key}
        with self._lock:
            for state in self._visit.members():
                if _process(state.card) in keys:
                    with contextlib.suppress(ConnectError, DeadlineError):  # another one knows
                        answer = self._visit.ask(state.card, _checkpoint(), CHECKPOINT_SECONDS)
                        if isinstance(answer, messages.CheckpointProgress):
                            return answer
        raise DeadlineError(f"no member of the run answered within the timeout of {CHECKPOINT_SECONDS:g} s")

    @property
    def cluster(self) -> Any:
        """The cluster, as its file says now."""
        return self._visit.mesh.cluster

    def close(self) -> None:
        """Do nothing: the visit belongs to the collector."""


def _process(card: messages.Card) -> str:
    return f"{card.id.hex()}:{card.life.hex()}"


def _approver(cluster: Any) -> str:
    """Return the name of the machine that signed the charter last."""
    return "" if cluster.charter is None else printable(cluster.charter.machine, 100)
