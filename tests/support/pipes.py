"""The pipes of a process that was started with `subprocess.PIPE`; the attributes of Popen may also be None."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import termios
from typing import IO, TYPE_CHECKING, Any, AnyStr

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable


def stdin(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stdin is not None
    return process.stdin


def stdout(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stdout is not None
    return process.stdout


def stderr(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    assert process.stderr is not None
    return process.stderr


def read_until(source: IO[str], text: str) -> str:
    """Read lines until one has a text in it; return all of them."""
    read = ""
    while text not in read:
        line = source.readline()
        assert line, f"ended before {text!r}:\n{read}"
        read += line
    return read


def sit_down() -> None:
    """Before a program is executed: make the terminal that is its standard input the one that Ctrl-C comes from."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may ignore it


def reports(processes: Iterable[subprocess.Popen[str]], within: float) -> list[Any]:
    """Wait until processes end well; return the value that each has written as JSON."""
    values = []
    for process in processes:
        out, err = process.communicate(timeout=within)
        assert process.returncode == 0, err
        values.append(json.loads(out))
    return values
