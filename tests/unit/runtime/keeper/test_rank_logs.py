"""Log files of ranks on a disk that is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.runtime.keeper.rank_logs import RankLogs

if TYPE_CHECKING:
    from pathlib import Path

FULL = "/dev/full"


def test_a_file_on_a_full_disk_is_told_of_once_and_says_later_what_it_lacks(tmp_path: Path) -> None:
    logs, file = RankLogs(str(tmp_path)), tmp_path / "rank-3.log"
    assert logs.write("3", b"a\n") == ""
    assert logs.is_complete
    file.rename(tmp_path / "before")
    file.symlink_to(FULL)
    told = logs.write("3", b"bcd\n")
    assert told.startswith(f"{file} cannot be written (No space left on device)")
    assert logs.write("3", b"ef\n") == ""
    assert not logs.is_complete
    file.unlink()
    (tmp_path / "before").rename(file)
    assert logs.write("3", b"g\n") == ""
    assert logs.write("3", b"h\n") == ""
    gap = "\ncovey: 7 bytes could not be written here (No space left on device)\n"
    assert file.read_text() == f"a\n{gap}g\nh\n"
    assert not logs.is_complete


def test_a_folder_that_takes_no_byte_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> object:
        return open(FULL, "wb")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match="No space left on device; choose a folder that can be written"):
        RankLogs(str(tmp_path))
