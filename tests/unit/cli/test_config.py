"""`covey config NAME`: what a setting means, and how it is set."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import typer.main
from rich.cells import cell_len

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.cli import config
from covey.cli.config import app

if TYPE_CHECKING:
    from pathlib import Path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    typer.main.get_command(app).main(list(words), standalone_mode=False)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COVEY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_a_setting_is_explained_by_its_name_or_by_that_of_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_TIMEOUT", "90")
    first, *_, last = shown(capsys, "timeout")
    assert first == "timeout = 90  (environment)"
    assert last == "  Set by: COVEY_TIMEOUT, op_timeout= of covey.join, timeout in covey.toml."
    for name in ("segment_bytes", "COVEY_SEGMENT_BYTES", "segment-bytes"):
        assert shown(capsys, name)[0] == "segment_bytes = 4MiB  (default)"
    assert "  Set by: COVEY_HOME." in shown(capsys, "home")
    with pytest.raises(ConfigError, match="covey has no setting 'timeot'; did you mean timeout"):
        shown(capsys, "timeout", "timeot")


def test_a_run_of_hundreds_of_nodes_can_be_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_RUN_SIZE", "200")
    assert shown(capsys, "run_size")[0] == "run_size = 200  (environment)"


def test_every_setting_is_explained_in_lines_that_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "room", lambda: 60)
    lines = shown(capsys, *SETTINGS)
    assert {line.split()[0] for line in lines if line} >= set(SETTINGS)
    assert sum(line.startswith("  Set by: ") for line in lines) == len(SETTINGS)
    assert max(map(cell_len, lines)) <= 60
