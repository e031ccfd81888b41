"""The record of a run under chaos, the outcome of each of its faults, and both as text and as JSON.

Outcomes come from the job's own events: a view without a lost member, a view of the same members, a newcomer's first
generation. An event says when operations continued, not which fault caused it, so events and faults are matched in
order. A checked run also has the verdict of its checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from covey.cli.layout import Column
from covey.cli.terminal import FittedTable, Paragraph
from covey.lab.chaos.faults import LOSSES
from covey.runtime.processes import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from covey.lab.chaos.faults import ChaosTerms
    from covey.lab.chaos.injector import Injected
    from covey.lab.chaos.processes import Told

MATCH_SECONDS: Final = 0.05
"""Tolerance in seconds when a recovery is matched with an earlier fault."""
OUT_OF_TIME: Final = 124
"""The exit code of a job that did not end in time, the same as that of timeout(1)."""
PROBLEMS_SHOWN: Final = 12
"""How many problems of one run are shown."""
SHOWN_FIGURES: Final = (
    *("operations", "operations after a loss", "raised", "messages", "generations", "processes", "excluded"),
)
"""Figures of a checked run that are shown as text."""


@dataclass
class ProcessEnding:
    """How a process ended."""

    rank: int
    pid: int
    how: str
    """`finished`, `left`, `lost` to a fault, `failed`, or `stray`: it waited to join when the job was over."""
    at: float
    """In seconds since 1970."""
    code: int | None = 0
    """Its exit code, or the negative number of the signal that killed it; None if it is not known."""
    end: str = ""
    """How it failed, in words."""
    is_forgiven: bool = False
    """Whether it was started again."""


@dataclass
class ChaosStory:
    """All that happened in a run."""

    terms: ChaosTerms | None
    """None if only the records of an earlier run are checked."""
    began: float = 0.0
    """When the job was at work, in seconds since 1970; 0 if it never was."""
    ended: float = 0.0
    injected: list[Injected] = field(default_factory=list)
    endings: list[ProcessEnding] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    survives: bool = False
    """Whether the job continues without lost members, by its own events."""
    is_out_of_time: bool = False
    problems: list[str] = field(default_factory=list)
    """Violations that the checks of a run found."""
    notes: list[str] = field(default_factory=list)
    """Observations that are not problems."""
    figures: Counter[str] = field(default_factory=Counter)
    """What was checked."""
    log: list[str] = field(default_factory=list)
    folder: str = ""
    """Where the records of a checked run are kept."""

    @property
    def is_checked(self) -> bool:
        return self.terms is None or self.terms.where != "command"

    @property
    def seconds(self) -> float:
        return self.ended - self.began if self.began else 0.0

    @property
    def code(self) -> int:
        """The exit code: 0 if all checks passed; or if a process finished, and no untouched process failed."""
        if self.is_checked:
            return 1 if self.problems else 0
        if self.is_out_of_time:
            return OUT_OF_TIME
        failed = [ending.code or 0 for ending in self.endings if ending.how == "failed" and not ending.is_forgiven]
        if failed:
            # One death makes other processes fail; a process that was killed is the likely first cause.
            return exit_status(min(failed))
        if any(ending.how in ("finished", "left") for ending in self.endings):
            return 0
        lost = [ending.code or 0 for ending in self.endings if ending.how == "lost"]
        return exit_status(lost[-1]) if lost else 1


@dataclass(frozen=True)
class Recovery:
    """One view that the members agreed on during a generation, from the events of all of them."""

    kind: str
    generation: int
    view: int
    lost: int
    """How many members it excludes."""
    began: float
    """When the first member noticed the loss, in seconds since 1970."""
    ended: float
    """When the last member continued."""
    pids: tuple[int, ...]


@dataclass
class FaultOutcome:
    """The outcome of one fault."""

    injected: Injected
    text: str = ""
    view: str = ""
    """The kind of view that should follow from it, if any should."""
    missing: int = 0
    """How many changes of members are still expected."""
    recovered_ms: float | None = None
    """From the fault until the last of the other members, or the newcomer, worked again."""
    is_bad: bool = False
    """Whether the outcome is a failure of covey or of the job."""

    def expect(self, view: str, count: int = 1) -> None:
        self.view, self.missing = view, count


def recoveries(told: Sequence[Told]) -> list[Recovery]:
    """Combine the events of all members into one recovery per view, in order of time."""
    views: dict[tuple[int, int], list[Told]] = {}
    newest: dict[int, int] = {}
    for event in told:
        newest[event.pid] = max(event.generation, newest.get(event.pid, 0))
        # Members also report losses in the generation before, while a member may still be in it.
        if event.kind in ("lost", "left", "view") and event.generation == newest[event.pid]:
            views.setdefault((event.generation, event.view), []).append(event)
    found = [
        Recovery(
            next((event.kind for event in events if event.kind != "view"), "view"),
            generation,
            view,
            max(len(event.ranks) for event in events),
            min(event.began for event in events),
            max(event.ended for event in events),
            tuple(sorted(event.pid for event in events)),
        )
        for (generation, view), events in views.items()
    ]
    return sorted(found, key=lambda recovery: recovery.ended)


def outcomes(story: ChaosStory) -> tuple[list[FaultOutcome], list[Recovery]]:
    """Return the outcome of every fault, and the recoveries from losses that no fault explains."""
    found = [FaultOutcome(injected) for injected in story.injected]
    for outcome in found:
        if outcome.injected.was_done:
            _by_itself(outcome, story)
        else:
            outcome.text = f"not done: {outcome.injected.text}"
    unexplained = []
    for recovery in recoveries(story.told):
        due = max(1, recovery.lost)
        for outcome in found:
            is_due = outcome.missing and outcome.view == recovery.kind and (story.survives or not outcome.text)
            if due and is_due and outcome.injected.at <= recovery.ended + MATCH_SECONDS:
                explained = min(due, outcome.missing)
                due, outcome.missing = due - explained, outcome.missing - explained
                _recover(outcome, recovery, story)
        if recovery.kind == "lost" and due:
            unexplained.append(recovery)
    have_failed = any(ending.how == "failed" for ending in story.endings)
    untold = "the other processes failed" if have_failed and not story.survives else "no recovery was reported"
    for outcome in found:
        outcome.text = outcome.text or (untold if outcome.view else "")
    return found, unexplained


def _recover(outcome: FaultOutcome, recovery: Recovery, story: ChaosStory) -> None:
    passed_ms = max(0.0, 1e3 * (recovery.ended - outcome.injected.at))
    if not story.survives:  # the group ends with its first loss: its members agree on that, and raise
        outcome.text = outcome.text or f"the group ended with an error after {passed_ms:.0f} ms"
        return
    is_first = outcome.recovered_ms is None
    outcome.recovered_ms = passed_ms
    subject = "all" if recovery.kind == "view" else "the others"
    if not outcome.text or recovery.kind == "view" or not is_first:
        outcome.text = f"{subject} continued after {passed_ms:.0f} ms"


def _by_itself(outcome: FaultOutcome, story: ChaosStory) -> None:
    """Fill in what follows from the processes' own behaviour, and what should follow."""
    injected, kind = outcome.injected, outcome.injected.fault.kind
    endings = {ending.pid: ending for ending in story.endings}
    if kind in LOSSES:
        if kind != "all":  # which leaves no process that could tell
            outcome.expect("lost", len(injected.targets))
        return
    if not injected.targets:
        return
    pid = injected.targets[0].pid
    ending = endings.get(pid)
    has_failed = ending is not None and ending.how == "failed"
    if kind == "join":
        came = [event.time for event in story.told if event.pid == pid and event.kind in ("generation", "joined")]
        outcome.text = "the job was over before it could join"
        if came:
            outcome.recovered_ms = 1e3 * (came[0] - injected.at)
            outcome.text = f"a member after {outcome.recovered_ms:.0f} ms"
    elif kind == "leave":
        outcome.expect("left")
        if ending is None:
            outcome.text, outcome.is_bad = "it has not left", not story.is_checked
        elif ending.code == 0:
            outcome.text = f"left in good order after {1e3 * (ending.at - injected.at):.0f} ms"
        else:
            outcome.expect("lost")
            outcome.text = f"it {ending.end} instead of leaving in good order"
        return
    elif kind == "cut":
        outcome.expect("view")
        outcome.text = "no rank was lost"
    elif not story.is_checked:
        outcome.text = "no rank was lost"
    if ending is not None and has_failed and not (kind == "join" and outcome.recovered_ms is not None):
        outcome.text, outcome.is_bad = f"it {ending.end}", True
        outcome.expect("", 0)


