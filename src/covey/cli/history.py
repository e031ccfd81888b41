"""`covey history`: lists the runs that were started on this machine, and how each ended."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.cli.layout import Column, room, table
from covey.cli.status.view import duration
from covey.cli.terminal import say
from covey.net.host.saved_runs import past_runs

if TYPE_CHECKING:
    from covey.net.host.saved_runs import PastRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SHOWN: Final = 20
"""Runs that are listed without --all."""


@app.command()
def history(
    everything: Annotated[bool, typer.Option("--all", help=f"List all runs, not only the last {SHOWN}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all runs.")] = False,
) -> None:
    """List the runs that were started on this machine, also by agents: the latest first, and how each ended.

    `covey logs RUN` shows the output of a run.
    """
    found = list(reversed(past_runs()))
    if as_json:
        return typer.echo(json.dumps([as_row(run) for run in found]))
    if not found:
        return say("No run was started on this machine. `covey run` starts one, `covey demo` shows one.")
    shown = found if everything else found[:SHOWN]
    columns = [
        Column("RUN", [run.record.name for run in shown]),
        Column("BEGAN", [_when(run.record.began) for run in shown]),
        Column("LASTED", [duration(run.lasted) if run.lasted is not None else "" for run in shown], leave_out=2),
        Column("END", [run.outcome() for run in shown], wraps=True),
        Column("RANKS", [str(run.record.processes) for run in shown], leave_out=3, is_right=True),
        Column("MACHINES", [", ".join(run.record.machines) for run in shown], leave_out=4, wraps=True),
    ]
    typer.echo(table(columns, room()))
    if len(shown) < len(found):
        say(f"{len(found) - len(shown)} earlier runs are not listed; --all lists them.", err=True)


def as_row(run: PastRun) -> dict[str, object]:
    """Return a run as plain values, for JSON."""
    record, lasted = run.record, run.lasted
    return {
        "id": run.id,
        "run": record.name,
        "cluster": record.cluster,
        "machines": list(record.machines),
        "program": record.program,
        "ranks": record.processes,
        "pid": record.pid,
        "began": record.began,
        "ended": record.ended,
        "seconds": round(lasted, 1) if lasted is not None else None,
        "state": "running" if run.is_running else "ended" if record.ended is not None else "ended unexpectedly",
        "code": record.code,
        "reason": record.reason,
    }


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
