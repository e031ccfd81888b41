"""What happens to the members of a run, in sentences: who was lost, how the others went on, who came back with what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.cli.demo.reports import Joined, Killed, Recovered, Report, Started, Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.demo.progress import Progress


def sentences(run: Progress, node: int, report: Report) -> list[str]:
    """Return what there is to say about a report that `run` has just recorded."""
    row = run.rows[node]
    match report:
        case Killed():
            return [_at(run.reached, f"node {node} (pid {row.pid}) is killed: {report.signal}")]
        case Recovered():
            return _survived(run, report)
        case Started() if row.losses:
            return [_at(run.reached, f"node {node} is started again (pid {report.pid})")]
        case Waiting() if row.losses > len([back for back in run.returns if back.node == node]):
            return [_at(run.reached, f"node {node} waits to be let in")]
        case Joined() if run.returns and (run.returns[-1].node, run.returns[-1].rank) == (node, report.rank):
            back = run.returns[-1]
            rank = f"rank {back.rank} of generation {report.generation}"
            size, when = f"{back.bytes / 1e6:.1f} MB", f"{1e3 * back.seconds:.0f} ms"
            return [_at(report.step, f"node {node} is back as {rank}; {when} for {size} of state from {back.givers}")]
    return []


def _survived(run: Progress, report: Recovered) -> list[str]:
    recovery = run.recoveries[report.generation, report.view]
    if len(recovery.reports) < report.left:
        return []
    usual = 1e3 * sum(run.step_seconds)
    took = f"{recovery.milliseconds:.0f} ms" + (f", as a rule {usual:.0f}" if usual else "")
    going = f"{report.left} go{'es' if report.left == 1 else ''} on without {named('node', recovery.nodes)}"
    return [_at(report.step, f"{going}, in the same step: it took {took}"), f"{'':11}{timeline(recovery.phases)}"]


def timeline(phases: dict[str, float]) -> str:
    """Return the phases of a recovery, each with the milliseconds from the first sign to its end."""
    return " → ".join(f"{name} {end:.0f}" for name, end in phases.items()) + " ms"


def named(noun: str, numbers: Sequence[int]) -> str:
    """Return "node 2" or "nodes 0, 1 and 3"."""
    *others, last = map(str, numbers)
    return f"{noun}s {', '.join(others)} and {last}" if others else f"{noun} {last}"


def _at(step: int, words: str) -> str:
    return f"step {step:>5} {words}"
