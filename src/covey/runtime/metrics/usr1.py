"""SIGUSR1 writes the last operations of the process to a file."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

from covey.runtime import loop as control


def write_on_signal() -> None:
    """Write a file whenever the process gets SIGUSR1, unless the program handles that signal itself.

    Python can set signal handlers on its main thread only; on other threads this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not _is_caught(signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, _signalled)


def _is_caught(signum: int) -> bool:
    """Tell whether the process has a handler that Python does not know, such as that of `faulthandler.register`."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text().splitlines()
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) & 1 << (signum - 1))
    return False


def _signalled(_signum: int, _frame: object) -> None:
    control.soon(_start_writing)  # the thread that was interrupted may hold any lock


def _start_writing() -> None:
    from covey.runtime.metrics.flight import write_all  # most processes never get the signal

    threading.Thread(target=write_all, name="covey-trace", daemon=True).start()
