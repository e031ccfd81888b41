"""The environment of a requirements file: made once, used again, and an error if it cannot be made."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import SOURCE
from tests.support.waiting import DEADLINE

from covey.agent import environments
from covey.agent.environments import Environments
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def make_wheel(folder: Path) -> Path:
    """Write a package that pip installs without a network: it leads to covey, and to the packages that are here."""
    wheel, info = folder / "stand_in-1.0-py3-none-any.whl", "stand_in-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("stand_in.pth", f"{SOURCE}\n{sysconfig.get_path('purelib')}\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_an_environment_that_cannot_be_made_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Environments(tmp_path / "environments")
    with pytest.raises(ConfigError, match="start again"):
        made.python("covey")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"cannot make an environment \(exit code 1\)"):
        list(made.make("covey", ()))
    assert list((tmp_path / "environments").iterdir()) == []
    with pytest.raises(ConfigError, match="start again"):
        made.python("covey")


@pytest.mark.thorough
def test_an_environment_is_made_once_for_the_same_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    made, requirements = Environments(tmp_path / "environments"), f"--no-index\n{make_wheel(tmp_path)}\n"
    with pytest.raises(ConfigError, match="start again"):
        made.python(requirements)
    printed = b"".join(made.make(requirements, ()))
    assert b"Successfully installed stand-in-1.0" in printed
    python = made.python(requirements)
    shown = subprocess.run(
        [python, "-c", "import covey, sys; print(sys.prefix)"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert shown.stdout.strip() == str(tmp_path / "environments" / python.split("/")[-3])
    assert sys.prefix != shown.stdout.strip()
    assert list(made.make(requirements, ())) == []

    monkeypatch.setattr(environments, "ENVIRONMENTS_LIMIT", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="cannot make an environment"):
        list(made.make("another", in_use=[requirements]))
    assert made.python(requirements) == python, "one that is in use stays"
    assert len(list((tmp_path / "environments").iterdir())) == 1, "nothing is left of one that could not be made"
