"""Folders that cannot be written are named, with the reason and the remedy."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.net.host import folders
from covey.net.host.folders import host_folder, temporary_folder, writing_to

if TYPE_CHECKING:
    from pathlib import Path


def test_a_full_folder_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught, writing_to("/run/user/7"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == (
        "cannot write to /run/user/7: No space left on device; free some space there, or set XDG_RUNTIME_DIR to a "
        "folder that you can write, for all processes of the run"
    )


def test_a_folder_of_another_user_is_named_without_advice_about_space() -> None:
    with pytest.raises(ConfigError) as caught, writing_to("/tmp/covey-7"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert str(caught.value) == (
        "cannot write to /tmp/covey-7: Permission denied; set XDG_RUNTIME_DIR to a folder that you can write, "
        "for all processes of the run"
    )


def test_errors_of_covey_stay_what_they_are() -> None:
    mine = ConfigError("rank 1 runs already")
    with pytest.raises(ConfigError) as caught, writing_to("/tmp"):
        raise mine
    assert caught.value is mine


def test_the_folder_where_a_program_is_started_is_no_folder_to_meet_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert temporary_folder() == tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "tempdir", os.getcwd())  # what Python falls back to
    with pytest.raises(ConfigError, match=r"no folder for temporary files .*/tmp \(.*Free some space, or set TMPDIR"):
        temporary_folder()


def test_processes_with_different_folders_for_temporary_files_meet_in_one_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert temporary_folder() == str(tmp_path / name)
        found.append(host_folder())
    assert found[0] == found[1]
    assert found[0] in (f"/run/user/{os.getuid()}", "/tmp", "/var/tmp")


def test_a_session_with_and_one_without_the_runtime_folder_meet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A login session has XDG_RUNTIME_DIR; a process of cron, `su` or `docker exec` has not."""
    monkeypatch.setattr(folders, "HOST_FOLDERS", (f"{tmp_path}/missing", f"{tmp_path}", "/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert host_folder() == str(tmp_path)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert host_folder() == str(tmp_path)


def test_where_no_fixed_place_can_be_written_tmpdir_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(folders, "HOST_FOLDERS", (f"{tmp_path}/missing",))
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/gone")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert host_folder() == str(tmp_path)
