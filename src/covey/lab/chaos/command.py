"""The `covey chaos` command: runs a job with faults and prints a report."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from covey.base.config import split_list
from covey.base.errors import ConfigError
from covey.cli.options import command_of, setting_option
from covey.cli.run import command_line
from covey.lab.chaos.checked_run import CheckedRun, check_again, draw
from covey.lab.chaos.command_run import CommandRun, Relay
from covey.lab.chaos.cutting import require_cutting
from covey.lab.chaos.faults import ChaosTerms, known
from covey.lab.chaos.hosts import require_hosts
from covey.lab.chaos.processes import JobProcesses
from covey.lab.chaos.report import as_json as to_json
from covey.lab.chaos.report import spell_figures, verdict, view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.lab.chaos.checked_run import Scene
    from covey.lab.chaos.faults import Where
    from covey.lab.chaos.report import ChaosStory

CHAOS_WIDTH: Final = 140
"""Line width without a terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@dataclass(frozen=True)
class ChaosRequest:
    """What was typed for `covey chaos`."""

    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", help="A script or program; after --.")
    ] = None
    processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            metavar="N",
            help="Processes that the job begins with; with --hosts, on each.",
            show_default="3; with --check, what the seed says",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Instead of a command, run a workload that checks every operation against its exact result.",
        ),
    ] = False
    hosts: Annotated[
        int | None,
        typer.Option(metavar="H", help="With --check: on H hosts, made of network namespaces; as root, on Linux."),
    ] = None
    runs: Annotated[int, typer.Option(min=1, metavar="R", help="With --check: R runs, each with the next seed.")] = 1
    records: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Check again what a run of --check left in a folder.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same faults in the same order.", show_default="a new one")
    ] = None
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"Kinds of faults: {', '.join(known('command'))}; with --check, more, which the guide lists.",
            show_default="all that work here",
        ),
    ] = None
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between faults, on average.")] = 2.0
    count: Annotated[int | None, typer.Option(min=0, help="Faults at most.", show_default="10; with --check, 7")] = None
    duration: Annotated[
        float | None, typer.Option(metavar="S", help="No fault later than this; the job then finishes undisturbed.")
    ] = None
    restarts: Annotated[int, typer.Option(min=0, metavar="N", help="Restart a failed process up to N times.")] = 0
    min_alive: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Leave at least N members undisturbed at any time.",
            show_default="1; with --check, 0",
        ),
    ] = None
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="End the job after this long.", show_default="never")
    ] = None
    lanes: Annotated[str | None, setting_option("lanes")] = None
    on_loss: Annotated[str | None, setting_option("on_loss", default="what the job says")] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object at the end; what the job prints goes to stderr.")
    ] = False


def chaos(asked: ChaosRequest) -> None:
    """Run a job on this machine, break its processes and connections, and report what survived.

    Processes are killed, stopped, slowed down, asked to leave, disconnected from the others, and added, at times that
    a seed decides. Times count from when the job has formed its group.

    Exits with 0 if the job ends with 0: at least one process finished it, and no untouched process failed.

    With --check the job is a workload of covey's own. Each process records the outcome of every operation, and the
    records are checked afterwards: exact results, the same outcome on all ranks, no gaps, one sequence of generations.
    Exits with 0 if every check passes.
    """
    if (asked.records is not None or asked.check) and (asked.command or (asked.check and asked.records is not None)):
        raise ConfigError("--check and --records take no command, and only one of them")
    if asked.records is not None:
        raise typer.Exit(_tell([check_again(asked.records)], as_json=asked.as_json))
    kinds = tuple(dict.fromkeys(split_list(asked.faults or "")))
    if not kinds or "cut" in kinds:
        kinds = _without_cut(kinds, "hosts" if asked.hosts is not None else "machine" if asked.check else "command")
    seed = random.SystemRandom().randrange(1 << 31) if asked.seed is None else asked.seed
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, _interrupt)
    if asked.check:
        if asked.restarts or asked.timeout is not None or asked.on_loss is not None:
            raise ConfigError("--restarts, --timeout and --on-loss go with a command, not with --check")
        if asked.hosts is not None:
            require_hosts()
        drawn = [
            draw(
                seed + number,
                processes=asked.processes,
                hosts=asked.hosts,
                kinds=kinds,
                every=asked.every,
                count=7 if asked.count is None else asked.count,
                duration=asked.duration,
                min_alive=asked.min_alive or 0,
                lanes=asked.lanes or "",
            )
            for number in range(asked.runs)
        ]
        raise typer.Exit(_check(drawn, as_json=asked.as_json))
    if not asked.command:
        raise ConfigError("name a script or program after --, or use --check")
    if asked.hosts is not None or asked.runs != 1:
        raise ConfigError("--hosts and --runs go with --check")
    if asked.timeout is not None and not asked.timeout > 0:
        raise ConfigError(f"--timeout {asked.timeout:g} must be a number of seconds above 0")
    terms = ChaosTerms(
        seed=seed,
        size=3 if asked.processes is None else asked.processes,
        kinds=kinds,
        every=asked.every,
        count=10 if asked.count is None else asked.count,
        duration=asked.duration,
        restarts=asked.restarts,
        min_alive=1 if asked.min_alive is None else asked.min_alive,
    )
    argv = command_line(asked.command[0], asked.command[1:], module=False)
    settings = {"COVEY_LANES": asked.lanes, "COVEY_ON_LOSS": asked.on_loss}
    env = {name: value for name, value in settings.items() if value is not None}
    raise typer.Exit(_run(terms, argv, env, asked.timeout, as_json=asked.as_json))


