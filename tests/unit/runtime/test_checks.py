"""Checks of a process on a machine that is too busy to start threads in time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

from covey.runtime import checks

if TYPE_CHECKING:
    import pytest


class Starved(threading.Thread):
    """A thread of a check that never gets the processor."""

    def start(self) -> None:
        """Do not run."""

    def join(self, timeout: float | None = None) -> None:
        """Do not wait."""

    def is_alive(self) -> bool:
        return True


def test_what_covey_itself_knows_does_not_depend_on_when_a_thread_gets_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "READINESS_CHECK_SECONDS", 0.01)
    # Threads of covey that other tests have left still start, so only the checks' own are starved.
    monkeypatch.setattr(checks, "threading", SimpleNamespace(Thread=Starved, Lock=threading.Lock))
    monkeypatch.setattr(checks, "is_shutting_down", lambda: True)
    monkeypatch.setattr(checks, "_added", {})  # programs of other tests, which ran in this process, may have added some
    checks.add("mine", lambda: True)
    own, mine = checks.are_ready()
    assert (own.name, own.is_ok, own.reason) == ("joined", False, "this process is shutting down")
    assert (mine.name, mine.reason) == ("mine", "it has not returned within 0.01 s")
