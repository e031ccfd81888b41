"""COVEY_EVENTS: what happened to a run, a line each, in a file that processes share."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.runtime.checks import Check
from covey.runtime.events import Event, Events

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_EVENTS", str(tmp_path / "events"))
    return tmp_path / "events"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recover(events: Events, view: int, *phases: str) -> None:
    events.phase("detect")
    events.phase("freeze")
    events.phase("agree")
    events.add(Event("lost", 1.5, 0, view, (1,), ("rank 1",)))
    for phase in phases:
        events.phase(phase)


def test_two_processes_of_a_run_append_to_one_file(path: Path) -> None:
    one, other = Events(), Events()
    one.add(Event("generation", 1.0, 0, 0))
    other.add(Event("joined", 2.0, 1, 0, (2,), ("laptop",)))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [(line["pid"], line["kind"], line["ranks"]) for line in lines(path)] == [
        (os.getpid(), "generation", []),
        (os.getpid(), "joined", [2]),
    ]


def test_a_recovery_is_written_with_all_its_phases_once_operations_go_on(path: Path) -> None:
    events = Events()
    recover(events, 1, "reconnect")
    assert lines(path) == []
    events.phase("redo")
    assert list(lines(path)[0]["phases"]) == ["detect", "freeze", "agree", "reconnect", "redo"]


def test_a_recovery_that_another_one_overtakes_is_written_too(path: Path) -> None:
    events = Events()
    recover(events, 1)
    recover(events, 2, "redo")
    assert [(line["view"], "redo" in line["phases"]) for line in lines(path)] == [(1, False), (2, True)]


def test_late_signs_of_a_loss_neither_cut_its_timeline_short_nor_begin_the_next(path: Path) -> None:
    events = Events()
    recover(events, 1)
    events.phase("detect")
    events.phase("redo")
    phases = lines(path)[0]["phases"]
    assert list(phases) == ["detect", "freeze", "agree", "reconnect", "redo"]
    assert phases["reconnect"] == phases["agree"]  # a lane came before the view did
    events.phase("detect")  # the link of one that leaves in good order, which no view follows
    events.add(Event("generation", 2.0, 1, 0))
    events.phase("freeze")
    events.add(Event("view", 3.0, 1, 1))
    events.phase("redo")
    assert lines(path)[-1]["phases"]["freeze"] == 0.0


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_EVENTS", str(tmp_path / "nowhere" / "events"))
    with pytest.raises(ConfigError, match=r"COVEY_EVENTS=.*nowhere"):
        Events()


def test_listeners_have_heard_everything_when_the_run_is_left(path: Path) -> None:
    events, heard = Events(), list[Event]()

    def listen(event: Event) -> None:
        time.sleep(0.05)
        heard.append(event)

    events.listen(listen)
    told = [Event("lost", 1.5, 0, number, (number,), ("a host",)) for number in range(3)]
    for event in told:
        events.add(event)
    events.close()
    assert heard == told


def test_a_listener_or_a_check_that_exits_keeps_no_other_from_being_called(path: Path) -> None:
    events, heard = Events(), list[Event]()

    def leave(*_: object) -> None:
        raise SystemExit

    events.listen(leave)
    events.listen(heard.append)
    for number in range(3):
        events.add(Event("leader", time.time(), 0, number))
    events.close()
    assert len(heard) == 3
    check = Check("leaves", leave)
    for _ in range(2):
        check.start()
        assert check.reason(time.monotonic() + DEADLINE) == "SystemExit"
