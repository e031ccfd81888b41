"""Checks of a process on a machine that is too busy to start threads in time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from covey.runtime import checks

if TYPE_CHECKING:
    import pytest


def test_what_covey_itself_knows_does_not_depend_on_when_a_thread_gets_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(threading.Thread, "start", lambda _thread: None)  # it never gets the processor
    monkeypatch.setattr(threading.Thread, "join", lambda _thread, _timeout: None)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _thread: True)
    monkeypatch.setattr(checks, "is_shutting_down", lambda: True)
    checks.add("mine", lambda: True)
    try:
        own, mine = checks.are_ready()
    finally:
        checks.remove("mine")
    assert (own.name, own.is_ok, own.reason) == ("joined", False, "this process is shutting down")
    assert (mine.name, mine.reason) == ("mine", "it has not returned within 0.01 s")
