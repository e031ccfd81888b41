"""The guard against tests that hang: after ten minutes a test fails, and the stacks of all its processes are printed.

No test should depend on this limit: see `tests.support.waiting`. The process of the test watches the clock itself. With
`--workers`, the process that deals the tests out watches it as well, and waits a little longer: it kills a worker whose
test could not fail by itself, because its process runs no Python code any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.waiting import HANG

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

DUMP_SECONDS: Final = 20
"""How long py-spy may take for one process."""
MOST_DUMPED: Final = 40


class Guard:
    """Fails the test that runs in this process when it takes too long."""

    def __init__(self, seconds: float = HANG) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self._hangs)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _hangs(self, _number: int, _frame: FrameType | None) -> None:
        os.write(2, stacks_below(os.getpid()).encode())
        pytest.fail(f"hangs: not done after {self._seconds:g} s; the stacks of its processes are in its output")


def stacks_below(root: int) -> str:
    """Return the stacks of a process and of those that descend from it."""
    pids = descendants(root)
    told = [f"stacks of {len(pids)} processes"] + [_stacks(pid) for pid in pids[:MOST_DUMPED]]
    return "\n\n".join(told) + "\n"


def descendants(root: int) -> list[int]:
    """Return a process and those that descend from it, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children[int(entry.read_text().rpartition(")")[2].split()[1])].append(int(entry.parent.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def _stacks(pid: int) -> str:
    spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or "py-spy"
    try:
        ended = subprocess.run(
            [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DUMP_SECONDS, check=False
        )
        told = ended.stdout or ended.stderr
    except (OSError, subprocess.SubprocessError) as error:
        told = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        told = f"{told.rstrip()}\nstate {state}: {words[:300]}"
    return f"process {pid}\n{told}" if sys.platform == "linux" else f"process {pid}"
