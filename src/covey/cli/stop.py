"""`covey stop`: ends a run that agents have started."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from covey.base.config import group_config
from covey.base.errors import ConfigError, CoveyError, DeadlineError
from covey.cli.ps import trusted_reports
from covey.cli.terminal import say, working
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions

if TYPE_CHECKING:
    from covey.agent.callers import AgentCaller

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PROGRAMS_END_SECONDS: Final = 45.0
"""`covey run` gives its processes 30 s to save their work."""
ENDED_CHECK_EVERY: Final = 0.2
"""How often the agents are asked whether the programs have ended."""


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of the run.")],
    kill: Annotated[bool, typer.Option("--kill", help="Kill the processes at once, without SIGTERM.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End a run on all trusted machines where agents have started it, and wait for its end.

    Its processes get SIGTERM, and SIGKILL 30 seconds later.
    """
    from covey.agent.callers import calling

    env = effective_environment()
    chosen = ClusterOptions(cluster).find(env)
    with calling(chosen, group_config(env)) as terminal:
        with working("looking for agents ..."):
            known = trusted_reports(terminal, chosen)
        running = [(agent, each.number) for agent, listed in known for each in listed if _is_meant(each, run)]
        if not running:
            raise ConfigError(f"no agent of a trusted machine runs {run!r}; `covey ps` lists the runs")
        for agent, number in running:
            try:
                agent.call("send_signal", number, int(signal.SIGKILL if kill else signal.SIGTERM), 0)
            except CoveyError as error:  # the others are told all the same
                say(str(error), err=True)
        with working(f"waiting for the end of {run} ..."):
            _await_end(running)
    if as_json:
        return typer.echo(json.dumps({"run": run, "ended_on": [agent.name for agent, _ in running]}))
    say(f"{run!r} has ended on {', '.join(agent.name for agent, _ in running)}.")


def _is_meant(report: object, run: str) -> bool:
    return getattr(report, "run", "") == run and getattr(report, "code", 0) is None


def _await_end(running: list[tuple[AgentCaller, int]]) -> None:
    deadline, left = time.monotonic() + PROGRAMS_END_SECONDS, list(running)
    while left:
        agent, number = left[0]
        try:
            ended = {each.number for page in agent.stream("programs") for each in page if each.code is not None}
        except CoveyError as error:
            say(f"it is not known whether it has ended: {error}", err=True)
            ended = {number}
        if number in ended:
            del left[0]
        elif time.monotonic() > deadline:
            raise DeadlineError(
                f"{agent.name}: it has not ended within the timeout of {PROGRAMS_END_SECONDS:g} s; `covey stop --kill` "
                "kills it"
            )
        else:
            time.sleep(ENDED_CHECK_EVERY)
