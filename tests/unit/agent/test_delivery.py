"""Files that a member sends: only those that differ, only into the folder of the run, whatever the member says."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from covey.agent import delivery
from covey.agent.delivery import Delivery, run_folder
from covey.agent.requests import OUTPUT_CHUNK_BYTES, FileEntry
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def entry(path: str, content: bytes, *, is_executable: bool = False) -> FileEntry:
    return FileEntry(path, len(content), hashlib.sha256(content).digest(), is_executable)


def chunks(content: bytes) -> list[tuple[int, bytes]]:
    return [(at, content[at : at + OUTPUT_CHUNK_BYTES]) for at in range(0, max(1, len(content)), OUTPUT_CHUNK_BYTES)]


def send(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Deliver files, chunks in reverse order; return the paths that had to be sent."""
    files_here, transfer = list(files.items()), Delivery(folder)
    transfer.offer(tuple(entry(path, content) for path, content in files_here))
    wanted = [index for page in transfer.missing() for index in page]
    for index in wanted:
        for at, data in reversed(chunks(files_here[index][1])):
            transfer.put(index, at, data)
    transfer.finish()
    return [files_here[index][0] for index in wanted]


def test_only_files_that_differ_are_sent_and_those_that_are_gone_are_removed(tmp_path: Path) -> None:
    folder, large = tmp_path / "run", bytes(range(256)) * 400
    files = {"a.py": b"a", "lib/b.py": b"b", "large": large, "empty": b"", "gone.py": b"g"}
    assert send(folder, files) == list(files)
    work = folder / "work"
    assert (work / "large").read_bytes() == large
    assert (work / "empty").read_bytes() == b""
    (work / "checkpoint").write_text("of the program")
    (work / "a.py").write_text("changed there")
    del files["gone.py"]
    files["lib/b.py"] = b"new"
    assert send(folder, files) == ["a.py", "lib/b.py"]
    assert {str(path.relative_to(work)): path.read_bytes() for path in work.rglob("*") if path.is_file()} == {
        **files,
        "checkpoint": b"of the program",
    }
    assert send(folder, files) == []


def test_a_file_can_be_executed_if_it_could_be_at_home(tmp_path: Path) -> None:
    for is_executable in (True, False):
        transfer = Delivery(tmp_path)
        transfer.offer((entry("run.sh", b"#!", is_executable=is_executable),))
        assert list(transfer.missing()) == [[0]]
        transfer.put(0, 0, b"#!")
        assert os.access(tmp_path / "work" / "run.sh", os.X_OK) == is_executable


def test_links_that_a_program_left_lead_nowhere(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("untouched")
    send(folder, {"lib/a": b"1", "b": b"2", "old/c": b"3"})
    work = folder / "work"
    for path, target in (("lib", outside), ("b", outside / "file"), ("old", outside)):
        os.rename(work / path, work / f"{path}.moved")
        (work / path).symlink_to(target)
    (outside / "c").write_text("untouched")
    assert send(folder, {"lib/a": b"1", "b": b"2"}) == ["lib/a", "b"]
    assert (work / "lib" / "a").read_bytes() == b"1"
    assert not (work / "b").is_symlink()
    assert sorted((path.name, path.read_text()) for path in outside.iterdir()) == [
        ("c", "untouched"),
        ("file", "untouched"),
    ]


def test_content_that_is_not_what_was_announced_is_not_installed(tmp_path: Path) -> None:
    transfer = Delivery(tmp_path)
    transfer.offer((entry("a", b"12345"), entry("b", b"x")))
    with pytest.raises(ConfigError, match="was not asked for"):
        transfer.put(0, 0, b"12345")
    assert list(transfer.missing()) == [[0, 1]]
    for index, at, data in ((0, 0, b"123456"), (0, 0, b"123"), (0, 5, b""), (0, 3, b"45"), (7, 0, b""), (0, -5, b"")):
        with pytest.raises(ConfigError):
            transfer.put(index, at, data)
    with pytest.raises(ConfigError, match="has changed while it was sent"):
        transfer.put(0, 0, b"54321")
    with pytest.raises(ConfigError, match="some files were not sent"):
        transfer.finish()
    assert not (tmp_path / "work" / "a").exists()


@pytest.mark.parametrize("path", ["../a", "/tmp/a", "a/../../b", "a\0"])
def test_a_path_that_leaves_the_folder_is_refused_before_anything_is_written(tmp_path: Path, path: str) -> None:
    transfer = Delivery(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be sent"):
        transfer.offer((entry(path, b"x"),))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_list_is_bounded_in_files_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="2 GiB"):
        Delivery(tmp_path).offer((FileEntry("a", 1 << 31, bytes(32)), FileEntry("b", 1, bytes(32))))
    monkeypatch.setattr(delivery, "SNAPSHOT_FILES_LIMIT", 2)
    transfer = Delivery(tmp_path)
    transfer.offer((entry("a", b""), entry("b", b"")))
    with pytest.raises(ConfigError, match="2 files"):
        transfer.offer((entry("c", b""),))


def test_folders_of_runs_differ_whatever_the_runs_are_called(tmp_path: Path) -> None:
    names = ["train", "Train", "tr/ain", "..", "/etc", "a" * 100, "a" * 99 + "b", "日本", "本日", "."]
    folders = {run_folder(tmp_path, name) for name in names}
    assert len({str(folder).lower() for folder in folders}) == len(names)
    assert all(folder.parent == tmp_path and folder.name.isascii() for folder in folders)