def as_json(stories: Sequence[ChaosStory]) -> dict[str, Any]:
    """Return everything as plain values."""
    return {"code": max((story.code for story in stories), default=0), "runs": [_run_as_json(each) for each in stories]}


def _run_as_json(story: ChaosStory) -> dict[str, Any]:
    found, unexplained = outcomes(story)
    return {
        "terms": None if story.terms is None else asdict(story.terms),
        "code": story.code,
        "survives": story.survives,
        "seconds": round(story.seconds, 3),
        "faults": [
            {
                "number": outcome.injected.fault.number,
                "at": outcome.injected.fault.at,
                "kind": outcome.injected.fault.kind,
                "seconds": outcome.injected.fault.seconds,
                "done": outcome.injected.was_done,
                "done_at": round(outcome.injected.at - story.began, 3),
                "what": outcome.injected.text,
                "ranks": [target.rank for target in outcome.injected.targets],
                "pids": [target.pid for target in outcome.injected.targets],
                "outcome": outcome.text,
                "recovered_ms": None if outcome.recovered_ms is None else round(outcome.recovered_ms, 1),
                "bad": outcome.is_bad,
            }
            for outcome in found
        ],
        "processes": [
            {"rank": each.rank, "pid": each.pid, "how": each.how, "code": each.code} for each in story.endings
        ],
        "recoveries": [asdict(recovery) for recovery in recoveries(story.told)],
        "unexplained_losses": len(unexplained),
        "problems": story.problems,
        "notes": story.notes,
        "figures": dict(story.figures),
        "log": story.log,
        "folder": story.folder,
    }


