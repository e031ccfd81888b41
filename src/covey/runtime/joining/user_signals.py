"""SIGUSR1 writes the last operations of the process to a file; SIGUSR2 requests a checkpoint of its run."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` takes ten times as long: it turns numbers into enums
import threading

from covey.runtime import loop as control
from covey.runtime.signals import handle


def handle_user_signals() -> None:
    """Act on SIGUSR1 and SIGUSR2, unless the program handles them itself."""
    handle(_signal.SIGUSR1, _write)
    handle(_signal.SIGUSR2, _request)


# The thread that was interrupted may hold any lock, so the control loop does the rest.


def _write(_signum: int, _frame: object) -> None:
    control.soon(_start_writing)


def _start_writing() -> None:
    from covey.runtime.metrics.flight import write_all  # most processes never get the signal

    threading.Thread(target=write_all, name="covey-trace", daemon=True).start()


def _request(_signum: int, _frame: object) -> None:
    control.soon(_request_all)


def _request_all() -> None:
    from covey.runtime.state.checkpoints import request_all

    request_all()
