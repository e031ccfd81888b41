"""A cluster as a source: talks with every process of it, kept from round to round, and asks its agents.

A process that answers late, because its link is slow, is heard in a later round, and no round waits for it. On the
thread of the collector, except `ask_programs`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError, RemoteProtocolError
from covey.base.text import printable
from covey.net.host.saved_runs import past_runs
from covey.net.keys import charter, owner, trust
from covey.net.keys.identity import id_text, machine_name, own_machine, short_id
from covey.runtime.metrics.inspection import NETWORK, OUTPUT, PROGRESS, READINGS, REPORTS
from covey.watch.asking import (
    ANSWER_SECONDS,
    CHECKPOINT_ASK_SECONDS,
    EventNumbers,
    HeardProcess,
    LookRound,
    MachineHeard,
    Pauses,
    RunEnd,
    has_pages,
    read_progress,
    read_readings,
    read_reports,
    request_of_checkpoint,
)
from covey.watch.overview import Applicant
from covey.wire import messages
from covey.wire.reports import decode_network
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from covey.agent.callers import Terminal
    from covey.watch.far_output import FarOutput
    from covey.wire.progress import RankProgress, Readings, ReportRow
    from covey.wire.reports import MeasuredNetwork

TALK_SECONDS: Final = 5.0
"""How long a process may take for all answers of one talk."""
TELL_EVERY: Final = 10.0
"""How often one member of a run is asked for its members, the machines that ask to join, and measured links."""
FRESH_SECONDS: Final = 3.0
"""How long it holds what a process has said that waits for a run."""
BATCHES: Final = 8
"""Batches of an agent's output that are read at a time."""
ENDED_LATELY: Final = 15.0
"""How long after its last process a run is looked for among those that have ended here."""
PROGRAMS_EVERY: Final = 5.0
"""How often agents are asked which programs they run."""
CLOCK_TRUST: Final = 0.1
"""A clock that differs by less than this many seconds counts as equal: the difference is not measured better."""


class _Talk(NamedTuple):
    """Questions to one process, and the answers that come."""

    questions: tuple[messages.Question, ...]
    asked: float
    answers: Future[list[tuple[messages.Answer, float]]]


class _Answers(NamedTuple):
    """What one process has answered."""

    asked: float
    by_question: dict[messages.Question, tuple[messages.Answer, float]]
    """Each with when it came."""

    def all(self) -> Iterable[messages.Answer]:
        return (answer for answer, _ in self.by_question.values())


