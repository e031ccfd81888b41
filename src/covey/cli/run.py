"""`covey run`: a script as several ranks on this machine."""

from __future__ import annotations

import enum
import os
import shutil
import sys
from typing import Annotated

import typer

from covey.base.errors import ConfigError
from covey.runtime.keeper import keep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Lanes(enum.StrEnum):
    SHM = "shm"
    UNIX = "unix"
    TCP = "tcp"


# What follows the script belongs to the script, options too.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or any program.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What follows is the script's.")] = None,
    ranks: Annotated[int, typer.Option("-n", metavar="N", help="How many ranks to start.")] = 1,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a Python module, as in `python -m`.")] = False,
    lanes: Annotated[
        Lanes | None, typer.Option(help="Carry all bytes between ranks this way, instead of the best for each pair.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let ranks listen and connect beyond this machine without encryption.")
    ] = False,
) -> None:
    """Start a script as several ranks on this machine.

    In each rank, covey.join() returns the group of all. Lines of output start with their rank.

    When a rank fails the others are stopped, and its exit code is returned.

    Ctrl-C is passed on to all ranks; a second one kills them.
    """
    settings = {}
    if lanes is not None:
        settings["COVEY_LANES"] = lanes.value
    if insecure:
        settings["COVEY_INSECURE"] = "1"
    raise typer.Exit(keep(ranks, command_line(script, arguments or [], module=module), env=settings))


def command_line(script: str, arguments: list[str], *, module: bool) -> list[str]:
    """Return the words to execute for what a person typed after `covey run`.

    Raises:
        ConfigError: there is no such script or program.
    """
    if module:
        return [sys.executable, "-m", script, *arguments]
    if os.path.isfile(script):
        if script.endswith(".py") or not os.access(script, os.X_OK):
            return [sys.executable, script, *arguments]
        return [os.path.abspath(script), *arguments]
    program = shutil.which(script)
    if program is None:
        raise ConfigError(f"there is no script or program {script!r} in {os.getcwd()} or on the PATH")
    return [program, *arguments]
