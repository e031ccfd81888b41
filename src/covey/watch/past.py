"""The history of this machine as plain values: the runs that were started here, for `covey history` and the page."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec import to_builtins

from covey.base.errors import ConfigError
from covey.net.host.saved_runs import whole_runs
from covey.runtime.metrics.flight import traces_of

if TYPE_CHECKING:
    from covey.net.host.run_notes import LastReported
    from covey.net.host.saved_runs import PastRun

AFTER_SECONDS: Final = 10.0
"""How long after its end a run may still write files with its last operations."""


PAGE_RUNS: Final = 50
"""Runs that the page lists."""


def newest_rows() -> list[dict[str, object]]:
    """Return the newest runs as plain values, the newest first; none if covey's folder cannot be read."""
    try:
        return [row_of(run) for run in reversed(whole_runs()[-PAGE_RUNS:])]
    except ConfigError:
        return []


def row_of(run: PastRun) -> dict[str, object]:
    """Return a run as plain values, which JSON has."""
    record, lasted, report = run.record, run.lasted, run.last_report()
    ranks, machines = run.members()
    return {
        "id": run.id,
        "run": record.name,
        "cluster": record.cluster,
        "machines": list(machines),
        "program": record.program,
        "ranks": ranks,
        "pid": record.pid,
        "began": record.began,
        "ended": record.ended,
        "seconds": round(lasted, 1) if lasted is not None else None,
        "state": "running" if run.is_running else "ended" if record.ended is not None else "ended unexpectedly",
        "outcome": run.outcome(),
        "has_failed": run.has_failed,
        "code": record.code,
        "reason": record.reason,
        "absences": [to_builtins(each) for each in record.absences],
        "report": None if report is None else _plain(report),
        "checkpoints": run.checkpoints(),
        "traces": traces_of_run(run),
        "logs": logs_command(run),
    }


def traces_of_run(run: PastRun) -> list[str]:
    """Return the files with the last operations of a run's processes, the latest last."""
    ended = run.record.ended if run.record.ended is not None else time.time()
    return list(map(str, traces_of(run.record.name, run.record.began, ended + AFTER_SECONDS)))


def logs_command(run: PastRun) -> str:
    """Return the command that shows the output of a run; empty if none is kept."""
    if run.logs():
        return f"covey logs {run.id}"
    return f"covey logs {run.record.name}" if run.record.machine not in run.record.machines else ""


def _plain(report: LastReported) -> dict[str, Any]:
    values = {name: value if math.isfinite(value) else str(value) for name, value in report.values.items()}
    return {"rank": report.rank, "step": report.step, "at": report.at, "values": values}
