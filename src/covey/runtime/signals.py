"""Handlers for signals that the program does not handle itself."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def handle(signum: int, handler: Callable[[int, object], None]) -> None:
    """Call `handler` for a signal, unless the program handles or ignores that signal itself.

    Python can set signal handlers on its main thread only; on other threads this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _signal.getsignal(signum) == _signal.SIG_DFL and not _is_caught(signum):
        _signal.signal(signum, handler)


def _is_caught(signum: int) -> bool:
    """Tell whether the process has a handler that Python does not know, such as that of `faulthandler.register`."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        with open("/proc/self/status") as file:
            status = file.read().splitlines()
        caught = next(line for line in status if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) & 1 << (signum - 1))
    return False
