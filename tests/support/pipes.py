"""The pipes of a process that was started with `subprocess.PIPE`; the attributes of Popen may also be None."""

from __future__ import annotations

import json
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


def reports(processes: Iterable[subprocess.Popen[str]], within: float) -> list[Any]:
    """Wait until processes end well; return the value that each has written as JSON."""
    values = []
    for process in processes:
        out, err = process.communicate(timeout=within)
        assert process.returncode == 0, err
        values.append(json.loads(out))
    return values
