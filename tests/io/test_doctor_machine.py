"""What `covey doctor` reads on this machine: which files it takes for keys."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from covey.cli.doctor.machine import examine_machine

if TYPE_CHECKING:
    from pathlib import Path


def loose(env: dict[str, str]) -> list[str]:
    return [each.path for each in examine_machine(env, {}).paths if each.is_loose]


def test_a_socket_in_the_folder_of_keys_is_no_key_that_others_may_read(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        previous = os.open(".", os.O_RDONLY)
        try:
            os.chdir(home / "run")  # the path of a socket must be short
            listener.bind("0.sock")
        finally:
            os.chdir(previous)
            os.close(previous)
        assert loose({"COVEY_HOME": str(home)}) == []
    key = home / "run" / "a.key"
    key.touch(mode=0o600)
    key.chmod(0o644)
    assert loose({"COVEY_HOME": str(home)}) == [str(key)]


def test_temporary_files_below_the_folder_of_keys_are_not_covey_s(home: Path) -> None:
    """TMPDIR may be there; what other programs write there need not be private."""
    for name in ("temp", "keys"):
        (home / name).mkdir(mode=0o700, parents=True)
        home.chmod(0o700)
        (home / name / "file").touch(mode=0o600)
        (home / name / "file").chmod(0o644)
    env = {"COVEY_HOME": str(home), "TMPDIR": str(home / "temp")}
    assert loose(env) == [str(home / "keys" / "file")]
    assert [each.path for each in examine_machine(env, {}).folders] == [str(home), str(home / "temp")]
    same = env | {"XDG_RUNTIME_DIR": str(home / "temp")}
    assert [each.variable for each in examine_machine(same, {}).folders] == ["COVEY_HOME", "TMPDIR and XDG_RUNTIME_DIR"]