class ClusterSource:
    """The machines and runs of a cluster."""

    def __init__(self, terminal: Terminal, *, only: str = "") -> None:
        """`only` is the one run to look at."""
        self._terminal, self._visit, self._only = terminal, terminal.visit, only
        self._cluster = terminal.visit.mesh.cluster
        self._events = EventNumbers()
        self._pauses = Pauses()
        self._lock = threading.Lock()
        """One talk with a process at a time."""
        self._talks: dict[str, _Talk] = {}
        """By process: those whose answers have not come."""
        self._tells: dict[str, tuple[float, messages.Tell]] = {}
        """By process: what it said of its run, and when."""
        self._progress: dict[str, RankProgress] = {}
        """By process: how far it was when it answered last, while it is in a run."""
        self._run_of: dict[str, tuple[str, str]] = {}
        """By process: the name and the key of its run."""
        self._seen: dict[str, tuple[str, float]] = {}
        """By key: the name of each run that was heard lately, and when."""
        self._less: set[str] = set()
        """Processes whose covey is older: they do not know the question."""
        self._readings: dict[str, Readings] = {}
        self._sites: dict[str, int] = {}
        self._speeds: dict[tuple[str, str], float] = {}
        """By machine, and by two machines: what ranks have measured."""
        self._programs: dict[str, list[tuple[Any, int]]] = {}
        """By run: the agents that have started it, and its number there."""
        self._tails: dict[tuple[bytes, int], int] = {}
        """By machine and number of a program: where the last part of its output began."""
        self._refused_by_agents = False
        self._followed: list[FarOutput] = []
        self._own = own_machine()

    def look(self, wanted: Collection[str]) -> LookRound:
        with self._lock:
            return self._look(wanted)

    def _look(self, wanted: Collection[str]) -> LookRound:
        visit, at = self._visit, time.time()
        members, agents = visit.members(), visit.agents()
        states = {_process(state.card): state for state in members}
        cards = {key: state.card for key, state in states.items()} | {_process(card): card for card in agents}
        self._begin(cards, set(map(_process, agents)), wanted)
        wait([talk.answers for talk in self._talks.values()], ANSWER_SECONDS)
        answers = self._take()
        now = time.monotonic()
        heard = [self._heard(key, state, answers.get(key), now) for key, state in states.items()]
        for key in set(map(_process, agents)) & answers.keys():
            self._pauses.answered(key, has_pages=any(map(has_pages, answers[key].all())))
        self._note_events({each.key: each for each in heard}, at)
        reports = self._reports(answers, states)
        self._read(answers, cards, now)
        self._take_output(answers, cards)
        self._forget(cards.keys())
        denied, allowed = charter.lists(visit.mesh.cluster)
        tells = [tell for key, (_, tell) in self._tells.items() if key in states]
        return LookRound(
            at,
            now,
            self._cluster.name,
            tuple(each for each in heard if not self._only or each.run == self._only),
            self._machines(members, agents),
            self._applicants(tells, denied | (allowed or frozenset())),
            {printable(name, 100): printable(why) for name, why in list(visit.mesh.problems.refusals.items())},
            can_approve=owner.held(self._cluster) is not None,
            approver=_approver(visit.mesh.cluster),
            reports=reports,
            ended=self._ended({each.run_key: each.run for each in heard if each.run_key}, now),
            speeds=self._speeds,
            stoppable=frozenset(self._programs),
            others_run=self._refused_by_agents,
        )

    def _ended(self, going: Mapping[str, str], now: float) -> dict[str, RunEnd]:
        """Return the runs of which no process is linked any more, and that this machine knows to be over.

        `going` has the names of the others by their keys. What the last process of a run was is written down by its
        keeper a moment later.
        """
        self._seen = {key: each for key, each in self._seen.items() if now - each[1] < ENDED_LATELY}
        gone = {key: name for key, (name, _) in self._seen.items() if key not in going}
        self._seen |= {key: (name, now) for key, name in going.items()}
        found: dict[str, RunEnd] = {}
        with contextlib.suppress(ConfigError):
            for past in past_runs() if gone else ():
                is_new = past.record.ended is not None and time.time() - past.record.ended < ENDED_LATELY
                for key, name in gone.items():
                    if is_new and (past.record.cluster, past.record.name) == (self._cluster.name, name):
                        found[key] = RunEnd("", past.outcome(), has_failed=past.has_failed)
        return found

    # Talks

    def _begin(self, cards: Mapping[str, messages.Card], agents: Collection[str], wanted: Collection[str]) -> None:
        """Ask all processes that are not being asked."""
        readers = self._readers(cards, agents)
        spokesmen = self._spokesmen(cards.keys() - agents)
        reporters = self._reporters(wanted)
        tellers = self._tellers(cards)
        for key in self._talks.keys() - cards.keys():
            self._talks.pop(key).answers.cancel()
        for key, card in cards.items():
            if key in self._talks or not self._pauses.is_due(key):
                continue
            questions: list[messages.Question] = []
            if key not in agents:
                questions.append(messages.Inspect(PROGRESS, self._events.page(self._run_of.get(key, ("", ""))[1], key)))
            if key in spokesmen:
                questions += [messages.Ask(), messages.Inspect(NETWORK)]
            elif key not in agents and key not in self._progress:
                questions.append(messages.Ask())
            if key in readers:
                questions.append(messages.Inspect(READINGS))
            if key in reporters:
                questions.append(messages.Inspect(REPORTS))
            if (output := tellers.get(key)) is not None:
                questions.append(output)
            if questions:
                self._talks[key] = _Talk(
                    tuple(questions), time.monotonic(), self._visit.converse(card, questions, TALK_SECONDS)
                )

    def _readers(self, cards: Mapping[str, messages.Card], agents: Collection[str]) -> set[str]:
        """Return one process of each machine, which tells how the machine is used: its agent, or else a rank."""
        found: dict[bytes, str] = {}
        for key in sorted(cards, key=lambda key: (key not in agents, key)):
            found.setdefault(machine_of(cards[key]), key)
        return set(found.values())

    def _spokesmen(self, keys: Collection[str]) -> set[str]:
        """Return a member of each run that was not asked for its state lately."""
        now, found = time.monotonic(), set()
        for run_key in {self._run_of[key][1] for key in keys if key in self._progress}:
            members = [key for key in keys if key in self._progress and self._run_of[key][1] == run_key]
            if all(now - self._tells.get(key, (-TELL_EVERY, None))[0] >= TELL_EVERY for key in members):
                found.add(min(members, key=lambda key: (key in self._talks, self._progress[key].rank, key)))
        return found

    def _reporters(self, wanted: Collection[str]) -> set[str]:
        """Return the lowest rank that reports, of each run whose earlier reports are wanted."""
        found: dict[str, str] = {}
        for key, progress in sorted(self._progress.items(), key=lambda each: each[1].rank):
            if progress.reported and (run_key := self._run_of[key][1]) in wanted:
                found.setdefault(run_key, key)
        return set(found.values())

    def _tellers(self, cards: Mapping[str, messages.Card]) -> dict[str, messages.Inspect]:
        """Return the questions for output: to one rank of each machine of the runs whose output is wanted."""
        self._followed = [output for output in self._followed if output.is_wanted]
        found: dict[str, messages.Inspect] = {}
        for output in self._followed:
            ranks = {
                key: progress.rank
                for key, progress in self._progress.items()
                if key in cards and key not in self._talks and self._run_of[key][1] == output.run_key
            }
            by_machine = {machine_of(cards[key]).hex(): key for key in sorted(ranks, key=lambda key: -ranks[key])}
            for machine, key in by_machine.items():
                if key not in found and (question := output.question(machine)) is not None:
                    found[key] = question
        return found

    def _take(self) -> dict[str, _Answers]:
        """Return the answers of the talks that are over, by process."""
        taken: dict[str, _Answers] = {}
        for key, talk in list(self._talks.items()):
            if talk.answers.done():
                del self._talks[key]
                with contextlib.suppress(CoveyError, TimeoutError):
                    came = dict(zip(talk.questions, talk.answers.result(), strict=False))
                    taken[key] = _Answers(talk.asked, came)
        return taken

    # What was said

    def _heard(
        self,
        key: str,
        state: messages.PeerReport,
        answers: _Answers | None,
        now: float,
    ) -> HeardProcess:
        """Return what a process is known to do, after these answers."""
        came = {} if answers is None else answers.by_question
        first, arrived = next((each for question, each in came.items() if _asks_progress(question)), (None, now))
        if isinstance(first, messages.Inspected):
            self._pauses.answered(key, has_pages=has_pages(first))
        progress = read_progress(first)
        if progress is not None:
            self._progress[key] = progress
            self._run_of[key] = printable(progress.run, 100), f"{progress.run}:{progress.run_id.hex()}"
        elif first is not None:
            self._progress.pop(key, None)
        for reply, _ in came.values():
            if isinstance(reply, messages.Tell):
                self._tells[key] = now, reply
                if progress is None:
                    self._run_of[key] = printable(reply.run, 100), self._run_of.get(key, ("", ""))[1]
        told_at, tell = self._tells.get(key, (-TELL_EVERY, None))
        run, run_key = self._run_of.get(key, ("", ""))
        if progress is not None:
            self._less.discard(key)
        elif isinstance(first, messages.Inspected) and not first.pages and tell is not None and tell.state == "running":
            self._less.add(key)
        return HeardProcess(
            key=key,
            run=run,
            run_key=run_key,
            machine=machine_of(state.card).hex(),
            pid=state.card.pid,
            version=state.card.version,
            arrived=arrived,
            asked=now if answers is None else answers.asked,
            progress=progress,
            tell=tell if key not in self._progress and now - told_at < FRESH_SECONDS else None,
            tells_less=key in self._less,
            clock_offset=_trusted(state.clock_offset),
        )

    def _note_events(self, heard: Mapping[str, HeardProcess], at: float) -> None:
        by_run: dict[str, dict[str, RankProgress]] = {}
        for key, each in heard.items():
            if each.progress is not None:
                by_run.setdefault(each.run_key, {})[key] = each.progress
        for run_key, told in by_run.items():
            self._events.told(run_key, told, at)

    def _reports(
        self,
        answers: Mapping[str, _Answers],
        states: Mapping[str, messages.PeerReport],
    ) -> dict[str, tuple[ReportRow, ...]]:
        """Return what programs have reported since they began, with times of this machine's clock."""
        found: dict[str, tuple[ReportRow, ...]] = {}
        for key, each in answers.items():
            for answer in each.all():
                if (rows := read_reports(answer)) is not None and key in self._run_of and key in states:
                    ahead = _trusted(states[key].clock_offset)
                    found[self._run_of[key][1]] = tuple(
                        msgspec.structs.replace(row, at=max(0.0, row.at - ahead)) if ahead else row for row in rows
                    )
        return found

    def _read(
        self,
        answers: Mapping[str, _Answers],
        cards: Mapping[str, messages.Card],
        now: float,
    ) -> None:
        """Take readings of machines, and which of them are near each other."""
        machines = {card.id: machine_of(card).hex() for card in cards.values()}
        for key, each in answers.items():
            for answer in each.all():
                if key in cards and (readings := read_readings(answer)) is not None:
                    self._readings[machine_of(cards[key]).hex()] = readings
                if isinstance(answer, messages.Inspected) and answer.what == NETWORK and answer.pages:
                    with contextlib.suppress(RemoteProtocolError):
                        self._measured(decode_network(answer.body), machines)

    def _take_output(self, answers: Mapping[str, _Answers], cards: Mapping[str, messages.Card]) -> None:
        for key in answers.keys() & cards.keys():
            for answer in answers[key].all():
                if isinstance(answer, messages.Inspected) and answer.what == OUTPUT:
                    for output in self._followed:
                        if self._run_of.get(key, ("", ""))[1] == output.run_key:
                            output.told(machine_of(cards[key]).hex(), answer)

    def _measured(self, network: MeasuredNetwork, machines: Mapping[bytes, str]) -> None:
        """Take what the ranks of a run have measured; `machines` has the machine of each process."""
        at = [machines.get(member.id) for member in network.members]
        sites = {
            machine: member.site for machine, member in zip(at, network.members, strict=True) if machine is not None
        }
        self._sites = sites if len(set(sites.values())) > 1 else {}
        self._speeds = {
            (source, target): rate
            for source, member in zip(at, network.members, strict=True)
            for target, rate in zip(at, member.rates, strict=False)
            if source is not None and target not in (None, source) and 0 < rate < math.inf
        }

    def _machines(
        self, members: Sequence[messages.PeerReport], agents: Sequence[messages.Card]
    ) -> tuple[MachineHeard, ...]:
        found: dict[str, MachineHeard] = {}
        here = self._own.hex()
        for card, is_agent in [*((card, True) for card in agents), *((state.card, False) for state in members)]:
            machine = machine_of(card)
            id = machine.hex()
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
                    site=self._sites.get(id),
                )
        self._readings = {id: each for id, each in self._readings.items() if id in found}
        return tuple(
            replace(each, readings=self._readings.get(each.id))
            for each in sorted(found.values(), key=lambda m: (m.name, m.id))
        )

    def _applicants(self, tells: Iterable[messages.Tell], answered: frozenset[bytes]) -> tuple[Applicant, ...]:
        waiting = {each.id: each for tell in tells for each in tell.waiting}
        waiting |= {each.id: each for each in self._visit.mesh.rules.waiting()}
        return tuple(
            Applicant(id_text(each.id), short_id(each.id), printable(each.name, 100), each.ip)
            for _, each in sorted(waiting.items())
            if each.id not in answered | self._cluster.denied
        )

    def _forget(self, keys: Collection[str]) -> None:
        self._events.forget(keys)
        self._pauses.forget(keys)
        self._tells = {key: each for key, each in self._tells.items() if key in keys}
        self._progress = {key: each for key, each in self._progress.items() if key in keys}
        self._run_of = {key: each for key, each in self._run_of.items() if key in keys}
        self._less &= set(keys)

    # Output, agents and actions

    def follow(self, output: FarOutput) -> None:
        """Ask for the output of a run as long as it is wanted; on any thread."""
        self._followed = [*self._followed, output]

    def read_programs(self) -> None:
        """Ask the agents for the output of their programs that is wanted; on the thread of `ask_programs`."""
        for output in [each for each in self._followed if each.is_wanted]:
            for agent, number in self._programs.get(output.run, []):
                program = output.program(agent.machine, agent.name, number, self._tails.get((agent.machine, number), 0))
                if program is not None:
                    left = BATCHES
                    with contextlib.suppress(CoveyError):
                        for batch in itertools.islice(
                            agent.stream("follow", number, program.next, False, False), BATCHES
                        ):
                            output.printed(program, batch)
                            left -= 1
                    program.has_more = left == 0
            output.programs_asked = True

    def ask_programs(self) -> None:
        """Ask the agents which programs they run; on a thread of its own, every few seconds."""
        book = trust.trusted(self._cluster)
        programs: dict[str, list[tuple[Any, int]]] = {}
        tails: dict[tuple[bytes, int], int] = {}
        agents = self._terminal.agents(book)
        refusals = 0
        for agent in agents:
            try:
                for page in agent.stream("programs"):
                    for each in page:
                        if each.code is None and agent.machine in book:
                            programs.setdefault(each.run, []).append((agent, each.number))
                            tails[agent.machine, each.number] = each.tail
            except AuthError:
                refusals += 1
            except CoveyError:
                continue
        self._programs, self._tails = programs, tails
        self._refused_by_agents = bool(agents) and refusals == len(agents)

    def agents_of(self, run: str) -> list[tuple[Any, int]]:
        """Return the agents of trusted machines that have started a run, each with the number of its program."""
        return self._programs.get(run, [])

    def request_checkpoint(self, run_key: str) -> messages.CheckpointProgress:
        keys = {key for key, (_, its) in self._run_of.items() if its == run_key}
        with self._lock:
            for state in self._visit.members():
                if (key := _process(state.card)) in keys:
                    if (talk := self._talks.pop(key, None)) is not None:
                        talk.answers.cancel()
                    with contextlib.suppress(ConnectError, DeadlineError):  # another one knows
                        answer = self._visit.ask(state.card, request_of_checkpoint(), CHECKPOINT_ASK_SECONDS)
                        if isinstance(answer, messages.CheckpointProgress):
                            return answer
        raise DeadlineError(f"no member of the run answered within the timeout of {CHECKPOINT_ASK_SECONDS:g} s")

    @property
    def cluster(self) -> Any:
        """The cluster, as its file says now."""
        return self._visit.mesh.cluster

    def close(self) -> None:
        with self._lock:
            for talk in self._talks.values():
                talk.answers.cancel()
            self._talks.clear()


def _process(card: messages.Card) -> str:
    return f"{card.id.hex()}:{card.life.hex()}"


def _asks_progress(question: messages.Question) -> bool:
    return isinstance(question, messages.Inspect) and question.what == PROGRESS


def _trusted(offset: float) -> float:
    return offset if abs(offset) >= CLOCK_TRUST else 0.0


def _approver(cluster: Any) -> str:
    """Return the name of the machine that signed the charter last."""
    return "" if cluster.charter is None else printable(cluster.charter.machine, 100)
