"""Paths that a member names stay in the folder, and no two of them mean one file."""

from __future__ import annotations

import pytest
from tests.support.in_turn import in_turn

from covey.agent.requests import FOLDERS_DEEP, PathSet, check_path
from covey.base.errors import ConfigError

GOOD = ["train.py", "a/b/c.py", ".hidden", "with space.txt", "größe.py", "日本.txt", "a..b", "..a/b", "-x", "~/x"]
BAD = {
    "absolute": "/etc/passwd",
    "up": "../x",
    "up in the middle": "a/../../x",
    "up at the end": "a/..",
    "here": "./a",
    "empty": "",
    "empty part": "a//b",
    "slash at the end": "a/",
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "a\x1b[2J",
    "direction": "a\u202egpj.exe",
    "zero width": "tr\u200bain.py",
    "joiner that macOS ignores": "..\u200c/x",
    "surrogate": "a\udce4",
    "not composed": "gro\u0308\u00dfe.py",
    "backslash": "..\\x",
    "drive": "C:/x",
    "long name": "x" * 256,
    "long path": "/".join(["x" * 200] * 6),
    "deep": "/".join(["x"] * (FOLDERS_DEEP + 1)),
}


def test_ordinary_paths_are_taken_apart() -> None:
    assert [check_path(path) for path in GOOD] == [tuple(path.split("/")) for path in GOOD]


@in_turn(path=BAD.values())
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be sent") as refused:
        check_path(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a/x.py", "a/x.py"),
        ("Train.py", "train.py"),
        ("Lib/a.py", "lib/b.py"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("A/b", "a"),
        ("straße", "STRASSE"),
        ("\ufb01le", "file"),
    ],
)
def test_paths_that_mean_one_file_on_some_system_are_refused(one: str, other: str) -> None:
    paths = PathSet()
    paths.add(one)
    with pytest.raises(ConfigError, match="mean one file"):
        paths.add(other)


def test_files_of_one_folder_are_no_collision() -> None:
    paths = PathSet()
    assert [paths.add(path) for path in ("a/b/c", "a/b/d", "a/e", "b")] == [
        ("a", "b", "c"),
        ("a", "b", "d"),
        ("a", "e"),
        ("b",),
    ]
