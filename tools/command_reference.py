"""Write docs/reference/commands.md from the commands: usage, arguments and options of each.

    python -m tools.command_reference

`make docs` runs this, and a test compares the page with the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
HEAD: Final = """\
# Commands

<!-- Made by `python -m tools.command_reference` from the commands themselves: do not edit. -->

What `covey COMMAND --help` shows, for every command. [The command line](../guides/command-line.md) explains completion,
error messages and exit codes.
"""


def commands() -> Iterator[tuple[Any, Any]]:
    """Yield every command with its context, sub-commands after their command."""
    import typer
    from typer.main import get_command

    from covey.cli import main

    def walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
        yield command, context
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            _, found, _ = command.resolve_command(context, [name])
            yield from walk(found, typer.Context(found, info_name=name, parent=context))

    root: Any = get_command(main.app)
    yield from walk(root, typer.Context(root, info_name="covey", **root.context_settings))


def section(command: Any, context: Any) -> str:
    """Return the part of the page about one command."""
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    parts = [f"## {context.command_path}", f"```text\n{usage}\n```", (command.help or "").strip()]
    params = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, params)]
    parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(filter(None, parts))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(f"\n{section(command, context)}\n" for command, context in commands())


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
