"""`covey estimate` without a program: three numbers in, all ways out."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from covey.base.errors import ConfigError
from covey.cli.estimate import app


def lines_of(*words: str) -> list[str]:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None, result.exception
    return result.stdout.splitlines()


def test_three_numbers_give_all_ways_with_the_best_first_and_what_a_cable_brings() -> None:
    shown = lines_of("--step", "82,82", "--parameters", "3.2M", "--line", "100")
    assert shown[0].split() == ["way", "step", "batches/s", "that", "count", "beside", "now"]
    assert shown[1].startswith("DiLoCo")
    assert {line.split("  ")[0] for line in shown[1:-1]} >= {"DDP", "DDP int8", "one machine alone"}
    assert shown[-1].startswith("over a cable of 1 Gbit/s: ")
    single = lines_of("--step", "82", "--parameters", "3.2m", "--line", "100000")
    assert [line.split("  ")[0] for line in single[1:]] == ["one machine alone"]
    assert lines_of("--step", "82,82", "--parameters", "3200K", "--line", "1000000")[1].startswith("DDP ")


def test_what_is_missing_or_wrong_is_named() -> None:
    for words, message in (
        ((), "give a program, as to covey run; or --step, --parameters and --line"),
        (("--step", "82"), "--step given: without a program, give --step, --parameters and --line"),
        (("--step", "82", "--parameters", "1", "--line", "1", "x.py"), "or a program alone"),
        (("--step", "fast", "--parameters", "1", "--line", "1"), "--step 'fast' must be a number above 0, like 3.2M"),
        (("--step", "0", "--parameters", "1", "--line", "1"), "--step '0' must be a number above 0"),
    ):
        error = CliRunner().invoke(app, list(words)).exception
        assert isinstance(error, ConfigError), words
        with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
            raise error