app.command(context_settings={"allow_interspersed_args": False})(command_of(ChaosRequest, "chaos", chaos))


def _run(terms: ChaosTerms, argv: list[str], env: dict[str, str], timeout: float | None, *, as_json: bool) -> int:
    """Run a command under chaos, report, and return the exit code."""
    relay, code = Relay(only_stderr=as_json), None
    with JobProcesses(terms.size, argv, relay, env=env, slots=terms.most) as job:
        run = CommandRun(job, terms, relay.say, timeout)
        try:
            run.perform()
        except KeyboardInterrupt as interrupt:
            code = _code(interrupt)
            relay.say("stopped")
    if not as_json:
        print()
    own = _tell([run.story], as_json=as_json)
    return own if code is None else code


def _check(scenes: Sequence[Scene], *, as_json: bool) -> int:
    """Perform checked runs one after another, report each, and return the exit code: 0 if all checks passed."""
    is_told = len(scenes) == 1 or sys.stderr.isatty()

    def say(text: str) -> None:
        if is_told:
            print(f"covey: {text}", file=sys.stderr, flush=True)

    stories = []
    for scene in scenes:
        where = "on this machine" if scene.is_one_host else f"on {len(scene.processes)} hosts"
        say(f"seed {scene.terms.seed}: {scene.terms.size} processes {where}, up to {scene.terms.count} faults")
        try:
            stories.append(CheckedRun(scene, say).perform())
        except KeyboardInterrupt as interrupt:
            return _code(interrupt)
        if len(scenes) > 1 and not as_json:
            _console().print(verdict(stories[-1]))
    if as_json or len(scenes) == 1:
        return _tell(stories, as_json=as_json)
    figures = sum((story.figures for story in stories), Counter[str]())
    right = sum(story.code == 0 for story in stories)
    print(f"{right} of {len(stories)} runs passed: {spell_figures(figures)}")
    return int(right < len(stories))


def _tell(stories: Sequence[ChaosStory], *, as_json: bool) -> int:
    """Print the report of runs; return the exit code."""
    found = to_json(stories)
    if as_json:
        print(json.dumps(found))
    else:
        for story in stories:
            _console().print(view(story))
    return int(found["code"])


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = CHAOS_WIDTH
    return console


def _without_cut(kinds: tuple[str, ...], where: Where) -> tuple[str, ...]:
    """Return the requested kinds of faults; if none is, all that are possible there and here.

    Raises:
        ConfigError: connections cannot be cut here, and `cut` is requested.
    """
    try:
        require_cutting()
    except ConfigError:
        if kinds:
            raise
        return tuple(kind for kind in known(where) if kind != "cut")
    return kinds


def _code(interrupt: KeyboardInterrupt) -> int:
    return 128 + int(interrupt.args[0] if interrupt.args else signal.SIGINT)


def _interrupt(signum: int, _: object) -> None:
    """End as Ctrl-C does, so that the processes end, too."""
    raise KeyboardInterrupt(signum)
