"""The one sentence that says what is wrong with a run or a cluster, why it is said, and what to type next. Pure.

Each function looks at one thing and returns None if there is nothing to say. The order of the rows in `of_run` and
`of_all` is the order of urgency: what comes first hides the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from covey.base.text import listed_ranks
from covey.watch.overview import Sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.watch.overview import Happening, MachineSeen, RankSeen, RunSeen

RECENT_SECONDS: Final = 60.0
"""How long a loss is told after the run has gone on."""
SILENT_SECONDS: Final = 3.0
REPORT_LINE: Final = "group.report(step=step, loss=loss)"
"""The line that a program adds to report."""
LATE_SENTENCES: Final = ("late", "stopped", "silent")


@dataclass(frozen=True)
class RunFacts:
    """What the sentence about a run is concluded from."""

    name: str
    state: str
    ranks: Sequence[RankSeen] = ()
    machines: Mapping[str, str] = field(default_factory=dict)
    """Names by id."""
    waits: Sequence[str] = ()
    """What its nodes wait for: the text of the first, then its troubles."""
    fault: str = ""
    """The error with which its group has failed."""
    fault_rank: int | None = None
    lost: Sequence[Happening] = ()
    """The losses that were heard of, oldest first."""
    now: float = 0.0
    waited: Mapping[int, float] = field(default_factory=dict)
    """By rank that waits: for how many seconds."""
    slow: tuple[int, float] | None = None
    """The rank that is slower than the others, and which share of their time they wait for it."""
    has_reports: bool = False
    runs_for: float = 0.0
    reports: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    tells_less: Sequence[tuple[str, str]] = ()
    """Machines and versions of processes that do not know the question."""
    own_version: str = ""
    recovering: bool = False
    ended_with: str = ""


def of_run(facts: RunFacts) -> Sentence:
    """Return the sentence about a run."""
    for say in (_failed, _ended, _waits, _stopped, _late, _silent, _lost, _not_finite, _slow, _versions, _no_reports):
        if (sentence := say(facts)) is not None:
            return sentence
    return _fine(facts)


def _failed(facts: RunFacts) -> Sentence | None:
    if facts.state != "failed" and not facts.fault:
        return None
    who = "" if facts.fault_rank is None else f"{_rank(facts, facts.fault_rank)}: "
    text = f"The run {facts.name} failed: {facts.fault or facts.ended_with or 'its processes ended with an error'}"
    why = (f"{who}{facts.fault}",) if facts.fault else ()
    return Sentence(text, "error", why, ("covey trace", f"covey logs {facts.name}"))


def _ended(facts: RunFacts) -> Sentence | None:
    if facts.state != "ended":
        return None
    return Sentence(f"The run {facts.name} has ended.", "fine", (facts.ended_with,) if facts.ended_with else ())


def _waits(facts: RunFacts) -> Sentence | None:
    if facts.state != "waiting":
        return None
    first, *troubles = facts.waits or ("the run waits for its members",)
    return Sentence(first, "warning" if troubles else "note", tuple(troubles), ("covey doctor",))


def _stopped(facts: RunFacts) -> Sentence | None:
    stopped = [rank for rank in facts.ranks if rank.state == "stopped"]
    if not stopped:
        return None
    first = stopped[0]
    others = _waiting_for(facts, first.rank)
    text = f"{_named(facts, stopped)} stopped (SIGSTOP){_and_wait(facts, others)}"
    why = [f"the kernel says that process {rank.pid} is stopped" for rank in stopped]
    return Sentence(text, "warning", tuple(why), tuple(f"kill -CONT {rank.pid}" for rank in stopped[:4]))


def _late(facts: RunFacts) -> Sentence | None:
    late = [rank for rank in facts.ranks if rank.state == "late"]
    if not late:
        return None
    first = min(late, key=lambda rank: (-len(_waiting_for(facts, rank.rank)), rank.rank))
    others = _waiting_for(facts, first.rank)
    sequences = [rank.sequence for rank in facts.ranks if rank.rank in others and rank.sequence is not None]
    behind = max(sequences, default=0) - (first.sequence or 0)
    text = f"{_rank(facts, first.rank)} is {_count(max(1, behind), 'operation')} behind{_and_wait(facts, others, ';')}"
    doing = (
        f"in {first.operation} since {_span(first.operation_age)}"
        if first.operation
        else f"between operations since {_span(first.operation_age)}"
    )
    why = [f"rank {first.rank} is {doing}", f"its process {first.pid} answers"]
    waiting = next((rank for rank in facts.ranks if rank.rank in others), None)
    if waiting is not None and waiting.operation:
        why.append(f"rank {waiting.rank} is in {waiting.operation}, operation {waiting.sequence}")
    return Sentence(text, "warning", tuple(why), (f"covey trace {facts.name}",))


def _silent(facts: RunFacts) -> Sentence | None:
    silent = [rank for rank in facts.ranks if rank.state == "silent"]
    if not silent:
        return None
    first = silent[0]
    others = _waiting_for(facts, first.rank)
    verb = "do" if len(silent) > 1 else "does"
    text = f"{_named(facts, silent, '')} {verb} not answer since {_span(max(rank.age for rank in silent))}"
    text += _and_wait(facts, others, ";")
    why = [rank.reason for rank in silent if rank.reason][:4]
    return Sentence(text, "warning", tuple(why) or ("no answer came from its process",), ("covey doctor",))


def _lost(facts: RunFacts) -> Sentence | None:
    recent = [event for event in facts.lost if facts.now - event.at <= RECENT_SECONDS]
    if not recent:
        return None
    last = recent[-1]
    ranks = f"rank {last.ranks[0]}" if len(last.ranks) == 1 else f"ranks {listed_ranks(sorted(last.ranks))}"
    were = "was" if len(last.ranks) == 1 else "were"
    ago = _span(max(0.0, facts.now - last.at))
    left = sum(rank.state not in ("lost", "left") for rank in facts.ranks)
    text = f"{ranks if last.ranks else 'a rank'} {were} lost {ago} ago ({last.text})"
    text += "; the run recovers." if facts.recovering else f"; the run continues with {_count(left, 'rank')}."
    return Sentence(text, "warning", tuple(event.text for event in recent[-4:]), (f"covey logs {facts.name}",))


def _not_finite(facts: RunFacts) -> Sentence | None:
    wrong = {name: value for name, value in facts.reports.items() if not math.isfinite(value)}
    if not wrong:
        return None
    name, value = next(iter(sorted(wrong.items())))
    when = "" if facts.step is None else f" at step {facts.step}"
    return Sentence(f"{name} is {value:g}{when}.", "warning", ("the program reported it",), ())


def _slow(facts: RunFacts) -> Sentence | None:
    if facts.slow is None:
        return None
    rank, share = facts.slow
    text = f"{_rank(facts, rank)} is slower than the others, which wait for it {share:.0%} of their time."
    why = (f"rank {rank} is hardly ever in an operation when the others are", "its processor or its data is slower")
    return Sentence(text, "note", why, (f"covey trace {facts.name}",))


def _versions(facts: RunFacts) -> Sentence | None:
    if not facts.tells_less:
        return None
    machine, version = facts.tells_less[0]
    text = f"{machine} runs covey {version or '(unknown)'}: it tells less."
    why = ("missing: operations, steps, speeds of links, reports",)
    return Sentence(text, "note", why, (f"pip install covey=={facts.own_version}",) if facts.own_version else ())


def _no_reports(facts: RunFacts) -> Sentence | None:
    if facts.has_reports or facts.runs_for < RECENT_SECONDS or facts.state != "running":
        return None
    why = ("add the line where a step ends; any rank may call it",)
    return Sentence("The program reports no loss.", "fine", why, (REPORT_LINE,))


def _fine(facts: RunFacts) -> Sentence:
    live = [rank for rank in facts.ranks if rank.state not in ("lost", "left", "joining")]
    machines = {rank.machine for rank in live}
    where = f" on {_count(len(machines), 'machine')}" if len(machines) > 1 else ""
    return Sentence(f"{_count(len(live), 'rank')}{where} at work." if live else "")


# The cluster


@dataclass(frozen=True)
class AllFacts:
    """What the sentence about everything is concluded from."""

    cluster: str
    machines: Sequence[MachineSeen] = ()
    runs: Sequence[RunSeen] = ()
    has_searched: bool = True
    """Whether enough time has passed to say that nobody answers."""
    agents: int = 0
    agents_refuse: bool = False
    """Whether there are agents, and none starts programs for this machine."""
    own_id: str = ""
    applicants: Sequence[str] = ()
    can_approve: bool = False
    approver: str = ""


def of_all(facts: AllFacts) -> Sentence:
    """Return the sentence about all machines and runs."""
    order = {"error": 0, "warning": 1, "note": 2, "fine": 3}
    running = [run for run in facts.runs if run.state not in ("ended",)]
    worst = min(running, key=lambda run: order[run.sentence.level], default=None)
    if worst is not None and worst.sentence.level in ("error", "warning"):
        return worst.sentence
    if facts.applicants:
        return _asks(facts)
    if worst is not None:
        return worst.sentence
    return next(filter(None, (say(facts) for say in (_nothing, _nobody, _not_for_us, _ready))), Sentence(""))


def _asks(facts: AllFacts) -> Sentence:
    names = ", ".join(facts.applicants[:4])
    text = f"{names} ask{'s' * (len(facts.applicants) == 1)} to join."
    if facts.can_approve:
        return Sentence(text, "note", ("compare the id with what `covey up` prints there",), ("covey allow",))
    where = f"Machines are approved on {facts.approver}." if facts.approver else "Machines are approved elsewhere."
    return Sentence(f"{text} {where}", "note", ("the owner key is not on this machine",), ("covey allow",))


def _nothing(facts: AllFacts) -> Sentence | None:
    if facts.cluster or facts.runs:
        return None
    why = ("no cluster is saved here, and no run of `covey run -n` goes on",)
    return Sentence("This machine is in no cluster.", "note", why, ("covey demo", "covey init", "covey enroll"))


def _nobody(facts: AllFacts) -> Sentence | None:
    if any(not machine.is_here and machine.state != "refused" for machine in facts.machines) or not facts.cluster:
        return None
    refused = [f"{machine.name}: {machine.problem}" for machine in facts.machines if machine.state == "refused"]
    if refused:
        text = f"{facts.machines[-1].name if len(refused) == 1 else _count(len(refused), 'machine')} was refused."
        return Sentence(text, "warning", tuple(refused[:8]), ("covey doctor",))
    if any(machine.is_here and machine.state in ("ready", "running") and facts.agents for machine in facts.machines):
        return None
    if not facts.has_searched:
        return Sentence("Looking for other machines ...", "note")
    return Sentence(
        "No other machine has answered yet.",
        "note",
        ("other machines join with the code that `covey init --show` prints", "`covey doctor` looks for the cause"),
        ("covey enroll", "covey doctor"),
    )


def _not_for_us(facts: AllFacts) -> Sentence | None:
    if not facts.agents_refuse:
        return None
    return Sentence(
        "These machines run programs, but not for this one.",
        "note",
        ("no agent allows this machine",),
        (f"covey up --allow {facts.own_id}" if facts.own_id else "covey up --allow ID",),
    )


def _ready(facts: AllFacts) -> Sentence | None:
    ready = [machine for machine in facts.machines if machine.state in ("ready", "running")]
    if not ready:
        return None
    cores = sum(machine.cores or 0 for machine in ready)
    gpus = sum(len(machine.gpus) for machine in ready)
    has = [_count(cores, "core")] * bool(cores) + [_count(gpus, "GPU")] * bool(gpus)
    verb = "is" if len(ready) == 1 else "are"
    text = f"{_count(len(ready), 'machine')} {verb} ready{': ' * bool(has)}{', '.join(has)}."
    return Sentence(text, "fine", (), ("covey run --on all train.py",))


# Words


def _rank(facts: RunFacts, rank: int) -> str:
    seen = next((each for each in facts.ranks if each.rank == rank), None)
    machine = facts.machines.get(seen.machine, "") if seen is not None else ""
    return f"rank {rank} ({machine})" if machine else f"rank {rank}"


def _named(facts: RunFacts, ranks: Sequence[RankSeen], verb: str = " is, are") -> str:
    one, many = verb.split(", ") if verb else ("", "")
    if len(ranks) == 1:
        return f"{_rank(facts, ranks[0].rank)}{one}"
    return f"ranks {listed_ranks([rank.rank for rank in ranks])}{many and ' ' + many}"


def _waiting_for(facts: RunFacts, rank: int) -> list[int]:
    return [each.rank for each in facts.ranks if rank in each.waits_for]


def _and_wait(facts: RunFacts, others: Sequence[int], joint: str = ";") -> str:
    if not others:
        return "."
    since = max((facts.waited.get(rank, 0.0) for rank in others), default=0.0)
    verb = "waits" if len(others) == 1 else "wait"
    return f"{joint} {_count(len(others), 'rank')} {verb} for it since {_span(since)}."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def lines(sentence: Sentence) -> Iterator[str]:
    """Yield the sentence, why it is said, and what to type, a line each."""
    yield sentence.text
    yield from (f"  because {line}" for line in sentence.why)
    yield from (f"  $ {command}" for command in sentence.commands)
