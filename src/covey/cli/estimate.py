"""`covey estimate`: how fast each way to train would be, from a program's first steps, or from three numbers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer

from covey.base.errors import ConfigError
from covey.plan import training

WHAT_IF: Final = "Without a program"
_COUNT_UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="[RUN OPTIONS]",
)
def estimate(
    ctx: typer.Context,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="MS,...",
            help="Milliseconds that each machine computes in a step, without any exchange.",
            rich_help_panel=WHAT_IF,
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameters that are trained: 3.2M, 7G.", rich_help_panel=WHAT_IF),
    ] = None,
    line: Annotated[
        str | None,
        typer.Option(metavar="MBIT", help="What the slowest machine sends, in Mbit/s.", rich_help_panel=WHAT_IF),
    ] = None,
) -> None:
    """Predict how fast DDP, DDP with each codec, DiLoCo and one machine alone would be, and say what is best.

    `covey estimate train.py` starts a program that trains with torch, as `covey run` with the same options would, lets
    it take a few steps, and ends it. `covey estimate --step 82,82 --parameters 3.2M --line 100` needs no program.
    """
    what_if = {"--step": step, "--parameters": parameters, "--line": line}
    given = [name for name, value in what_if.items() if value is not None]
    if not given:
        _of_program(ctx.args)
        return
    if len(given) < len(what_if) or ctx.args:
        raise ConfigError(
            f"{', '.join(given)} given: without a program, give --step, --parameters and --line; or a program alone"
        )
    assert step is not None
    assert parameters is not None
    assert line is not None
    seconds = [_number("--step", word) / 1e3 for word in step.split(",")]
    members = [training.Learner(each, 1.0) for each in seconds]
    nbytes, rate = 4 * _number("--parameters", parameters), training.SlowestLine(_number("--line", line) * 1e6 / 8)
    for text in training.table(training.alone(members), members, nbytes, rate):
        typer.echo(text)


def _of_program(arguments: list[str]) -> None:
    """Run a program as `covey run` does, and let it end after its first steps."""
    if not arguments:
        raise ConfigError("give a program, as to covey run; or --step, --parameters and --line")
    from covey.cli.main import load  # all commands, one of which this is

    run: Any = load("run")
    run.main(args=["--estimate", *arguments], prog_name="covey estimate", standalone_mode=False)


def _number(option: str, word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmMgG]?)", word.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{option} {word!r} must be a number above 0, like 3.2M")
    return float(match[1]) * _COUNT_UNITS[match[2].lower()]