def view(story: ChaosStory) -> RenderableType:
    """Return the report as text for a terminal: the faults with their outcomes, a summary, the verdict."""
    found, unexplained = outcomes(story)
    lines = _about_faults(story, found)
    if not story.is_checked:
        lines += _about_command(story, found, unexplained)
    parts: list[RenderableType] = [_table(story, found), ""] if found else []
    parts += [Paragraph(Text(line)) for line in lines]
    return Group(*parts, verdict(story))


def verdict(story: ChaosStory) -> RenderableType:
    """Return whether the run is as it should be; if not, why, and what was done."""
    style = "green" if story.code == 0 else "red"
    if not story.is_checked:
        end = "did not end in time" if story.is_out_of_time else f"ended with exit code {story.code}"
        return Text(f"the job {end}", style)
    word = "passed" if story.code == 0 else "FAILED"
    what = word if story.terms is None else f"seed {story.terms.seed}: {word} in {story.seconds:.0f} s"
    lines = [f"note: {note}" for note in story.notes[:PROBLEMS_SHOWN]]
    if story.problems:
        lines += story.problems[:PROBLEMS_SHOWN]
        lines += [f"and {len(story.problems) - PROBLEMS_SHOWN} more"] if len(story.problems) > PROBLEMS_SHOWN else []
        lines += ["what was done:", *(f"  {line}" for line in story.log)] if story.log else []
        lines += [f"records of the processes: {story.folder}", "`covey chaos --records FOLDER` checks them again"]
    return Group(
        Paragraph(Text(f"{what}: {spell_figures(story.figures)}", style)),
        *(Paragraph(Text(line), by=2) for line in lines),
    )


def spell_figures(figures: Counter[str]) -> str:
    return ", ".join(f"{figures[name]} {name}" for name in SHOWN_FIGURES)


def _table(story: ChaosStory, found: Sequence[FaultOutcome]) -> FittedTable:
    injected = [outcome.injected for outcome in found]
    styles = ["red" if each.is_bad else "yellow" if not each.injected.was_done else "" for each in found]
    done = [each.text if each.was_done else "" for each in injected]
    return FittedTable(
        [
            Column("at", [f"{each.at - story.began:.2f} s" for each in injected], is_right=True),
            Column("fault", [each.fault.kind for each in injected]),
            Column("what was done", done, leave_out=1, wraps=True),
            Column("outcome", [(each.text, style) for each, style in zip(found, styles, strict=True)], wraps=True),
        ]
    )


def _about_faults(story: ChaosStory, found: Sequence[FaultOutcome]) -> list[str]:
    if story.terms is None:
        return []
    kinds = Counter(outcome.injected.fault.kind for outcome in found if outcome.injected.was_done)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    return [f"faults: {by_kind}; seed {story.terms.seed}"]


def _about_command(story: ChaosStory, found: Sequence[FaultOutcome], unexplained: Sequence[Recovery]) -> list[str]:
    lines, terms = [], story.terms
    assert terms is not None
    if not story.began:
        lines.append("the job never joined a group, so nothing was done to it")
    elif len(found) < terms.count and terms.duration is None:
        lines.append(f"the job was over before {terms.count - len(found)} more faults")
    if unexplained:
        count = sum(recovery.lost for recovery in unexplained)
        lines.append(f"{count} members were lost for other reasons than these faults")
    if not story.survives and any(outcome.injected.was_done for outcome in found):
        lines.append('the job does not survive losses: join with on_loss="continue", or use covey.generations')
    ends = Counter(ending.how for ending in story.endings)
    lines.append("processes: " + (", ".join(f"{count} {how}" for how, count in ends.items()) or "all were stopped"))
    failed = (ending for ending in story.endings if ending.how == "failed")
    return lines + [f"rank {ending.rank} (pid {ending.pid}) {ending.end}" for ending in failed]
