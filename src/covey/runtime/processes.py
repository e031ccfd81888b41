"""Child processes: their groups, what they are called when a signal ends them, and that they die with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Process(Protocol):
    """A process that a keeper started: `subprocess.Popen`, or a fork of the template process."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    @property
    def stderr(self) -> IO[bytes] | None: ...

    @property
    def poll(self) -> Callable[[], int | None]: ...

    @property
    def wait(self) -> Callable[[], int]: ...


def signal_group(pid: int, signum: int, *, reaped: bool) -> bool:
    """Send `signum` (0 only asks) to the process group that child `pid` leads; False when there is nobody in it."""
    # While a group has members the kernel gives its number to nobody else. So when our child was reaped and there is
    # a process with its number, that is a stranger, and the group is empty.
    if reaped and _exists(pid):
        return False
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, dies; only Linux can."""
    if (lib := libc()) is not None:
        lib.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library, loaded once: little is safe between fork and exec."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def close_pipes(process: Process) -> None:
    """Close this end of the pipes to a process."""
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):  # input that the rank never took
            pipe.close()


def signal_name(number: int) -> str:
    """Return what people call a signal."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
