"""The closing page of the demo: its events in sentences, and a comparison with one undisturbed node, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from covey.cli.layout import Column
from covey.cli.terminal import FittedTable, Paragraph
from covey.lab.demo.reports import (
    PROMPT,
    JoinedReport,
    KilledReport,
    RecoveredReport,
    Report,
    StartedReport,
    WaitingReport,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from covey.lab.demo.progress import LossPoint, Progress

ROUNDING = 0.001
"""How much, in nats, the losses of several nodes and of one may differ on the same samples: only the order of
rounding differs."""
NOISE, PRICE = 0.02, 0.4
"""How much they may differ if samples were lost with a node: NOISE, which another seed causes as well, plus PRICE times
the lost share of all samples. At most 0.3 times the share was measured, in runs that lost 5 to 30 % of the samples."""
LOSSY_DIFFERENCE = 0.02
"""The part of the loss by which they may differ besides if gradients were compressed."""


def sentences(run: Progress, node: int, report: Report) -> list[str]:
    """Return sentences about a report that `run` has just recorded; none for most."""
    row = run.rows[node]
    match report:
        case KilledReport():
            return [_at(run.reached, f"node {node} (pid {row.pid}) is killed: {report.signal}")]
        case RecoveredReport():
            return _survived(run, report)
        case StartedReport() if row.losses:
            return [_at(run.reached, f"node {node} is started again (pid {report.pid})")]
        case WaitingReport() if run.is_away(node):
            return [_at(run.reached, f"node {node} waits to join")]
        case JoinedReport() if run.returns and (run.returns[-1].node, run.returns[-1].rank) == (node, report.rank):
            return [_at(report.step, f"node {node} is back as rank {report.rank}, with {run.returns[-1].gift}")]
    return []


def _survived(run: Progress, report: RecoveredReport) -> list[str]:
    recovery = run.recoveries[report.generation, report.lost]
    if len(recovery.reports) < report.left:
        return []
    usual = f", normally {1e3 * sum(run.step_seconds):.0f}" if report.during == "step" else ""
    others = f"{report.left} continue" if report.left > 1 else "1 continues"
    words = f"{others} without {named('node', recovery.nodes)}: the {report.during} took {recovery.milliseconds:.0f} ms"
    told = [_at(report.step, words + usual)]
    if recovery.phases:
        told.append(f"{'':11}{timeline(recovery.phases)}")
    return told


def timeline(phases: dict[str, float]) -> str:
    """Return the phases of a recovery, each with the milliseconds from the first sign to its end."""
    return " → ".join(f"{name} {end:.0f}" for name, end in phases.items()) + " ms"


def named(noun: str, numbers: Sequence[int]) -> str:
    """Return "node 2" or "nodes 0, 1 and 3"; "some node" where it is not known which."""
    if not numbers:
        return f"some {noun}"
    *others, last = map(str, numbers)
    return f"{noun}s {', '.join(others)} and {last}" if others else f"{noun} {last}"


def _at(step: int, words: str) -> str:
    return f"step {step:>5} {words}"


class FinalCheck(NamedTuple):
    """A condition that must hold at the end, and whether it does."""

    words: str
    holds: bool


def checks(team: Progress, alone: Progress | None, *, victim: int | None) -> list[FinalCheck]:
    """Return the conditions on the outcome."""
    found = [FinalCheck("parameters bit-identical on all nodes", bool(team.digest))]
    if victim is not None:
        found.append(FinalCheck(f"node {victim} was lost and came back", _is_back(team, victim)))
    if team.losses:
        lost = sum(len(recovery.first.lost) for recovery in team.recoveries.values())
        found.append(FinalCheck("the others finished the operation in which the node was lost", lost == team.losses))
    if alone:
        gap, limit = difference(team, alone), tolerance(team, alone)
        baseline = "of an undisturbed run" if team.losses else "of one node"
        at = f" at step {alone.last.step}" if alone.last.step < team.last.step else ""
        found.append(FinalCheck(f"held-out loss{at} within {limit:.3f} {baseline} ({gap:.4f} apart)", gap <= limit))
    return found


def difference(team: Progress, alone: Progress) -> float:
    """Return the difference of the two losses after the last step that both runs did."""
    mine, other = _last_points(team, alone)
    return abs(mine.loss - other.loss)


def tolerance(team: Progress, alone: Progress) -> float:
    """Return how large that difference may be."""
    mine, other = _last_points(team, alone)
    share = 1 - mine.samples / other.samples
    limit = NOISE + PRICE * share if share else ROUNDING
    return limit + LOSSY_DIFFERENCE * other.loss if team.codec else limit


def _last_points(team: Progress, alone: Progress) -> tuple[LossPoint, LossPoint]:
    step = min(team.last.step, alone.last.step)
    mine, other = team.at_step(step), alone.at_step(step)
    assert mine is not None
    assert other is not None, "all runs are evaluated at the same steps"
    return mine, other


def summary(
    team: Progress, alone: Progress | None, *, victim: int | None, mark: float, cores: int, seconds: float
) -> RenderableType:
    """Return the closing page: a comparison and what it means, the losses, the checks, and a sample of text.

    `seconds` is the limit of the training.
    """
    scale = f"loss in nats a character: {team.curve[0].loss:.2f} is blind guessing, {mark:.2f} knows letter pairs"
    parts: list[RenderableType] = [_comparison(team, alone), Text(scale, style="dim"), Text()]
    if team.last.step < team.steps:
        over = f"the {seconds:g} s of training were over (--seconds changes that)"
        parts += [Text(f"stopped after {team.last.step:,} of {team.steps:,} steps: {over}"), Text()]
    if alone:
        parts += [Text(meaning(team, alone, cores=cores)), Text()]
    for recovery in team.recoveries.values():
        lost, when = named("node", recovery.nodes), f"the {recovery.first.during} took {recovery.milliseconds:.0f} ms"
        parts.append(Text(f"lost {lost} at step {recovery.first.step}: {when}"))
        if recovery.phases:
            parts.append(Paragraph(Text(timeline(recovery.phases), style="dim"), 4))
    for back in team.returns:
        parts.append(Text(f"node {back.node} came back at step {back.step}, with {back.gift}"))
    if team.lane:
        parts.append(Text(f"every step averaged {team.gradient_bytes / 1000:.0f} kB of gradients over {team.lane}"))
    if team.saving:
        parts.append(Text(team.saving))
    parts.append(Text())
    for check in checks(team, alone, victim=victim):
        parts.append(Text.assemble(f"{check.words}: ", ("yes", "bold green") if check.holds else ("NO", "bold red")))
    parts += [Text(), Text("The model writes:", style="bold"), Paragraph(written(team.writing), 4)]
    return Group(*(Paragraph(part) if isinstance(part, Text) else part for part in parts))


def meaning(team: Progress, alone: Progress, *, cores: int) -> str:
    """Return one or two sentences on what several nodes gained on this machine."""
    ratio = team.samples_per_second / alone.samples_per_second
    where = f"{team.size} nodes on {cores} core{'s' if cores > 1 else ''}"
    bound = f"; with fewer cores than nodes, {team.size}x is out of reach" if cores < team.size else ""
    missed = alone.last.samples - team.last.samples if alone.last.step == team.last.step else 0
    lost = f" Except for the {missed:,} samples that were lost with a node, they" if missed > 0 else " They"
    return (
        f"{where} took {ratio:.1f}x as many samples a second as one{bound}."
        f"{lost} learned from the same batches as one node that takes them all."
    )


def written(writing: str) -> Text:
    """Return the prompt and the model's continuation, cut after the last whole word."""
    words = writing.rpartition(" ")[0] or writing
    return Text.assemble((PROMPT, "dim"), (" ".join(words.split()), "italic"), (" ...", "dim"))


