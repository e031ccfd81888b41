"""`covey history`: lists the runs that were started on this machine, how each ended, and what is left of it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.errors import ConfigError
from covey.base.text import duration
from covey.cli.layout import Column, room, table, wrap
from covey.cli.terminal import say
from covey.net.host.saved_runs import find_past_run, whole_runs
from covey.watch.past import logs_command, row_of, traces_of_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.net.host.run_notes import LastReported
    from covey.net.host.saved_runs import Absence, PastRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SHOWN_RUNS: Final = 20
"""Runs that are listed without --all."""


@app.command()
def history(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="All that is known of this run: its name, or its id.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help=f"List all runs, not only the last {SHOWN_RUNS}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all runs.")] = False,
) -> None:
    """List the runs that were started on this machine, also by agents: the latest first, and how each ended.

    With RUN, show the latest run of this name: its command, its last report, and where its checkpoints and its last
    operations (`covey trace`) are. `covey logs RUN` shows its output.
    """
    if run:
        return _show(run, as_json=as_json)
    found = list(reversed(whole_runs()))
    if as_json:
        return typer.echo(json.dumps([row_of(each) for each in found]))
    if not found:
        return say("No run was started on this machine. `covey run` starts one, `covey demo` shows one.")
    shown = found if everything else found[:SHOWN_RUNS]
    members = [run.members() for run in shown]
    columns = [
        Column("RUN", [run.record.name for run in shown]),
        Column("BEGAN", [_when(run.record.began) for run in shown]),
        Column("LASTED", [duration(run.lasted) if run.lasted is not None else "" for run in shown], leave_out=2),
        Column("END", [run.outcome() for run in shown], wraps=True),
        Column("LAST REPORT", [_report(run.last_report(), 2) for run in shown], leave_out=1, wraps=True),
        Column("RANKS", [str(ranks) for ranks, _ in members], leave_out=3, is_right=True),
        Column("MACHINES", [", ".join(machines) for _, machines in members], leave_out=4, wraps=True),
    ]
    typer.echo(table(columns, room()))
    if len(shown) < len(found):
        say(f"{len(found) - len(shown)} earlier runs are not listed; --all lists them.", err=True)


def _show(name: str, *, as_json: bool) -> None:
    run = find_past_run(name, whole_runs())
    if run is None:
        raise ConfigError(f"no run {name!r} was started on this machine; `covey history` lists those that were")
    if as_json:
        return typer.echo(json.dumps(row_of(run)))
    width = max((room() or 1000) - 14, 20)
    for title, text in _facts(run):
        for at, line in enumerate(wrap(text, width) if text else ()):
            typer.echo(f"{title if at == 0 else '':<14}{line}".rstrip())


def _facts(run: PastRun) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run, each with a title."""
    record, lasted = run.record, run.lasted
    ranks, machines = run.members()
    yield "run", f"{record.name}{f' of cluster {record.cluster}' if record.cluster else ''}"
    yield "id", run.id
    yield "began", _when(record.began) + (f", lasted {duration(lasted)}" if lasted is not None else "")
    yield "end", run.outcome()
    for at, absence in enumerate(record.absences):
        yield "away" if at == 0 else "", _absence(record.machine, absence)
    yield "command", record.program
    yield "ranks", f"{ranks} on {', '.join(machines) or record.machine}"
    yield "last report", _report(run.last_report(), None) or "none: group.report(step=step, loss=loss) makes one"
    checkpoints, traces = run.checkpoints(), traces_of_run(run)
    yield "checkpoints", checkpoints[-1] if checkpoints else "none is known of"
    for path in reversed(checkpoints[:-1]):
        yield "", path
    for at, path in enumerate(reversed(traces)):
        yield "traces" if at == 0 else "", path
    yield "output", logs_command(run) or "none is kept"


def _absence(machine: str, absence: Absence) -> str:
    """Return an absence of this machine in words."""
    lasted = "" if absence.returned is None else f", for {duration(max(absence.returned - absence.left, 0.0))}"
    at = "" if absence.step is None else f"; left at step {absence.step}"
    return f"{_when(absence.left)}{lasted}: {machine} {absence.why}{at}"


def _report(report: LastReported | None, most: int | None) -> str:
    """Return the last report in words, with so many values; None: all."""
    if report is None:
        return ""
    values = sorted(report.values.items(), key=lambda each: (each[0] != "loss", each[0]))
    words = [f"step {report.step}"] * (report.step is not None)
    words += [f"{name} {value:.4g}" for name, value in values if name != "samples"][:most]
    return ", ".join(words)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
