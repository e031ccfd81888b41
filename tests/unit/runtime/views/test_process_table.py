"""The process table by a clock of our own; `tests/io/test_keeper_service.py` has processes that stop and die."""

from __future__ import annotations

import os
import subprocess

import pytest
from tests.support.waiting import DEADLINE

from covey.proto.health import STOPPED_SILENCE, ProcessState
from covey.runtime.views import process_table as process_table_module
from covey.runtime.views.process_table import (
    LOOK_CLOSELY_EVERY,
    PROCESSES_EVERY,
    PROCESSES_LIMIT,
    REMEMBERED_SECONDS,
    ProcessStatus,
    ProcessTable,
)
from covey.wire.messages import Card, Contact


def card(number: int, pid: int | None = None) -> Card:
    """Return the card of a life of this process, or of another."""
    return Card(
        b"", number.to_bytes(16, "big"), "wren", "wren", os.getpid() if pid is None else pid, Contact("", (), "")
    )


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has been."""
    process = subprocess.Popen(["true"])
    process.wait(DEADLINE)
    return process.pid


def test_this_very_process_is_busy_and_one_that_has_been_is_not(gone: int) -> None:
    process_table = ProcessTable()
    for number, pid in enumerate([os.getpid(), gone, 0, -1, 1 << 40]):
        process_table.watch(card(number, pid), 10.0)
    assert dict(process_table.vouch().processes) == {
        card(0).life: ProcessState.BUSY,
        **{card(number).life: ProcessState.EXITED for number in range(1, 5)},
    }


def test_a_process_that_got_the_number_of_another_is_not_taken_for_it() -> None:
    status = ProcessStatus(card(1).life, card(1).pid, 0.0)
    status._began = b"0"  # this process did not begin when the machine did
    assert status.look(1.0)
    assert status.state is ProcessState.EXITED


def test_a_process_is_lost_at_once_when_it_exited_and_after_a_moment_when_it_is_stopped(gone: int) -> None:
    assert ProcessStatus(card(1, gone).life, card(1, gone).pid, 5.0).is_lost(5.0)
    status = ProcessStatus(card(2).life, card(2).pid, 5.0)
    assert not status.is_lost(1e9)
    status.state = ProcessState.STOPPED
    assert not status.is_lost(5.0 + STOPPED_SILENCE - 0.01)
    assert status.is_lost(5.0 + STOPPED_SILENCE)
    assert status.look(6.0)  # this process runs, or it could not look
    assert (status.state, status.changed_at) == (ProcessState.BUSY, 6.0)


def test_a_process_that_exited_is_told_of_for_a_while_and_then_forgotten(gone: int) -> None:
    process_table = ProcessTable()
    process_table.watch(card(1), 0.0)
    process_table.watch(card(2, gone), 0.0)
    assert not process_table.look(REMEMBERED_SECONDS)
    assert len(process_table.vouch().processes) == 2
    process_table.look(REMEMBERED_SECONDS + 0.1)
    assert process_table.vouch().processes == ((card(1).life, ProcessState.BUSY),)
    assert process_table.get(card(2).life) is None


def test_of_too_many_the_living_are_told_first_and_then_the_latest(gone: int) -> None:
    process_table = ProcessTable()
    for number in range(PROCESSES_LIMIT + 50):
        process_table.watch(card(number, gone), float(number))
    for number in range(10_000, 10_000 + PROCESSES_LIMIT - 2):
        assert not process_table.is_full()
        process_table.watch(card(number), 5.0)
    told = process_table.vouch().processes
    assert len(told) == PROCESSES_LIMIT
    assert {state for _, state in told[:-2]} == {ProcessState.BUSY}
    assert told[-2:] == tuple(
        (card(number, gone).life, ProcessState.EXITED) for number in (PROCESSES_LIMIT + 49, PROCESSES_LIMIT + 48)
    )
    for number in range(20_000, 20_002):
        process_table.watch(card(number), 6.0)
    assert process_table.is_full()
    assert process_table.get(card(0).life) is None  # of the dead, no more are remembered than could be told


def test_a_process_whose_link_ended_is_looked_at_more_often_for_a_moment() -> None:
    process_table = ProcessTable()
    status = process_table.watch(card(1), 0.0)
    assert process_table.look_again_in(0.0) == PROCESSES_EVERY
    process_table.watch_closely(status, 0.0)
    assert process_table.look_again_in(0.9) == LOOK_CLOSELY_EVERY
    assert process_table.look_again_in(1.1) == PROCESSES_EVERY


def test_a_process_is_not_taken_to_be_dead_because_the_kernel_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor left nothing can be read about any process."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    known = ProcessStatus(b"life", os.getpid(), 0.0)
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", refuse)
        patched.setattr(os, "kill", refuse)
        late = ProcessStatus(b"late", os.getpid(), 0.0)
        for status in (known, late):
            assert status.look(1.0) is False
            assert status.state is ProcessState.BUSY
    for status in (known, late):
        assert status.look(2.0) is False
        assert status.state is ProcessState.BUSY


def test_a_process_that_ended_while_the_kernel_could_not_be_asked_is_noticed_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_table_module, "_state", lambda _pid: None)
    status = ProcessStatus(b"life", 1, 0.0)
    states = [status.state]
    monkeypatch.setattr(process_table_module, "_state", lambda _pid: ("", None))
    assert status.look(1.0) is True
    assert [*states, status.state] == [ProcessState.BUSY, ProcessState.EXITED]


def test_time_in_which_the_keeper_stood_still_too_is_not_time_that_a_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_table = ProcessTable()
    status = process_table.watch(card(1), 10.0)
    process_table.look(10.0)
    monkeypatch.setattr(process_table_module, "_state", lambda _pid: ("T", status._began))
    process_table.look(10.1)
    assert status.state is ProcessState.STOPPED
    process_table.look(70.1)
    assert not status.is_lost(70.1), "the keeper was stopped for a minute as well"
    process_table.look(70.2)
    assert status.is_lost(70.2 + STOPPED_SILENCE)
