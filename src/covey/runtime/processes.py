"""Child processes: how they die with their parent, get signals as groups, end, and have their output read.

Used by everything that starts processes: `covey run`, `launch`, `bench`, `demo` and `chaos`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import sys
import time
from typing import IO, TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

DRAIN_READS: Final = 64
"""Reads that empty a pipe. A descendant that escaped may hold it open, and write to it for ever."""
TAIL_BYTES: Final = 4000
"""How much of the end of a process's output an `OutputTail` keeps."""
POLL_SECONDS: Final = 0.01


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


# Starting and ending


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent`, which started it, dies; only Linux can."""
    if (lib := libc()) is not None:
        lib.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library, loaded once: little is safe between fork and exec."""
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def signal_group(pid: int, signum: int, *, reaped: bool) -> bool:
    """Send `signum` (0 only checks) to the process group that child `pid` leads; False if the group is empty."""
    # While a group has members, the kernel reuses its number for no process. So if the child was reaped and there is a
    # process with its number, that process is not a child, and the group is empty.
    if reaped and _exists(pid):
        return False
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def terminate(send: Callable[[int], None], is_any_left: Callable[[], bool], grace: float) -> None:
    """End processes: `send` SIGTERM, and SIGKILL after `grace` seconds, or sooner if none is left. Reaps none."""
    try:
        send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while is_any_left() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    finally:  # also when Ctrl-C cuts the grace short
        send(signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def describe_end(code: int) -> str:
    """Say how a process failed; `code` is its exit code, or the negative number of a signal."""
    return f"failed with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def exit_status(code: int) -> int:
    """Return the status that a shell reports for a process that ended with `code`."""
    return code if code >= 0 else 128 - code


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Output


def register_output(
    process: Process, selector: selectors.BaseSelector, data: Callable[[IO[bytes], int], object]
) -> list[IO[bytes]]:
    """Make the output pipes of a process non-blocking and register them; return them.

    `data` gets a pipe and its number, 1 or 2, and returns what the selector should hold for it.
    """
    pipes = []
    for target, pipe in ((1, process.stdout), (2, process.stderr)):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ, data(pipe, target))
        pipes.append(pipe)
    return pipes


def drain(read: Callable[[], bool]) -> bool:
    """Call `read` for what an ended process left in a pipe; True if it returned False, at the end of the pipe."""
    with contextlib.suppress(BlockingIOError):
        return any(not read() for _ in range(DRAIN_READS))
    return False


def close_pipes(process: Process) -> None:
    """Close this end of the pipes to a process."""
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):  # input that the process never read
            pipe.close()


class OutputTail:
    """The end of what a process wrote, for the error message if it fails."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        """Append output."""
        self._data = (self._data + data)[-TAIL_BYTES:]

    def quote(self) -> str:
        """Return the text to put behind an error message; "" if nothing was written."""
        text = self._data.decode(errors="replace").strip()
        return f"; its last output:\n{text}" if text else ""
