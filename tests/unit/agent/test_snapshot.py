"""What is sent of a working folder."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from covey.agent import snapshot
from covey.agent.snapshot import take_snapshot
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_files_have_their_path_size_digest_and_whether_they_can_be_executed(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_bytes(b"a = 1\n")
    (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "empty").touch()
    taken = take_snapshot(tmp_path)
    assert [(each.path, each.size, each.is_executable) for each in taken.entries] == [
        ("empty", 0, False),
        ("lib/a.py", 6, False),
        ("run.sh", 10, True),
    ]
    assert taken.entries[1].digest == hashlib.sha256(b"a = 1\n").digest()


def test_what_coveyignore_names_and_the_folder_of_logs_are_left_out(tmp_path: Path) -> None:
    for path in ("a.py", "data/x.bin", ".git/HEAD", "logs/rank-0.log", "__pycache__/a.pyc"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / ".coveyignore").write_text("# large\ndata/\n")
    taken = take_snapshot(tmp_path, tmp_path / "logs")
    assert [each.path for each in taken.entries] == [".coveyignore", "a.py"]


def test_a_link_inside_counts_as_its_file_and_one_that_leaves_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").write_text("inside")
    (folder / "b").symlink_to("a")
    assert [each.size for each in take_snapshot(folder).entries] == [6, 6]
    (tmp_path / "secret").write_text("outside")
    (folder / "c").symlink_to("../secret")
    with pytest.raises(ConfigError, match=r"c is a link that leaves .*; leave it out with a line in \.coveyignore"):
        take_snapshot(folder)
    (folder / ".coveyignore").write_text("/c\n")
    assert [each.path for each in take_snapshot(folder).entries] == [".coveyignore", "a", "b"]


@pytest.mark.parametrize("kind", ["fifo", "socket", "link to a folder", "link to itself"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lib").mkdir()
    match kind:
        case "fifo":
            os.mkfifo(tmp_path / "odd")
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(tmp_path / "odd"))
        case "link to a folder":
            (tmp_path / "odd").symlink_to("lib")
        case _:
            (tmp_path / "odd").symlink_to("odd")
    with pytest.raises(ConfigError, match="odd"):
        take_snapshot(tmp_path)


def test_a_folder_with_too_many_files_or_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / str(number)).write_bytes(b"x" * 100)
    monkeypatch.setattr(snapshot, "FILES_LIMIT", 3)
    with pytest.raises(ConfigError, match="more than 3 files"):
        take_snapshot(tmp_path)
    monkeypatch.setattr(snapshot, "FILES_LIMIT", 4)
    monkeypatch.setattr(snapshot, "FOLDER_BYTES", 399)
    with pytest.raises(ConfigError, match="3 has 0 MiB"):
        take_snapshot(tmp_path)
