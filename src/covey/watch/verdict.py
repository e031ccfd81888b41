"""The one sentence that says what is wrong with a run or a cluster, why it is said, and what to type next. Pure.

Each function looks at one thing and returns None if there is nothing to say. The order of the rows in `of_run` and
`of_all` is the order of urgency: what comes first hides the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final

from covey.base.numbers import operation_name
from covey.base.text import listed, listed_briefly, listed_ranks, spell_rate
from covey.watch.happenings import spell_ms
from covey.watch.overview import Sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.watch.happenings import RunEvent
    from covey.watch.overview import MachineSeen, RankSeen, RunSeen
    from covey.watch.waits import LongOperation, SlowLink

NEWS_SECONDS: Final = 8.0
"""How long a loss or a newcomer is told before anything that goes on meanwhile, unless it stops the run."""
TOLD_AFTER_SECONDS: Final = 60.0
"""How long it is told afterwards."""
NAMED_RANKS: Final = 4
"""So many ranks are named each with its machine."""
STUCK_OPERATION_SECONDS: Final = 5.0
"""An operation of all ranks in which nothing moved for so long is a warning."""
REPORT_LINE: Final = "group.report(step=step, loss=loss)"
"""The line that a program adds to report."""


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
    outcome: str = ""
    """How it has ended, as its keeper has written it down."""
    change: RunEvent | None = None
    """The last loss, the last that left, or the last newcomer."""
    has_state: bool = False
    """Whether the last newcomer has got the state of the run."""
    generation: int = -1
    size: int = 0
    """How many ranks take part now."""
    is_recovering: bool = False
    """Whether operations have not continued yet after a loss."""
    now: float = 0.0
    waited: Mapping[int, float] = field(default_factory=dict)
    """By rank that waits: for how many seconds."""
    slow: tuple[int, float] | None = None
    """The rank that is slower than the others, and which share of their time they wait for it."""
    slow_link: SlowLink | None = None
    """The link that the ranks wait for most of the time."""
    long: LongOperation | None = None
    """The operation that all ranks are in for a while."""
    moved: float | None = None
    """Bytes a second that operations have moved lately; None if that is not known."""
    has_reports: bool = False
    runs_for: float = 0.0
    reports: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    tells_less: Sequence[tuple[str, str]] = ()
    """Machines and versions of processes that do not know the question."""
    own_version: str = ""


def of_run(facts: RunFacts) -> Sentence:
    """Return the sentence about a run."""
    sentence = next(filter(None, (say(facts) for say in _RUN_SENTENCES)), None) or _fine(facts)
    return replace(sentence, text=_begun(sentence.text))


def _failed(facts: RunFacts) -> Sentence | None:
    if facts.state != "failed" and not facts.fault:
        return None
    who = "" if facts.fault_rank is None else f"{_rank(facts, facts.fault_rank)}: "
    text = f"The run {facts.name} failed: {facts.fault or facts.outcome or 'its processes ended with an error'}"
    why = [f"{who}{facts.fault}"] * bool(facts.fault) + [facts.outcome] * bool(facts.outcome)
    return Sentence(text, "error", tuple(why), ("covey trace", f"covey logs {facts.name}"))


def _ended(facts: RunFacts) -> Sentence | None:
    if facts.state != "ended":
        return None
    return Sentence(f"The run {facts.name} has ended{': ' * bool(facts.outcome)}{facts.outcome}.", "fine")


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
    are = "is" if len(stopped) == 1 else "are"
    text = f"{_named(facts, stopped)} {are} stopped (SIGSTOP){_and_wait(facts, others, len(stopped))}"
    why = [f"the kernel says that process {rank.pid} is stopped" for rank in stopped]
    return Sentence(text, "warning", tuple(why), tuple(f"kill -CONT {rank.pid}" for rank in stopped[:4]))


def _late(facts: RunFacts) -> Sentence | None:
    late = [rank for rank in facts.ranks if rank.state == "late"]
    if not late or (facts.slow_link is not None and all(rank.operation for rank in late)):
        return None  # over a slow link, ranks leave an operation one after the other
    first = min(late, key=lambda rank: (-len(_waiting_for(facts, rank.rank)), rank.rank))
    others = _waiting_for(facts, first.rank)
    sequences = [rank.sequence for rank in facts.ranks if rank.rank in others and rank.sequence is not None]
    behind = max(sequences, default=0) - (first.sequence or 0)
    text = f"{_rank(facts, first.rank)} is {_count(max(1, behind), 'operation')} behind{_and_wait(facts, others)}"
    doing = (
        f"in {first.operation} for {_span(first.operation_age)}"
        if first.operation
        else f"between operations for {_span(first.operation_age)}"
    )
    why = [f"rank {first.rank} has been {doing}", f"its process {first.pid} answers"]
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
    verb = "have" if len(silent) > 1 else "has"
    text = f"{_named(facts, silent)} {verb} not answered for {_span(max(rank.age for rank in silent))}"
    text += _and_wait(facts, others, len(silent))
    why = list(dict.fromkeys(rank.reason for rank in silent if rank.reason))[:4]
    return Sentence(text, "warning", tuple(why) or ("no answer came from its process",), ("covey doctor",))


def _news(facts: RunFacts) -> Sentence | None:
    return _change(facts) if _change_age(facts) <= NEWS_SECONDS or facts.is_recovering else None


def _past(facts: RunFacts) -> Sentence | None:
    return _change(facts) if _change_age(facts) <= TOLD_AFTER_SECONDS else None


def _change_age(facts: RunFacts) -> float:
    return math.inf if facts.change is None else facts.now - facts.change.at


def _change(facts: RunFacts) -> Sentence | None:
    """Say which rank was lost, left or joined last."""
    change = facts.change
    if change is None:
        return None
    verbs = {"lost": "were lost" if len(change.ranks) > 1 else "was lost", "left": "left", "joined": "joined"}
    text = f"{change.who or 'a rank'} {verbs[change.kind]} {_span(max(0.0, _change_age(facts)))} ago"
    text += f": {change.why}" if change.why else ""
    why = []
    if change.kind == "joined":
        text += f"; the run continues with {_count(facts.size, 'rank')}."
        why = [f"the members let it in with generation {change.generation}, and number the ranks anew"]
        why += ["it has got the state of the run"] * facts.has_state
    elif facts.is_recovering:
        text += "; the run recovers."
    elif change.generation < facts.generation:
        text += f"; the run continues with {_count(facts.size, 'rank')}."
    else:
        after = "" if change.recovered is None else f" after {spell_ms(change.recovered)}"
        text += f"; the run continued{after} with {_count(facts.size, 'rank')}."
    commands = (f"covey logs {facts.name}",) if change.kind == "lost" else ()
    return Sentence(text, "warning" if change.kind == "lost" else "note", tuple(why), commands)


def _not_finite(facts: RunFacts) -> Sentence | None:
    wrong = {name: value for name, value in facts.reports.items() if not math.isfinite(value)}
    if not wrong:
        return None
    name, value = next(iter(sorted(wrong.items())))
    when = "" if facts.step is None else f" at step {facts.step}"
    return Sentence(f"{name} is {value:g}{when}.", "warning", ("the program reported it",), ())


def _slow_link(facts: RunFacts) -> Sentence | None:
    if facts.slow_link is None:
        return None
    load, usual = facts.slow_link
    link = f"from {_machine(facts, load.source)} to {_machine(facts, load.target)}"
    rate = spell_rate(load.rate)
    has_fallen = facts.slow_link.has_fallen
    if has_fallen:
        text = f"the link {link} has become slow: it carries {rate}, before {spell_rate(usual)}; the ranks wait for it."
    else:
        text = f"the ranks wait for the network most of the time: the link {link} carries {rate}."
    why = [f"{_machine(facts, load.source)} has something to send to it {load.busy:.0%} of the time"]
    why += ["the ranks spend most of their time in operations, and none of them is behind"]
    if not has_fallen:
        why.append('compress="auto" sends less, if the values may be rounded')
    return Sentence(text, "warning" if has_fallen else "note", tuple(why), ("covey status --network",))


def _slow(facts: RunFacts) -> Sentence | None:
    if facts.slow is None:
        return None
    rank, share = facts.slow
    text = f"{_rank(facts, rank)} is slower than the others, which wait for it {share:.0%} of their time."
    own = next((each.compute for each in facts.ranks if each.rank == rank), None)
    others = [each.compute for each in facts.ranks if each.rank != rank and each.compute is not None]
    is_known = own is not None and others and facts.step is not None
    why = [f"it computes {_span(own)} in a step, the others {_span(median(others))}"] if is_known else []
    why += [f"rank {rank} is hardly ever in an operation when the others are", "its processor or its data is slower"]
    return Sentence(text, "note", tuple(why), (f"covey trace {facts.name}",))


def _long(facts: RunFacts) -> Sentence | None:
    if facts.long is None:
        return None
    ranks = sum(rank.state not in ("lost", "left", "joining") for rank in facts.ranks)
    name = operation_name(facts.long.operation)
    text = f"all {ranks} ranks have been in one {name} for {_span(facts.long.seconds)}"
    is_stuck = facts.moved == 0 and facts.long.seconds >= STUCK_OPERATION_SECONDS
    if facts.moved is not None:
        text += f"; {spell_rate(facts.moved)} move" if facts.moved else ", and nothing moves"
    why = ("all of them have begun it, and none has ended it",)
    return Sentence(f"{text}.", "warning" if is_stuck else "note", why, (f"covey trace {facts.name}", "covey doctor"))


def _newcomer(facts: RunFacts) -> Sentence | None:
    waiting = [rank for rank in facts.ranks if rank.state == "joining"]
    if not waiting:
        return None
    names = list(dict.fromkeys(_machine(facts, rank.machine) for rank in waiting))
    text = f"{listed_briefly(names)} wait{'s' * (len(names) == 1)} to join the run."
    why = ("newcomers are let in when the program asks for the next generation (covey.generations)",)
    return Sentence(text, "note", why)


def _versions(facts: RunFacts) -> Sentence | None:
    if not facts.tells_less:
        return None
    machine, version = facts.tells_less[0]
    text = f"{machine} runs covey {version or '(unknown)'}: it tells less."
    why = ("missing: operations, steps, speeds of links, reports",)
    return Sentence(text, "note", why, (f"pip install covey=={facts.own_version}",) if facts.own_version else ())


def _no_reports(facts: RunFacts) -> Sentence | None:
    if facts.has_reports or facts.runs_for < TOLD_AFTER_SECONDS or facts.state != "running":
        return None
    why = ("add the line where a step ends; any rank may call it",)
    return Sentence("The program reports no loss.", "fine", why, (REPORT_LINE,))


def _fine(facts: RunFacts) -> Sentence:
    live = [rank for rank in facts.ranks if rank.state not in ("lost", "left", "joining")]
    machines = {rank.machine for rank in live}
    where = f" on {_count(len(machines), 'machine')}" if len(machines) > 1 else ""
    return Sentence(f"{_count(len(live), 'rank')}{where} at work." if live else "")


_RUN_SENTENCES: Final[Sequence[Callable[[RunFacts], Sentence | None]]] = (
    *(_failed, _ended, _waits, _stopped, _late, _silent, _news, _not_finite, _slow_link, _slow, _long),
    *(_past, _newcomer, _versions, _no_reports),
)

# The cluster


@dataclass(frozen=True)
class AllFacts:
    """What the sentence about everything is concluded from."""

    cluster: str
    machines: Sequence[MachineSeen] = ()
    runs: Sequence[RunSeen] = ()
    has_searched: bool = True
    """Whether enough time has passed to say that no process answers."""
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
    why = ("no cluster is saved here, and no run of `covey run -n` is running",)
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


def _begun(text: str) -> str:
    """Return a sentence with a capital, if it begins with a word of ours and not with a name."""
    return text[:1].upper() + text[1:] if text.startswith(("rank", "the ", "all ", "a rank")) else text


def _rank(facts: RunFacts, rank: int) -> str:
    """Return what a rank is called: with its machine, if the run is on several."""
    seen = next((each for each in facts.ranks if each.rank == rank), None)
    machine = facts.machines.get(seen.machine, "") if seen is not None else ""
    return f"rank {rank} ({machine})" if machine and len({each.machine for each in facts.ranks}) > 1 else f"rank {rank}"


def _machine(facts: RunFacts, id: str) -> str:
    return facts.machines.get(id) or "another machine"


def _named(facts: RunFacts, ranks: Sequence[RankSeen]) -> str:
    """Return what these ranks are called, with their machines if they are few and the run is on several."""
    if len(ranks) <= NAMED_RANKS:
        return listed([_rank(facts, rank.rank) for rank in ranks])
    return f"ranks {listed_ranks([rank.rank for rank in ranks])}"


def _waiting_for(facts: RunFacts, rank: int) -> list[int]:
    return [each.rank for each in facts.ranks if rank in each.waits_for]


def _and_wait(facts: RunFacts, others: Sequence[int], waited_for: int = 1) -> str:
    if not others:
        return "."
    seconds = max((facts.waited.get(rank, 0.0) for rank in others), default=0.0)
    verb = "has" if len(others) == 1 else "have"
    them = "it" if waited_for == 1 else "them"
    return f"; {_count(len(others), 'rank')} {verb} waited {_span(seconds)} for {them}."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
