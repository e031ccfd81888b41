"""The `covey trace` command: gets the last operations of the ranks, merges them, writes a trace, and prints a table."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import check_timeout
from covey.base.errors import ConfigError, DeadlineError, RemoteProtocolError
from covey.base.text import listed
from covey.cli.layout import Column, room, table
from covey.cli.runs import find_run, here, visiting_members
from covey.cli.terminal import plural, say
from covey.cli.trace.merge import chrome_trace, merge
from covey.net.host.runs import LocalRunFound
from covey.net.host.saved_runs import past_runs
from covey.runtime.keeper.pages import OPERATIONS_SECONDS, collect
from covey.runtime.metrics.flight import SUFFIX, folder
from covey.wire import messages
from covey.wire.reports import Flight, decode_flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.cli.trace.merge import Timeline
    from covey.net.host.saved_runs import RunSummary
    from covey.net.keys.clusters import Cluster

FILE_LIMIT_BYTES: Final = 1 << 26
SAME_MOMENT_SECONDS: Final = 60.0
"""Files of one run that were written within this time are about the same moment."""
LONGEST_WAITS: Final = 20
"""Rows of the table: the longest waits."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def trace(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | FILE...]",
            help="A run on this machine or of the cluster, or files that ranks have written.",
            show_default="the newest run that was started here",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write the trace.",
            show_default="traces/RUN.trace.json of covey's folder",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster, if this machine is in several.")
    ] = None,
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to look for nodes.")] = 1.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the last operations of all ranks of a run on one time line, and which rank waited for which.

    A run that is still running is asked for them: covey trace train shows what covey run -n 4 train.py does.
    Without a name, the newest run that was started here is shown.

    The trace is for ui.perfetto.dev, or for chrome://tracing.

    A rank writes its last operations to a file when its group fails, and when it gets SIGUSR1; so does covey run for
    all its ranks when it gets SIGUSR1. Of a run that has ended, the latest files here are shown.
    """
    words = what or []
    run, measured, process = "", None, ""
    if not words and (newest := newest_running()) is not None:
        words, cluster = [newest.name], cluster or newest.cluster or None
        process = "" if cluster else str(newest.pid)  # another run of this user may have the same name
    if not words:
        flights = read_latest(folder())
    elif len(words) == 1 and not os.path.isfile(words[0]) and not words[0].endswith(SUFFIX):
        try:
            run, flights, measured = ask_run(process or words[0], cluster, check_timeout(wait, "--wait"))
        except ConfigError:
            if cluster is not None or not (flights := latest_of(folder(), words[0])):
                raise
            say(
                f"no run {words[0]!r} is running; these are the last operations of the latest that failed here",
                err=True,
            )
    else:
        flights = [read(Path(word)) for word in words]
    timeline = merge(flights, measured)
    target = out or folder() / f"{_file_name(run or flights[0].run)}.trace.json"
    try:
        _write(target, json.dumps(chrome_trace(timeline)), is_private=out is None)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another file with --out") from error
    if as_json:
        return typer.echo(json.dumps(summary(timeline, run or flights[0].run, target)))
    typer.echo(report(timeline, room()))
    say(f"{target} is for ui.perfetto.dev, or for chrome://tracing")


def _write(target: Path, text: str, *, is_private: bool) -> None:
    """Write a file; in covey's folder, which is private, one that only its user may read."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600 if is_private else 0o666)
    with open(descriptor, "w") as file:
        if is_private:
            os.fchmod(descriptor, 0o600)
        file.write(text)


def _file_name(run: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in run) or "run"


# Files


