"""Progress messages on a terminal, and text wrapped to its width."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import typer

from covey.base.errors import ConfigError
from covey.cli.layout import Column, error_room, lay_out, room, wrap
from covey.runtime.keeper.output import event_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@contextlib.contextmanager
def working(
    text: str, *, quiet: bool = False, console: Console | None = None
) -> Iterator[Callable[[str], None] | None]:
    """Show `text` while the block runs; show nothing in a pipe, on a dumb terminal or if `quiet`.

    Yields a function that replaces the text; None if nothing is shown. `console` is standard error by default.
    """
    from rich.console import Console

    console = Console(stderr=True) if console is None else console
    with console.status(text) if is_lively(console) and not quiet else contextlib.nullcontext() as status:
        yield None if status is None else status.update


def is_lively(console: Console) -> bool:
    """Tell whether printed text can be replaced later: on a terminal that is not dumb."""
    return console.is_terminal and not console.is_dumb_terminal


class FittedTable:
    """A table for rich that adapts to the available width."""

    def __init__(self, columns: Sequence[Column], title_style: str = "bold") -> None:
        self._columns, self._title_style = columns, title_style

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in lay_out(self._columns, options.max_width, self._title_style):
            yield Text.assemble(*line)


class Paragraph:
    """A text for rich, indented by `by` characters, without trailing blanks."""

    def __init__(self, text: Text, by: int = 0) -> None:
        self._text, self._by = text, by

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in self._text.wrap(console, max(options.max_width - self._by, 1)):
            line.rstrip()
            yield Text(" " * self._by).append_text(line)


def say(text: str, *, err: bool = False) -> None:
    """Print a text; on a terminal, wrapped to its width. Existing line breaks are kept."""
    width = error_room() if err else room()
    for line in text.split("\n"):
        for part in wrap(line, width) if width is not None else [line]:
            typer.echo(part, err=err)


def tell(text: str, event: str, *, as_json: bool, **about: object) -> None:
    """Print what a command that stays says: a text, or the event that it is about as a line of JSON. At once."""
    if as_json:
        return tell_event(event, **about)
    say(text)
    sys.stdout.flush()


def tell_event(event: str, **about: object) -> None:
    """Print an event as a line of JSON, at once."""
    typer.echo(event_line(event, **about), nl=False)
    sys.stdout.flush()


def confirm(question: str, *, yes: bool, refusal: str) -> None:
    """Ask on the terminal, unless `yes`; end the command if the answer is no.

    Raises:
        ConfigError: there is no terminal; the text is `refusal`, and that --yes means yes.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{refusal}, and there is no terminal to ask on; add --yes if you mean it")
    typer.confirm(question, abort=True, err=True)


def plural(count: int, thing: str, several: str = "") -> str:
    """Return `1 entry`, `2 entries`."""
    return f"{count} {thing if count == 1 else several or f'{thing}s'}"
