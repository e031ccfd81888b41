"""`covey logs`: shows the output of a run: what this machine has kept of it, or what agents have."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import group_config
from covey.base.errors import ConfigError
from covey.base.text import listed
from covey.cli.ps import trusted_reports
from covey.cli.terminal import say, working
from covey.net.host.saved_runs import find_past_run, past_runs
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions
from covey.runtime.keeper.output import PREFIX_COLOURS
from covey.watch.output import LineAssembly, OutputLine, RunFollower, labelled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.net.host.saved_runs import PastRun

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FOLLOW_EVERY: Final = 0.2
"""Seconds between looks at the files of a run that goes on."""
FIND_SECONDS: Final = 10.0
"""How long a run of the cluster is looked for."""
ALL_TOLD_SECONDS: Final = 3.0
"""When nothing has come from other machines for so long, all was told that was there."""


class UnknownRunError(ConfigError):
    """Neither this machine nor an agent has output of the run."""


@dataclass(frozen=True)
class LinePrinter:
    """Prints the lines that were asked for."""

    ranks: frozenset[int]
    """Empty: all."""
    machine: str
    pattern: re.Pattern[str] | None
    as_json: bool
    names_machines: bool = True
    """Whether the machine stands before the rank; not for a run on this machine alone."""

    @property
    def asks_for_all(self) -> bool:
        """Whether every line is printed as it is."""
        return not (self.ranks or self.machine or self.pattern or self.as_json)

    def print(self, lines: Iterable[OutputLine]) -> None:
        """Print lines: to the stream on which they were written; as JSON, to standard output."""
        for line in lines:
            if not self._is_wanted(line):
                continue
            if self.as_json:
                stream = "stderr" if line.is_error else "stdout"
                about = {"at": round(line.at, 3), "machine": line.machine, "rank": line.rank, "stream": stream}
                print(json.dumps(about | {"text": line.text}))
                continue
            out = sys.stderr if line.is_error else sys.stdout
            print(f"{self._label(line, out.isatty())}{line.text}", file=out)
        sys.stdout.flush()

    def _is_wanted(self, line: OutputLine) -> bool:
        if self.ranks and line.rank not in self.ranks:
            return False
        if self.machine and line.machine and self.machine != line.machine:
            return False
        return self.pattern is None or self.pattern.search(line.text) is not None

    def _label(self, line: OutputLine, is_terminal: bool) -> str:
        parts = [line.machine] * self.names_machines + [str(line.rank)] * (line.rank is not None)
        if not parts or line.text.startswith("covey: "):
            return ""
        label = f"[{' '.join(parts)}]"
        if line.rank is None or not is_terminal or os.environ.get("NO_COLOR"):
            return f"{label} "
        return f"\x1b[{PREFIX_COLOURS[line.rank % len(PREFIX_COLOURS)]}m{label}\x1b[0m "


class LineScreen:
    """Prints lines of programs that agents have started; `covey run` there has put machine and rank before each."""

    def __init__(self, printer: LinePrinter) -> None:
        self._printer = printer
        self._held: dict[tuple[str, int], LineAssembly] = {}

    def show(self, machine: str, stream: int, data: bytes, at: float = 0.0) -> None:
        """Print the lines that are complete."""
        lines = self._held.setdefault((machine, stream), LineAssembly()).take(data)
        self._printer.print(self._line(machine, stream, line, at) for line in lines)

    def ended(self, machine: str) -> None:
        """Print lines without an end."""
        for (of, stream), held in self._held.items():
            if of == machine:
                self._printer.print(self._line(machine, stream, line, time.time()) for line in held.rest())

    def note(self, text: str) -> None:
        """Print a line about the run."""
        say(f"covey: {text}", err=True)

    def _line(self, machine: str, stream: int, data: bytes, at: float) -> OutputLine:
        return labelled(machine, stream, data, at)


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of the run; or its id in `covey history`.")],
    rank: Annotated[
        list[int] | None, typer.Option(metavar="R", help="Only lines of this rank; may be given repeatedly.")
    ] = None,
    machine: Annotated[str, typer.Option(metavar="NAME", help="Only lines of this machine.")] = "",
    grep: Annotated[str, typer.Option(metavar="PATTERN", help="Only lines that this regular expression matches.")] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show new output until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each line, with its time.")] = False,
    everywhere: Annotated[
        bool, typer.Option("--all", help="Also show the output of the other machines of the run, while it runs.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show what agents of this cluster have, not what this machine has kept."),
    ] = None,
) -> None:
    """Show the output of a run: of the latest one with this name.

    The output of what `covey run` has started on this machine is kept here, the latest 4 MiB of each rank, and shown in
    the order of time. Otherwise the trusted machines where agents have started the run are asked; each has the last 32
    MiB of each program, and machines follow one another without -f.

    With --all, the other machines of a run of the cluster are asked while it is running. A machine tells its output if
    its share was started with --share-output, or if its agent has started it for this machine.

    Ctrl-C ends this command, not the run.
    """
    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise ConfigError(f"--grep {grep!r} is not a regular expression: {error}") from None
    printer = LinePrinter(frozenset(rank or ()), machine, pattern, as_json)
    if everywhere:
        return _show_of_all(run, cluster, printer, follow=follow)
    kept = find_past_run(run) if cluster is None else None
    has_output = kept is not None and bool(kept.logs()) and machine in ("", kept.record.machine)
    if kept is not None and has_output and not kept.record.by_agent:
        return _show_of_here(kept, printer, follow=follow)
    try:
        _show_of_agents(run, cluster, printer, follow=follow)
    except UnknownRunError:
        if kept is None or not has_output:
            raise
        _show_of_here(kept, printer, follow=follow)


def _show_of_here(run: PastRun, printer: LinePrinter, *, follow: bool) -> None:
    follower = RunFollower(run)
    printer = replace(printer, names_machines=bool(run.record.cluster))
    printer.print(follower.whole())
    if follower.gone:
        say(f"covey: {follower.gone} earlier lines are no longer kept", err=True)
    while follow and _goes_on(run):
        printer.print(follower.news())
        time.sleep(FOLLOW_EVERY)
    printer.print([*follower.news(), *follower.rest()])


def _show_of_all(run: str, cluster: str | None, printer: LinePrinter, *, follow: bool) -> None:
    """Print what this machine has kept of a run that goes on, and what the others tell, as it comes."""
    from covey.watch.collector import open_collector
    from covey.watch.far_output import far_output, own_output

    with open_collector(run, cluster) as collector:
        with working("looking for the run ..."):
            until = time.monotonic() + FIND_SECONDS
            while not (found := [each for each in collector.newest().runs if each.name == run]):
                if time.monotonic() > until:
                    raise UnknownRunError(f"no run {run!r} is running; without --all, what is kept here is shown")
                time.sleep(FOLLOW_EVERY)
        id = found[0].id
        here = list(own_output(collector, id, only_tail=False))
        far = far_output(collector, id, has_own=bool(here), wants_all=True)
        printer.print(line for source in here for line in source.whole())
        quiet_since, told = time.monotonic(), set[str]()
        while True:
            lines = [line for source in (*here, far) if source is not None for line in source.news()]
            printer.print(sorted(lines, key=lambda line: line.at))
            for name in () if far is None else far.silent:
                if name not in told:
                    say(f"covey: {name} keeps its output to itself; `covey logs {run}` there shows it", err=True)
                told.add(name)
            is_behind = far is not None and not far.has_told_all
            quiet_since = time.monotonic() if lines and (follow or is_behind) else quiet_since
            state = next((each.state for each in collector.newest().runs if each.id == id), "ended")
            is_over = state in ("ended", "failed")
            if time.monotonic() - quiet_since > ALL_TOLD_SECONDS and (is_over or not follow):
                return
            time.sleep(FOLLOW_EVERY)


def _goes_on(run: PastRun) -> bool:
    return any(each.id == run.id and each.is_running for each in past_runs())


def _show_of_agents(run: str, cluster: str | None, printer: LinePrinter, *, follow: bool) -> None:
    from covey.agent.callers import calling
    from covey.agent.screen import Screen, read_output

    env = effective_environment()
    try:
        chosen = ClusterOptions(cluster).find(env)
    except ConfigError as error:
        if cluster is not None:
            raise
        raise UnknownRunError(f"no output of a run {run!r} is kept here{_here()}, and {error}") from None
    with calling(chosen, group_config(env)) as terminal:
        with working("looking for agents ..."):
            known = trusted_reports(terminal, chosen)
        found = {agent: [each for each in listed if each.run == run] for agent, listed in known}
        latest = {agent: listed[-1] for agent, listed in found.items() if listed}
        if printer.machine:
            latest = {agent: report for agent, report in latest.items() if agent.name == printer.machine}
        if not latest:
            raise UnknownRunError(
                f"no output of a run {run!r} is kept here{_here()}, and no agent of a trusted machine knows one; "
                "`covey ps --all` lists the runs of agents"
            )
        screen = Screen() if printer.asks_for_all else LineScreen(printer)
        read_output({agent: report.number for agent, report in latest.items()}, screen, to_end=follow)


def _here() -> str:
    names = listed(list(dict.fromkeys(run.record.name for run in reversed(past_runs()) if run.logs()))[:8])
    return f" (here: {names})" if names else ""