def read(path: Path) -> Flight:
    """Return what a process has written; ConfigError if the file is something else."""
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
        if len(data) > FILE_LIMIT_BYTES:
            raise ConfigError(f"{path} is too large for the operations of a process")
        return decode_flight(data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except RemoteProtocolError as error:
        raise ConfigError(f"{path} was not written by covey: {error}") from error


def newest_running() -> RunSummary | None:
    """Return the newest run that was started here and goes on; None if there is none, or a rank has failed since."""
    newest = next((run.record for run in reversed(past_runs()) if run.is_running), None)
    failed = max((path.stat().st_mtime for path in folder().glob(f"*{SUFFIX}")), default=0.0)
    return None if newest is None or failed > newest.began else newest


def read_latest(place: Path) -> list[Flight]:
    """Return what the processes of the run whose file is the newest have written around that time."""
    flights = latest_of(place)
    if not flights:
        raise ConfigError(f"there are no files of ranks in {place}; name a run that is running{here()}, or the files")
    return flights


def latest_of(place: Path, run: str = "") -> list[Flight]:
    """Return what the processes of one run have written around the time of its newest file; nothing if there is none.

    Without a name, that is the run whose file is the newest. Two runs of one name are never mixed.
    """
    files = sorted(place.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    flights: list[Flight] = []
    newest_at = 0.0
    for path in files:
        at = path.stat().st_mtime
        if flights and newest_at - at > SAME_MOMENT_SECONDS:
            break
        flight = read(path)
        if flights and (flight.run, flight.run_id) != (flights[0].run, flights[0].run_id):
            continue
        if flights or not run or flight.run == run:
            newest_at = newest_at or at
            flights.append(flight)
    return sorted(flights, key=lambda flight: flight.seat)


# Runs that go on


def ask_run(name: str, cluster: str | None, wait: float) -> tuple[str, list[Flight], dict[str, float] | None]:
    """Ask the ranks of a run on this machine, or else the members of a run of the cluster.

    Return its name, their operations, and by host how far its clock is ahead of ours; None if all are on one host.

    Raises:
        ConfigError: there is no such run.
        DeadlineError: no member has answered.
    """
    found = find_run(name, cluster)
    if isinstance(found, LocalRunFound):
        return found.name, ask_local_run(found), None
    return name, *ask_cluster(name, found, wait)


def ask_local_run(run: LocalRunFound) -> list[Flight]:
    """Ask the ranks of a run on this machine for their operations; DeadlineError if none has told them."""
    from covey.runtime.peers.local_visit import visiting_ranks

    with visiting_ranks(run) as visit:
        flights = collect(visit.ask)
    return _checked(run.name, flights, run.size, "rank")


def _checked(run: str, flights: list[Flight], size: int, noun: str) -> list[Flight]:
    """Return what was told in the order of seats, and say how many did not answer; DeadlineError if all did not."""
    if not flights:
        raise DeadlineError(
            f"no {noun} of the run {run!r} has told its operations within the timeout of {OPERATIONS_SECONDS:g} s: "
            "they may not have joined yet"
        )
    if missing := size - len(flights):
        say(f"{plural(missing, noun)} did not answer", err=True)
    return sorted(flights, key=lambda flight: flight.seat)


def ask_cluster(run: str, found: Cluster, wait: float) -> tuple[list[Flight], dict[str, float]]:
    """Ask the members of a run of a cluster; see `ask_run`."""
    with visiting_members(run, found, wait) as (visit, members, size):
        cards = [state.card for state in members]

        def ask(question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
            answers = enumerate(visit.ask_all(cards, question, within))
            return {index: answer if isinstance(answer, messages.Inspected) else None for index, answer in answers}

        flights = collect(ask)
    ahead = {state.card.contact.host: state.clock_offset for state in members}
    return _checked(run, flights, size, "member"), ahead


# The table


def extent(timeline: Timeline) -> tuple[int, int, float]:
    """Return how many operations of how many ranks are known, and the seconds that they took."""
    calls = [call for known in timeline.calls.values() for call in known]
    ranks = {(flight.seat, flight.pid) for flight in timeline.flights}
    span = (max(call.ended for call in calls) - min(call.begun for call in calls)) / 1e9 if calls else 0.0
    return len(calls), len(ranks), span


def longest_waits(timeline: Timeline) -> list[tuple[tuple[int, int], list[int]]]:
    """Return each rank and one that it waited for with the nanoseconds of each wait, the longest sum first."""
    sums: dict[tuple[int, int], list[int]] = defaultdict(list)
    for wait in timeline.waits():
        sums[wait.waiting.rank, wait.late].append(wait.ns)
    return sorted(sums.items(), key=lambda item: -sum(item[1]))


def summary(timeline: Timeline, run: str, target: Path) -> dict[str, object]:
    """Return what `report` tells, for programs."""
    calls, ranks, span = extent(timeline)
    return {
        "run": run,
        "operations": calls,
        "ranks": ranks,
        "seconds": round(span, 6),
        "waits": [
            {"rank": rank, "waited_for": late, "seconds": sum(waits) / 1e9, "longest": max(waits) / 1e9,
             "operations": len(waits)}
            for (rank, late), waits in longest_waits(timeline)
        ],
        "stuck": [asdict(stuck) for stuck in timeline.stuck()],
        "faults": [
            {"rank": group.rank, "fault": group.fault} for flight in timeline.flights for group in flight.groups
            if group.fault
        ],
        "clocks_not_compared": list(timeline.unmeasured),
        "file": str(target),
    }  # fmt: skip


def report(timeline: Timeline, width: int | None) -> str:
    """Return what to print: how much is known, which ranks waited for which, and operations that are stuck."""
    calls, ranks, span = extent(timeline)
    parts = [f"{plural(calls, 'operation')} of {plural(ranks, 'rank')} in {span:.3f} s"]
    if timeline.unmeasured:
        parts.append(f"no clock was compared with that of {listed(timeline.unmeasured)}: times there may be shifted")
    longest = longest_waits(timeline)
    if longest:
        rows = [
            (str(rank), str(late), _time(sum(waits)), _time(max(waits)), str(len(waits)))
            for (rank, late), waits in longest[:LONGEST_WAITS]
        ]
        titles = ("RANK", "WAITED FOR", "IN ALL", "LONGEST", "OPERATIONS")
        parts.append(table([Column(title, list(cells)) for title, *cells in zip(titles, *rows, strict=True)], width))
    for stuck in timeline.stuck():
        parts.append(
            f"operation {stuck.sequence} of group {stuck.group!r}, {stuck.name}: {_ranks(stuck.inside)} in it, "
            f"{_ranks(stuck.missing)} not"
        )
    for flight in timeline.flights:
        parts += [f"rank {group.rank}: {group.fault}" for group in flight.groups if group.fault]
    return "\n".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} {'are' if len(ranks) > 1 else 'is'}"


def _time(ns: int) -> str:
    return f"{ns / 1e9:.3f} s" if ns >= 10**9 else f"{ns / 1e6:.3f} ms"
