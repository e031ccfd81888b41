"""Folders that cannot be written are named, with the reason and the remedy."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from covey.base.errors import ConfigError
from covey.net.temporary import temporary_folder, writing_to


def test_a_full_folder_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught, writing_to("/run/user/7"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == (
        "cannot write to /run/user/7: No space left on device; free some space there, or set TMPDIR or XDG_RUNTIME_DIR "
        "to a folder that you can write"
    )


def test_a_folder_of_another_user_is_named_without_advice_about_space() -> None:
    with pytest.raises(ConfigError) as caught, writing_to("/tmp/covey-7"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert str(caught.value) == (
        "cannot write to /tmp/covey-7: Permission denied; set TMPDIR or XDG_RUNTIME_DIR to a folder that you can write"
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
