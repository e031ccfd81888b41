"""Checks of this process: whether it is alive, and ready to work. Orchestrators ask for them over HTTP.

A check is a function of the program, so it may hang: each runs on a thread of its own, once at a time, and one that
takes too long counts as failed until it returns. What covey itself knows is read at once, however busy the machine is.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.base.text import printable, spell_error
from covey.runtime import loop as control
from covey.runtime.counters import process
from covey.runtime.shutdown import is_shutting_down

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.reports import CheckResult

READINESS_CHECK_SECONDS: Final = 2.0
"""How long a check may take."""
CHECKS_LIMIT: Final = 32
"""Checks that a program may add."""


class Check:
    """One check, and its last result."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name, self._function = name, function
        self._lock = threading.Lock()
        self._running: threading.Thread | None = None
        self._reason: str | None = None
        """Why the last one failed; None if it did not."""

    def start(self) -> None:
        """Begin, unless the last one still runs."""
        with self._lock:
            if self._running is None:
                self._running = threading.Thread(target=self._run, name="covey-check", daemon=True)
                self._running.start()

    def reason(self, until: float) -> str | None:
        """Return why the check failed, None if it did not; wait until a moment for a check that runs."""
        running = self._running
        if running is not None:
            running.join(max(0.0, until - time.monotonic()))
            if running.is_alive():
                return f"it has not returned within {READINESS_CHECK_SECONDS:g} s"
        return self._reason

    def _run(self) -> None:
        try:
            found = self._function()
            reason = None if found is None or found is True else "it returned False" if found is False else str(found)
        except BaseException as error:  # SystemExit, too: a check that was left running would never run again
            reason = spell_error(error)
        self._reason = reason
        with self._lock:
            self._running = None


class OwnCheck(Check):
    """A check of covey's own that waits for nothing: it runs on the calling thread, and is never late."""

    def start(self) -> None:
        """Do nothing: `reason` finds out."""

    def reason(self, until: float) -> str | None:
        """Return why the check failed, None if it did not."""
        self._run()
        return self._reason


_added: dict[str, Check] = {}


def add(name: str, function: Callable[[], Any]) -> None:
    """Let this process be ready only while `function` returns None or True; one of the same name is replaced.

    Raises:
        ConfigError: the name cannot be shown, is one of covey's own, or there are too many.
    """
    if not (0 < len(name) <= 100 and name.isascii() and name.isprintable()):
        raise ConfigError(f"the name of a check must be 1 to 100 printable ASCII characters, not {name[:50]!r}")
    if name in (each.name for each in (*READY, *ALIVE)):
        raise ConfigError(f"{name!r} is a check of covey's own; choose another name")
    if name not in _added and len(_added) >= CHECKS_LIMIT:
        raise ConfigError(f"there are {CHECKS_LIMIT} checks already; remove some, or put several into one")
    _added[name] = Check(name, function)


def remove(name: str) -> None:
    """Take a check away; one that does not exist is fine."""
    _added.pop(name, None)


def are_ready() -> list[CheckResult]:
    """Run all checks that say whether this process is ready to work. Not on the control loop."""
    return _results([*READY, *list(_added.values())])


def are_alive() -> list[CheckResult]:
    """Run the checks that say whether this process should be started anew. Not on the control loop."""
    return _results(ALIVE)


def _results(checks: list[Check]) -> list[CheckResult]:
    from covey.wire.reports import CheckResult

    for check in checks:
        check.start()
    until = time.monotonic() + READINESS_CHECK_SECONDS
    reasons = [(check.name, check.reason(until)) for check in checks]
    return [CheckResult(name, reason is None, printable(reason or "")) for name, reason in reasons]


def _is_joined() -> str | None:
    """Return why this process is not in a run, if it is not."""
    if is_shutting_down():
        return "this process is shutting down"
    nodes = [node for node in list(process.nodes) if not node.is_closing]
    if not process.groups() and all(node.generation is None for node in nodes):  # it may be about to join
        return "this process is in no run"
    for node in nodes:
        generation = node.generation
        if generation is None:
            continue
        if generation.fault is not None:
            return str(generation.fault.text)
        if not generation.founded.is_kept and not node.generation_table.hears_quorum:
            return "fewer members are heard than the run needs to continue"
    faults = [group.fault for group in process.groups()]  # a group may have failed, and another taken its place
    return faults[-1] if faults and all(faults) else None


def _is_responsive() -> str | None:
    """Return why the control loop does not work, if it does not."""
    turned = threading.Event()
    control.soon(turned.set)
    return None if turned.wait(READINESS_CHECK_SECONDS) else "the control loop does not answer"


READY: Final[list[Check]] = [OwnCheck("joined", _is_joined)]
ALIVE: Final = [Check("control-loop", _is_responsive)]
