"""`.coveyignore` means what the same lines mean in `.gitignore`."""

from __future__ import annotations

import pytest

from covey.agent.ignore import IgnoreRules
from covey.base.errors import ConfigError

CASES = [
    ("*.log", ["a.log", "x/y/a.log"], ["a.log.txt", "alog"]),
    ("/data", ["data"], ["x/data", "database"]),
    ("data/raw", ["data/raw"], ["x/data/raw", "data/raws"]),
    ("**/cache", ["cache", "a/cache", "a/b/cache"], ["acache"]),
    ("runs/**", ["runs/a", "runs/a/b"], ["runs", "x/runs/a"]),
    ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["a/bz", "z"]),
    ("file?.py", ["file1.py", "x/file2.py"], ["file.py", "file/.py"]),
    ("[abc].txt", ["a.txt", "q/b.txt"], ["d.txt"]),
    ("[!abc].txt", ["d.txt"], ["a.txt", "x/.txt"]),
    (r"\#notes", ["#notes"], ["notes"]),
    ("# a comment", [], ["# a comment"]),
    ("", [], ["a"]),
    ("a+b(1).txt", ["a+b(1).txt"], ["aab(1).txt"]),
]


@pytest.mark.parametrize(("line", "left_out", "sent"), CASES, ids=[line or "empty" for line, _, _ in CASES])
def test_a_pattern_matches_what_it_matches_for_git(line: str, left_out: list[str], sent: list[str]) -> None:
    rules = IgnoreRules([line])
    assert [path for path in left_out + sent if rules.ignores(path, is_folder=False)] == left_out


def test_a_slash_at_the_end_means_folders_only() -> None:
    rules = IgnoreRules(["build/"])
    assert rules.ignores("x/build", is_folder=True)
    assert not rules.ignores("x/build", is_folder=False)


def test_the_last_pattern_decides_and_can_undo_those_before_it_and_the_built_in_ones() -> None:
    rules = IgnoreRules(["*.bin", "!keep.bin", "!.venv/"])
    assert rules.ignores("a.bin", is_folder=False)
    assert not rules.ignores("x/keep.bin", is_folder=False)
    assert not rules.ignores(".venv", is_folder=True)
    assert rules.ignores(".git", is_folder=True)
    assert rules.ignores("x/__pycache__", is_folder=True)


def test_a_file_with_thousands_of_lines_is_refused() -> None:
    with pytest.raises(ConfigError, match="1001 lines"):
        IgnoreRules(["x"] * 1001)


def test_a_pattern_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\[z-a\]"):
        IgnoreRules(["[z-a]"])
