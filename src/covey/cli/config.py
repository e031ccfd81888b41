"""`covey config`: prints the settings that are in effect here, and where each comes from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from covey.base.config import refuse_unknown
from covey.base.settings import SETTINGS, EffectiveSetting, effective_settings
from covey.cli.layout import Column, room, table
from covey.net.settings_files import settings_of_files

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def config(
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
    shown = [each for each in found if not changed or each.source != "default"]
    if as_json:
        typer.echo(json.dumps([{**asdict(each), "meaning": SETTINGS[each.name].meaning} for each in shown]))
    else:
        typer.echo(table(_columns(shown), room()))


def _columns(shown: list[EffectiveSetting]) -> list[Column]:
    return [
        Column("SETTING", [each.name for each in shown]),
        Column("VALUE", [each.value or "-" for each in shown], wraps=True),
        Column("FROM", [each.source for each in shown], wraps=True),
        Column("VARIABLE", [each.variable for each in shown], leave_out=1),
    ]
