"""`covey logs`: shows the output of a run that agents have started."""

from __future__ import annotations

from typing import Annotated

import typer

from covey.base.config import group_config
from covey.base.errors import ConfigError
from covey.cli.ps import trusted_reports
from covey.cli.terminal import working
from covey.net.host.settings_files import effective_environment
from covey.runtime.environment import ClusterOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The name of the run.")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show new output until the run ends.")] = False,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="In this cluster, not the default one.")] = None,
) -> None:
    """Show the output of a run on all trusted machines: of the latest one with this name.

    Each machine has the last 32 MiB of each program.

    Lines of one machine are in order; without -f, machines follow one another. Ctrl-C ends this command, not the run.
    """
    from covey.agent.callers import calling
    from covey.agent.screen import Screen, read_output

    env = effective_environment()
    chosen = ClusterOptions(cluster).find(env)
    with calling(chosen, group_config(env)) as terminal:
        with working("looking for agents ..."):
            known = trusted_reports(terminal, chosen)
        found = {agent: [each for each in listed if each.run == run] for agent, listed in known}
        latest = {agent: listed[-1] for agent, listed in found.items() if listed}
        if not latest:
            raise ConfigError(f"no agent of a trusted machine knows a run {run!r}; `covey ps --all` lists the runs")
        read_output({agent: report.number for agent, report in latest.items()}, Screen(), to_end=follow)
