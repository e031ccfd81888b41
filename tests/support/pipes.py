"""The pipes of a process that was started with `subprocess.PIPE`; the attributes of Popen may also be None."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, AnyStr

if TYPE_CHECKING:
    import subprocess


def stdin(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stdin is not None
    return process.stdin


def stdout(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stdout is not None
    return process.stdout


def stderr(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stderr is not None
    return process.stderr
