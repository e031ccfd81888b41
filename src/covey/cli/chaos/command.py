"""The `covey chaos` command: runs a job with faults and prints a report."""

from __future__ import annotations

import json
import os
import random
import signal
from typing import Annotated, Final

import typer
from rich.console import Console

from covey.base.config import split_list
from covey.base.errors import ConfigError
from covey.cli.chaos.cutting import require_cutting
from covey.cli.chaos.faults import KINDS, Chaos, plan
from covey.cli.chaos.processes import JobProcesses
from covey.cli.chaos.relay import Relay
from covey.cli.chaos.report import as_json as to_json
from covey.cli.chaos.report import view
from covey.cli.chaos.trial import Trial
from covey.cli.options import setting_option
from covey.cli.run import command_line

PLAIN_WIDTH: Final = 140
"""Line width without a terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(context_settings={"allow_interspersed_args": False})
def chaos(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND...]", help="A script or program; after --.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            metavar="N",
            help="Processes that the job begins with; with --hosts, on each.",
            show_default="3; with --check, what the seed says",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Instead of a command, run a workload that checks every operation against its exact result.",
        ),
    ] = False,
    hosts: Annotated[
        int | None,
        typer.Option(metavar="H", help="With --check: on H hosts, made of network namespaces; as root, on Linux."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, metavar="R", help="With --check: R runs, each with the next seed.")] = 1,
    records: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Check again what a run of --check left in a folder.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same faults in the same order.", show_default="a new one")
    ] = None,
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"Kinds of faults: {', '.join(KINDS)}; with --check, those listed in the guide.",
            show_default="all that work here",
        ),
    ] = None,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between faults, on average.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=0, help="Faults at most.", show_default="10; with --check, 7")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(metavar="S", help="No fault later than this; the job then finishes undisturbed.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, metavar="N", help="Restart a failed process up to N times.")] = 0,
    min_alive: Annotated[int, typer.Option(metavar="N", help="Leave at least N members undisturbed at any time.")] = 1,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="End the job after this long.", show_default="never")
    ] = None,
    lanes: Annotated[str | None, setting_option("lanes")] = None,
    on_loss: Annotated[str | None, setting_option("on_loss", default="what the job says")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object at the end; what the job prints goes to stderr.")
    ] = False,
) -> None:
    """Run a job on this machine, break its processes and connections, and report what survived.

    Processes are killed, stopped, slowed down, asked to leave, disconnected from each other, and added, at times that
    a seed decides. Times count from when the job has formed its group.

    Exits with 0 if the job ends with 0: at least one process finished it, and no untouched process failed.

    With --check the job is a workload of covey's own. Each process records the outcome of every operation, and the
    records are checked afterwards: exact results, the same outcome on all ranks, no gaps, one sequence of generations.
    Exits with 0 if every check passes.
    """
    if records is not None or check:
        if command or (check and records is not None):
            raise ConfigError("--check and --records take no command, and only one of them")
        raise typer.Exit(_checked(records, processes, hosts, runs, seed, faults, every, count, lanes, as_json))
    if not command:
        raise ConfigError("name a script or program after --, or use --check")
    if hosts is not None or runs != 1:
        raise ConfigError("--hosts and --runs go with --check")
    processes = 3 if processes is None else processes
    chosen = Chaos(
        size=processes,
        seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
        kinds=_kinds(faults),
        every=every,
        count=10 if count is None else count,
        duration=duration,
        restarts=restarts,
        min_alive=min_alive,
    )
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"--timeout {timeout:g} must be a number of seconds above 0")
    argv = command_line(command[0], command[1:], module=False)
    settings = {"COVEY_LANES": lanes, "COVEY_ON_LOSS": on_loss}
    env = {name: value for name, value in settings.items() if value is not None}
    relay = Relay(only_stderr=as_json)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(signum, _interrupt)
    code = None
    with JobProcesses(processes, argv, relay, env=env, slots=chosen.most) as job:
        trial = Trial(job, chosen, plan(chosen), relay.say, timeout)
        try:
            trial.run()
        except KeyboardInterrupt as interrupt:
            code = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
            relay.say("stopped")
    story = trial.story
    if as_json:
        print(json.dumps(to_json(chosen, story)))
    else:
        console = Console(highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = PLAIN_WIDTH
        console.print()
        console.print(view(chosen, story))
    raise typer.Exit(story.code if code is None else code)


def _checked(
    records: str | None,
    processes: int | None,
    hosts: int | None,
    runs: int,
    seed: int | None,
    faults: str | None,
    every: float,
    count: int | None,
    lanes: str | None,
    as_json: bool,
) -> int:
    """Perform checked runs, or check one again; return the exit code."""
    from covey.cli.chaos.checked.campaign import Campaign, check_records

    if records is not None:
        return check_records(records, as_json=as_json)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _interrupt)
    campaign = Campaign(
        seed=seed,
        runs=runs,
        processes=processes,
        hosts=hosts,
        kinds=tuple(split_list(faults or "")),
        every=every,
        count=7 if count is None else count,
        lanes=lanes or "",
        as_json=as_json,
    )
    try:
        return campaign.perform()
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)


def _kinds(text: str | None) -> tuple[str, ...]:
    """Return the requested kinds of faults, or all that are possible here."""
    if text is None:
        try:
            require_cutting()
        except ConfigError:
            return tuple(kind for kind in KINDS if kind != "cut")
        return tuple(KINDS)
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if "cut" in kinds:
        require_cutting()
    return kinds


def _interrupt(signum: int, _: object) -> None:
    """End as Ctrl-C does, so that the processes end, too."""
    raise KeyboardInterrupt(signum)
