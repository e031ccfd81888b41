"""The `covey` command: its sub-commands, and how errors are shown.

A command named X lives in `covey.cli.X` as a Typer app named `app`. That module is imported when the command is used,
not before, so that `covey run` starts quickly however much `covey bench` needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any, Final, NoReturn

import typer
import typer.core
import typer.main

from covey.base.errors import ConfigError, CoveyError
from covey.cli.output import output_written

COMMANDS: Final = {
    "init": "Make a cluster: its secret, and the join code for other machines.",
    "enroll": "Put this machine into a cluster, with its join code.",
    "run": "Start a script: as ranks on this machine, or in a run of the cluster.",
    "status": "Show who is in the cluster and how they reach each other.",
    "doctor": "Find out why machines do not find or reach each other.",
    "clusters": "List the clusters this machine is in.",
    "secret": "Change a cluster's secret, or show whether this machine may.",
    "deny": "Keep a node out of a cluster.",
    "audit": "Show what this machine noted: joins, refusals, denials, changes of secrets.",
    "allow": "Approve machines that want to be in a cluster.",
    "demo": "Watch four ranks train a small model together.",
    "bench": "Measure collectives: sizes, lanes, rank counts, opponents.",
    "chaos": "Run a job, break its processes and connections, tell what survived.",
}


class LazyGroup(typer.core.TyperGroup):
    """Lists every command from `COMMANDS`; imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = typer.main.get_command(importlib.import_module(f"covey.cli.{name}").app)
            command.name = name
        return name, command, rest


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        try:
            version = metadata.version("covey")
        except metadata.PackageNotFoundError:  # run from its source folder
            from covey.base.version import __version__ as version
        typer.echo(f"covey {version}")
        raise typer.Exit


@app.callback()
def covey(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Machines you already own, training one model together."""


def _placeholder() -> None:
    """Stand in `covey --help` for a command that `LazyGroup` imports when it is called."""


for _name, _line in COMMANDS.items():
    app.command(_name, help=_line)(_placeholder)


def main() -> NoReturn:
    """Run the command that `sys.argv` names, and exit."""
    try:
        with output_written():
            app(prog_name="covey")
    except CoveyError as error:
        if os.environ.get("COVEY_DEBUG") == "1":
            raise
        print(f"error: {error}\nwhat to do: {error.remedy.value}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    sys.exit(0)
