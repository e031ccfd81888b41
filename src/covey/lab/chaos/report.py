"""Reports the outcome of each fault, as text and as JSON.

Outcomes come from the job's own events: a view without a lost member, a view of the same members, a newcomer's first
generation. An event says when operations continued, not which fault caused it, so events and faults are matched in
order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.text import Text

from covey.cli.layout import Column
from covey.cli.terminal import Fitted, Paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from covey.lab.chaos.faults import Chaos
    from covey.lab.chaos.processes import Told
    from covey.lab.chaos.trial import Ending, Injected, Story

SLACK: Final = 0.05
"""Tolerance in seconds when a recovery is matched with an earlier fault."""


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
class Outcome:
    """The outcome of one fault."""

    injected: Injected
    text: str = ""
    view: str = ""
    """The kind of view that should follow from it, if any should."""
    recovered_ms: float | None = None
    """From the fault until the last of the other members, or the newcomer, worked again."""
    is_bad: bool = False
    """Whether the outcome is a failure of covey or of the job."""


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


def outcomes(story: Story) -> tuple[list[Outcome], list[Recovery]]:
    """Return the outcome of every fault, and the recoveries that no fault explains."""
    found = [Outcome(injected) for injected in story.injected]
    endings = {ending.worker.pid: ending for ending in story.endings}
    for outcome in found:
        _by_itself(outcome, endings, story.told)
    unexplained = []
    for recovery in recoveries(story.told):
        wanted = [
            outcome
            for outcome in found
            if outcome.recovered_ms is None
            and (story.survives or not outcome.text)
            and outcome.injected.was_done
            and outcome.injected.at <= recovery.ended + SLACK
            and outcome.view == recovery.kind
        ]
        for outcome in wanted[: max(1, recovery.lost)]:
            passed_ms = max(0.0, 1e3 * (recovery.ended - outcome.injected.at))
            if not story.survives:  # the group ends with its first loss: its members agree on that, and raise
                outcome.text = outcome.text or f"the group ended with an error after {passed_ms:.0f} ms"
                continue
            outcome.recovered_ms = passed_ms
            subject = "all" if recovery.kind == "view" else "the others"
            if not outcome.text or recovery.kind == "view":
                outcome.text = f"{subject} continued after {passed_ms:.0f} ms"
        if recovery.kind == "lost" and recovery.lost > len(wanted):
            unexplained.append(recovery)
    have_failed = any(ending.how == "failed" for ending in story.endings)
    untold = "the other processes failed" if have_failed and not story.survives else "no recovery was reported"
    for outcome in found:
        outcome.text = outcome.text or untold
    return found, unexplained


def _by_itself(outcome: Outcome, endings: dict[int, Ending], told: Sequence[Told]) -> None:
    """Fill in what follows from the process's own behaviour."""
    injected, fault = outcome.injected, outcome.injected.fault
    if injected.worker is None:
        outcome.text = f"not done: {injected.note}"
        return
    pid = injected.worker.pid
    ending = endings.get(pid)
    if fault.kind == "join":
        came = [event.time for event in told if event.pid == pid and event.kind in ("generation", "joined")]
        outcome.text = "the job was over before it could join"
        if came:
            outcome.recovered_ms = 1e3 * (came[0] - injected.at)
            outcome.text = f"a member after {outcome.recovered_ms:.0f} ms"
        elif ending is not None and ending.how == "failed":
            outcome.text, outcome.is_bad = f"it {injected.worker.end}", True
    elif fault.kind == "leave":
        if ending is None:
            outcome.text, outcome.is_bad = "it has not left", True
        elif ending.worker.code == 0:
            outcome.text = f"left in good order after {1e3 * (ending.at - injected.at):.0f} ms"
        else:
            outcome.text, outcome.view = f"it {ending.worker.end} instead of leaving in good order", "lost"
        outcome.view = outcome.view or "left"
    elif fault.is_loss:
        outcome.view = "lost"
    elif ending is not None and ending.how == "failed":
        outcome.text, outcome.is_bad = f"it {ending.worker.end}", True
    else:
        outcome.text, outcome.view = "no rank was lost", "view" if fault.kind == "cut" else ""


def as_json(chaos: Chaos, story: Story) -> dict[str, Any]:
    """Return everything as plain values."""
    found, unexplained = outcomes(story)
    return {
        "chaos": asdict(chaos),
        "code": story.code,
        "survives": story.survives,
        "seconds": round(story.ended - (story.began or story.ended), 3),
        "faults": [
            {
                **asdict(outcome.injected.fault),
                "done": outcome.injected.was_done,
                "done_at": round(outcome.injected.at - story.began, 3),
                "pid": outcome.injected.worker.pid if outcome.injected.worker is not None else None,
                "outcome": outcome.text,
                "recovered_ms": None if outcome.recovered_ms is None else round(outcome.recovered_ms, 1),
                "bad": outcome.is_bad,
            }
            for outcome in found
        ],
        "processes": [
            {"rank": e.worker.rank, "pid": e.worker.pid, "how": e.how, "code": e.worker.code} for e in story.endings
        ],
        "recoveries": [asdict(recovery) for recovery in recoveries(story.told)],
        "unexplained_losses": len(unexplained),
    }


def view(chaos: Chaos, story: Story) -> RenderableType:
    """Return the report as text for a terminal."""
    found, unexplained = outcomes(story)
    injected = [outcome.injected for outcome in found]
    styles = ["red" if each.is_bad else "yellow" if not each.injected.was_done else "" for each in found]
    table = Fitted(
        [
            Column("at", [f"{each.at - story.began:.2f} s" for each in injected], is_right=True),
            Column("fault", [str(each.fault) for each in injected]),
            Column(
                "pid",
                ["" if each.worker is None else str(each.worker.pid) for each in injected],
                leave_out=1,
                is_right=True,
            ),
            Column("outcome", [(each.text, style) for each, style in zip(found, styles, strict=True)], wraps=True),
        ]
    )
    done = [outcome for outcome in found if outcome.injected.was_done]
    kinds = Counter(outcome.injected.fault.kind for outcome in done)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    lines = [f"faults: {by_kind}; seed {chaos.seed}"]
    if not story.began:
        lines.append("the job never joined a group, so nothing was done to it")
    elif len(found) < chaos.count and chaos.duration is None:
        lines.append(f"the job was over before {chaos.count - len(found)} more faults")
    if unexplained:
        count = sum(recovery.lost for recovery in unexplained)
        lines.append(f"{count} members were lost for other reasons than these faults")
    if not story.survives and done:
        lines.append('the job does not survive losses: join with on_loss="continue", or use covey.generations')
    ends = Counter(ending.how for ending in story.endings)
    lines.append("processes: " + (", ".join(f"{count} {how}" for how, count in ends.items()) or "all were stopped"))
    for ending in story.endings:
        if ending.how == "failed":
            lines.append(f"rank {ending.worker.rank} (pid {ending.worker.pid}) {ending.worker.end}")
    verdict = "did not end in time" if story.is_out_of_time else f"ended with exit code {story.code}"
    return Group(
        table,
        "",
        *(Paragraph(Text(line)) for line in lines),
        Text(f"the job {verdict}", "green" if story.code == 0 else "red"),
    )
