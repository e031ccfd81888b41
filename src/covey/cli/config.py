"""`covey config`: prints the settings that are in effect here, and where each comes from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from covey.base.config import EffectiveSetting, effective_settings, refuse_unknown
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS, SETTINGS_FILE, suggestion
from covey.cli.layout import Column, room, table, wrap
from covey.net.host.settings_files import settings_of_files

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def config(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Only these, and what each means.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out settings that are at their defaults.")] = False,
) -> None:
    """Print the settings that are in effect in this folder, and where each comes from.

    A setting comes from an argument of covey.join, which this command does not see; else from its environment variable;
    else from covey.toml in the working folder; else from covey.toml in the configuration folder; else it has its
    default.
    """
    refuse_unknown(os.environ)
    found = effective_settings({"environment": dict(os.environ)} | settings_of_files())
    wanted = {_known(name) for name in names or ()}
    shown = [each for each in found if not changed or each.source != "default"]
    shown = [each for each in shown if not wanted or each.name in wanted]
    if as_json:
        typer.echo(json.dumps([{**asdict(each), "meaning": SETTINGS[each.name].meaning} for each in shown]))
    elif wanted:
        typer.echo("\n\n".join(_explained(each, room()) for each in shown))
    else:
        typer.echo(table(_columns(shown), room()))


def _columns(shown: list[EffectiveSetting]) -> list[Column]:
    return [
        Column("SETTING", [each.name for each in shown]),
        Column("VALUE", [each.value or "-" for each in shown], wraps=True),
        Column("FROM", [each.source for each in shown], wraps=True),
        Column("VARIABLE", [each.variable for each in shown], leave_out=1),
    ]


def _known(name: str) -> str:
    """Return the name of a setting, also of its variable; ConfigError if there is none."""
    setting = name.lower().removeprefix("covey_").replace("-", "_")
    if setting not in SETTINGS:
        raise ConfigError(f"covey has no setting {name!r}{suggestion(setting, SETTINGS)}")
    return setting


def _explained(each: EffectiveSetting, width: int | None) -> str:
    """Return a setting with what it means, which values it takes, and how it is set."""
    setting = SETTINGS[each.name]
    ways = [each.variable]
    if setting.argument == "settings":
        ways.append(f"settings={{'{each.name}': ...}} of covey.join")
    elif setting.argument:
        ways.append(f"{setting.argument}= of covey.join")
    if setting.files:
        ways.append(f"{each.name} in {SETTINGS_FILE}")
    lines = [
        f"{each.name} = {each.value or '-'}  ({each.source})",
        f"  {setting.meaning}",
        f"  Values: {setting.kind.words}.",
        f"  Set by: {', '.join(ways)}.",
    ]
    plain = [line.replace("`", "") for line in lines]
    return "\n".join(plain if width is None else [part for line in plain for part in wrap(line, width)])
