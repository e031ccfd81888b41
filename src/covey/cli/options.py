"""Options of commands that are made from the table of settings, and commands that are made from a dataclass.

A command is a dataclass, whose fields are its arguments and options, and a function that takes one object of it. The
settings that have an option for the command are in its field `settings`: texts by name, checked, as the environment of
a process would have them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import os
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from covey.base.errors import ConfigError
from covey.base.setting_kinds import FilePath, Flag, OneOf
from covey.base.settings import SETTINGS, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Request = TypeVar("_Request")

RelayLimit = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Be a relay for nodes of the cluster that cannot connect: pass on at most this, like 20M or 2.5MB.",
        show_default="off",
    ),
]


def command_of(request: Callable[..., _Request], name: str, then: Callable[[_Request], None]) -> Callable[..., None]:
    """Return a function from which typer makes the command `name`: it calls `then` with what was typed.

    Its options are the fields of `request`, and one for each setting that has an option of this command, under the
    heading of its section. A command without such settings needs no field `settings`.
    """
    hints = get_type_hints(request, include_extras=True)
    own = [each for each in dataclasses.fields(request) if each.name != "settings"]  # type: ignore[arg-type]
    rows = [row for row in SETTINGS.values() if row.option is not None and name in row.option.commands]

    @functools.wraps(then)
    def command(**given: Any) -> None:
        chosen = {row.name: value for row in rows if (value := _text(given.pop(_word(row)))) is not None}
        then(request(**given, settings=chosen) if rows else request(**given))

    parameters = [_parameter(each.name, hints[each.name], each.default) for each in own]
    for row in rows:
        kind, default = (bool, False) if isinstance(row.kind, Flag) else (str | None, None)
        option = setting_option(row.name, heading=row.section)
        parameters.append(_parameter(_word(row), Annotated[kind, option], default))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    del command.__wrapped__
    return command


def _word(row: Setting) -> str:
    """Return the name of a setting as that of a parameter, which no keyword of Python may be."""
    return f"{row.name}_" if keyword.iskeyword(row.name) else row.name


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _text(value: Any) -> str | None:
    return ("1" if value else None) if isinstance(value, bool) else value


def setting_option(name: str, *, help: str = "", default: str = "", heading: str | None = None) -> Any:
    """Return the option of a setting, with its help and check, for a parameter of type `str | None` or `bool`."""
    row = SETTINGS[name]
    assert row.option is not None
    shown = default or row.option.default or row.shown_default
    known = list(row.kind.known) if isinstance(row.kind, OneOf) else []
    if isinstance(row.kind, Flag):
        return typer.Option(row.flag, help=help or brief(row), rich_help_panel=heading)
    return typer.Option(
        row.flag,
        metavar=row.option.metavar or row.kind.metavar,
        help=help or brief(row),
        show_default=shown or False,
        callback=_checking(row),
        autocompletion=(lambda: known) if known else None,
        rich_help_panel=heading,
    )


def brief(row: Setting) -> str:
    """Return the first sentence of what a setting does, for the help of its option."""
    return row.meaning.partition(". ")[0].removesuffix(".").replace("`", "") + "."


def _checking(row: Setting) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        return None if value is None else checked(row, value)

    return check


def checked(row: Setting, text: str) -> str:
    """Return what was typed for an option, as a variable has it; ConfigError, with the option, if it is no value."""
    row.kind.read(row.flag, text)
    if isinstance(row.kind, FilePath):
        return os.path.abspath(text)
    if row.name == "compress":
        check_compress(text)
    return text


def check_compress(compress: str) -> None:
    """Raise ConfigError for a codec or a parameter of one that does not exist."""
    from covey.compress.policy import make_policy  # slow to load

    try:
        make_policy(compress)
    except ConfigError as error:
        is_unknown = "there is no codec" in str(error)
        own = ". One that the script registers is named by COVEY_COMPRESS, or in covey.join" if is_unknown else ""
        raise ConfigError(f"--compress {compress}: {error}{own}") from None


def variables_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings, which are given by name, as variables of the environment."""
    return {SETTINGS[name].variable: text for name, text in settings.items()}


def words_of(settings: Mapping[str, str]) -> list[str]:
    """Return settings, which are given by name, as options of a command line."""
    rows = {SETTINGS[name]: text for name, text in settings.items()}
    return [row.flag if isinstance(row.kind, Flag) else f"{row.flag}={text}" for row, text in rows.items()]
