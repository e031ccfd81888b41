"""covey.toml in the working folder and in the configuration folder: which is read, and which is not trusted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.net.host.settings_files import effective_environment, settings_of_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the working folder and the configuration folder of this process; neither has a file."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir(mode=0o700)
    for name in list(os.environ):
        if name.startswith("COVEY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COVEY_HOME", str(home))
    monkeypatch.chdir(work)
    return work, home


def test_without_files_there_is_only_the_environment(folders: tuple[Path, Path]) -> None:
    assert settings_of_files() == {}
    assert effective_environment() == os.environ


def test_the_environment_beats_the_working_folder_which_beats_the_configuration_folder(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, home = folders
    (home / "covey.toml").write_text('timeout = 1\npatience = 1\nlanes = "tcp"\ninsecure = true\n')
    (work / "covey.toml").write_text("timeout = 2\npatience = 2\n")
    monkeypatch.setenv("COVEY_TIMEOUT", "3")
    env = effective_environment()
    assert [env[f"COVEY_{name}"] for name in ("TIMEOUT", "PATIENCE", "LANES", "INSECURE")] == ["3", "2", "tcp", "1"]
    assert list(settings_of_files()) == [str(work / "covey.toml"), str(home / "covey.toml")]


def test_what_is_removed_is_removed_from_the_environment_itself(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_SECRET", "a secret of many words")
    (folders[0] / "covey.toml").write_text("timeout = 2\n")
    assert effective_environment().pop("COVEY_SECRET") == "a secret of many words"
    assert "COVEY_SECRET" not in os.environ
    assert "COVEY_TIMEOUT" not in os.environ


def test_in_the_configuration_folder_itself_its_file_is_the_users(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders[1] / "covey.toml").write_text("insecure = true\n")
    monkeypatch.chdir(folders[1])
    assert effective_environment()["COVEY_INSECURE"] == "1"


@pytest.mark.parametrize(
    "line",
    ["insecure = true", 'seeds = ["192.0.2.1:47700"]', 'cluster = "x"', 'secret_file = "x"', "share_output = true"],
)
def test_the_file_of_a_working_folder_that_weakens_security_is_an_error(folders: tuple[Path, Path], line: str) -> None:
    (folders[0] / "covey.toml").write_text(line)
    with pytest.raises(ConfigError, match=r"cannot be set"):
        effective_environment()


@pytest.mark.parametrize("text", ["timeout = ", "\0", "timeout = 1\ntimeout = 2", "[timeout", "a=" + "[" * 5000])
def test_a_file_that_is_not_toml_is_named(folders: tuple[Path, Path], text: str) -> None:
    (folders[0] / "covey.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"covey\.toml is not TOML"):
        effective_environment()


def test_bytes_that_are_no_text_are_refused(folders: tuple[Path, Path]) -> None:
    (folders[0] / "covey.toml").write_bytes(b"timeout = '\xff'")
    with pytest.raises(ConfigError, match=r"covey\.toml is not TOML"):
        effective_environment()


def test_a_file_that_others_can_change_is_refused(folders: tuple[Path, Path]) -> None:
    path = folders[0] / "covey.toml"
    path.write_text("timeout = 5")
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"can be changed by other users.*chmod go-w"):
            effective_environment()
    path.chmod(0o644)
    assert effective_environment()["COVEY_TIMEOUT"] == "5"


def test_a_file_or_link_of_another_user_is_refused(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = folders[0] / "covey.toml", folders[0] / "target.toml"
    path.write_text("timeout = 5")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1000)
    if path.stat().st_uid == 0:  # the files of root are trusted: what this test makes must belong to another user
        os.chown(path, 4242, -1)
    with pytest.raises(ConfigError, match=r"belongs to user"):
        effective_environment()
    if os.getuid() == 0:
        path.rename(target)
        os.chown(target, 0, -1)
        path.symlink_to(target)
        os.chown(path, 4242, -1, follow_symlinks=False)
        with pytest.raises(ConfigError, match=r"belongs to user 4242"):
            effective_environment()


def test_what_is_no_file_of_a_few_lines_is_refused_without_reading_it(folders: tuple[Path, Path]) -> None:
    path = folders[0] / "covey.toml"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"covey\.toml"):
        effective_environment()
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"not a file of settings"):
        effective_environment()
    path.unlink()
    path.write_text("#" * 100_000)
    with pytest.raises(ConfigError, match=r"not a file of settings"):
        effective_environment()


def test_a_working_folder_that_was_removed_has_no_settings(folders: tuple[Path, Path]) -> None:
    folders[0].rmdir()
    assert settings_of_files() == {}