def as_data(team: Progress, alone: Progress | None, *, victim: int | None, mark: float, cores: int) -> dict[str, Any]:
    """Return the whole outcome as plain data, for `--json`."""
    return {
        "ranks": team.size,
        "cores": cores,
        "lane": team.lane,
        "gradient_bytes": team.gradient_bytes,
        "codec": team.codec or None,
        "sent_bytes": team.sent_bytes,
        "plain_bytes": team.plain_bytes,
        "first_loss": team.curve[0].loss,
        "letter_pairs_loss": mark,
        "team": _point(team, team.last),
        "undisturbed": _point(alone, alone.last) if alone else None,
        "difference": difference(team, alone) if alone else None,
        "tolerance": tolerance(team, alone) if alone else None,
        "losses": [
            {
                "nodes": recovery.nodes,
                "step": recovery.first.step,
                "during": recovery.first.during,
                "went_on": sorted(recovery.reports),
                "milliseconds": recovery.milliseconds,
                "phases": recovery.phases,
            }
            for recovery in team.recoveries.values()
        ],
        "returns": [
            {
                "node": back.node,
                "rank": back.rank,
                "step": back.step,
                "donors": back.donors,
                "bytes": back.bytes,
                "seconds": back.seconds,
            }
            for back in team.returns
        ],
        "per_rank": [
            {
                "pid": row.pid,
                "batch_loss": row.loss,
                "samples_per_second": row.samples_per_second,
                "compute_seconds": row.compute,
                "sync_seconds": row.sync,
            }
            for row in team.rows
        ],
        "identical": bool(team.digest),
        "digest": team.digest,
        "checks": {check.words: check.holds for check in checks(team, alone, victim=victim)},
        "writing": PROMPT + team.writing,
    }


def _is_back(team: Progress, node: int) -> bool:
    return team.rows[node].losses > 0 and not team.is_away(node) and team.rows[node].state == "done"


def _comparison(team: Progress, alone: Progress | None) -> FittedTable:
    disturbed = {0: "", 1: ", one lost"}.get(team.losses, f", {team.losses} losses")
    lines = [(team.name + disturbed, team, team.last)]
    if alone:
        over = ", cut short" if alone.last.step < team.last.step else ""
        lines.append((f"one node alone{over}", alone, alone.last))
    points = [point for _, _, point in lines]
    columns = [
        Column("", [name for name, _, _ in lines]),
        Column("steps", [f"{point.step:,}" for point in points], leave_out=2, is_right=True),
        Column("samples", [f"{point.samples:,}" for point in points], leave_out=3, is_right=True),
        Column("seconds", [f"{point.seconds:.1f}" for point in points], leave_out=1, is_right=True),
        Column("samples/s", [f"{run.samples_per_second:,.0f}" for _, run, _ in lines], is_right=True),
        Column("held-out loss", [(f"{point.loss:.3f}", "bold") for point in points], is_right=True),
    ]
    return FittedTable(columns, "dim")


def _point(run: Progress, point: LossPoint) -> dict[str, Any]:
    return {
        "steps": point.step,
        "samples": point.samples,
        "seconds": point.seconds,
        "samples_per_second": run.samples_per_second,
        "held_out_loss": point.loss,
    }
