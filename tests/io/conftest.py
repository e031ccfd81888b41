"""Folders of one test, in place of those of the user."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Processes of one host meet in a folder of the test. Its path is short, as those of unix sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def home(runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nodes meet in a folder of the test, put temporary files there, and keep their own files in another."""
    monkeypatch.setenv("TMPDIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
