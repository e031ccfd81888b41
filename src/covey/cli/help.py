"""`covey help [COMMAND]`: the same as `covey COMMAND --help`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from covey.base.errors import ConfigError
from covey.cli import main

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def help(
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="A command, such as run or secret rotate; without it, covey itself.",
            autocompletion=main.commands,
        ),
    ] = None,
) -> None:
    """Show the help of covey or of one of its commands."""
    context: Any = ctx.find_root()
    for word in command or ():
        known = context.command.list_commands(context) if hasattr(context.command, "list_commands") else []
        if word not in known:
            name = context.command_path.removeprefix("covey").strip()
            raise ConfigError(f"there is no command {f'{name} {word}'.strip()!r}; `covey help` lists the commands")
        _, found, _ = context.command.resolve_command(context, [word])
        context = typer.Context(found, info_name=word, parent=context)
    typer.echo(context.get_help())
