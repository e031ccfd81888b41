"""Events of a run in sentences: which nodes were lost, how the others continued, which came back with which state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.lab.demo.reports import JoinedReport, KilledReport, RecoveredReport, Report, StartedReport, WaitingReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.lab.demo.progress import Progress


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
