"""What a program reports: rows, steps, functions, limits, and how long a report takes."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.numbers import REPORT_NAMES, REPORT_ROWS, Seat
from covey.runtime.counters import GroupCounters, process
from covey.runtime.events import Events
from covey.runtime.report_log import ReportLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from covey.wire.progress import ReportRow


@pytest.fixture
def log() -> Iterator[ReportLog]:
    made = ReportLog()
    yield made
    made.close()


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[ReportRow] = []
        self.is_closed = False

    def write(self, rows: Sequence[ReportRow]) -> None:
        self.rows += rows

    def close(self) -> None:
        self.is_closed = True


def steps(log: ReportLog) -> list[tuple[int | None, dict[str, float]]]:
    return [(row.step, row.values) for row in log.rows()]


def test_values_of_one_step_are_one_row_and_a_repeated_value_replaces_the_first(log: ReportLog) -> None:
    log.add(1, {"loss": 4.0})
    log.add(1, {"samples": 32})
    log.add(None, {"rate": 0.1})
    log.add(1, {"loss": 3.0})
    log.add(2, {"loss": 2.0})
    assert steps(log) == [(1, {"loss": 3.0, "samples": 32.0, "rate": 0.1}), (2, {"loss": 2.0})]
    latest = log.latest()
    assert latest is not None
    assert (latest.step, latest.values) == (2, {"loss": 2.0, "samples": 32.0, "rate": 0.1})
    assert log.count == 5


def test_a_program_that_goes_back_replaces_what_came_after(log: ReportLog) -> None:
    for step in range(6):
        log.add(step, {"loss": float(step)})
    log.add(3, {"loss": 30.0})
    log.add(4, {"loss": 40.0})
    assert [(step, values["loss"]) for step, values in steps(log)] == [(0, 0), (1, 1), (2, 2), (3, 30.0), (4, 40.0)]


def test_reports_without_steps_are_rows_by_time(log: ReportLog) -> None:
    for loss in (3.0, 2.0):
        log.add(None, {"loss": loss})
    assert [(row.step, row.values, row.compute) for row in log.rows()] == [
        (None, {"loss": 3.0}, -1.0),
        (None, {"loss": 2.0}, -1.0),
    ]


def test_a_long_run_keeps_its_first_and_its_last_rows_in_bounded_memory(log: ReportLog) -> None:
    for step in range(5 * REPORT_ROWS):
        log.add(step, {"loss": float(step)})
    told = [step for step, _ in steps(log) if step is not None]
    assert len(told) <= REPORT_ROWS
    assert told[0] == 0
    assert told[-REPORT_ROWS // 2 :] == list(range(5 * REPORT_ROWS - REPORT_ROWS // 2, 5 * REPORT_ROWS))
    assert told == sorted(told)


def test_a_step_has_the_time_in_operations_and_the_time_outside(log: ReportLog, monkeypatch: Any) -> None:
    now, spent = [10**9], [0]
    monkeypatch.setattr("covey.runtime.report_log.clock_ns", lambda: now[0])
    monkeypatch.setattr(process, "spent_ns", lambda: spent[0])
    for step in range(3):
        log.add(step, {})
        now[0] += 400_000_000
        spent[0] += 100_000_000 * (step + 1)
    told = [(row.step, round(row.compute, 6), round(row.sync, 6)) for row in log.rows()]
    assert told == [(0, -1.0, -1.0), (1, 0.3, 0.1), (2, 0.2, 0.2)]


@pytest.mark.parametrize("is_native", [True, False])
def test_the_time_in_operations_counts_groups_that_are_over_and_the_one_in_progress(is_native: bool) -> None:
    before = process.spent_ns()
    over, open_ = (GroupCounters(name, 0, (Seat(0), Seat(1)), is_native=is_native) for name in ("over", "open"))
    for group in (over, open_):
        process.register(group)
    over.recorder.begin(1, 0)
    time.sleep(0.002)
    over.recorder.end(0, False)
    over.is_over = True
    assert over.recorder.progress().ended_ns > over.recorder.progress().begun_ns
    process.sweep()
    first = process.spent_ns() - before
    assert first >= 2_000_000
    open_.recorder.begin(5, 10)
    progress = open_.recorder.progress()
    assert (progress.sequence, progress.operation, progress.ended_ns) == (5, 10, 0)
    time.sleep(0.002)
    assert process.spent_ns() - before >= first + 2_000_000
    open_.recorder.end(0, True)
    last = process.spent_ns()
    assert process.spent_ns() == last, "nothing runs"
    open_.is_over = True
    process.sweep()
    assert process.spent_ns() == last


def test_numbers_of_other_libraries_are_read_at_once(log: ReportLog) -> None:
    array = np.array([1.5], np.float32)
    step: Any = np.int64(3)
    log.add(step, {"loss": array[0], "one": np.array(2), "flag": True})
    array[0] = 9.0
    assert steps(log) == [(3, {"loss": 1.5, "one": 2.0, "flag": 1.0})]


def test_a_function_is_called_on_another_thread_and_only_the_last_one_of_a_name() -> None:
    called: list[tuple[int, str]] = []
    log = ReportLog()

    def value(number: int) -> float:
        called.append((number, threading.current_thread().name))
        return float(number)

    for number in range(100):
        log.add(number, {"loss": lambda number=number: value(number)})
    deadline = time.monotonic() + DEADLINE
    while not called:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.close()
    assert called[-1][0] == 99
    assert {name for _, name in called} == {"covey-reports"}
    assert len(called) <= 3, "it is evaluated once a second"
    latest = log.latest()
    assert latest is not None
    assert latest.values == {"loss": 99.0}


def test_a_function_that_fails_is_logged_and_others_are_read(caplog: pytest.LogCaptureFixture) -> None:
    log = ReportLog()
    with caplog.at_level(logging.WARNING, "covey"):
        log.add(1, {"bad": lambda: 1 / 0, "good": lambda: 2})
        log.close()
    assert "'bad' could not be read: ZeroDivisionError" in caplog.text
    assert steps(log) == [(1, {"good": 2.0})]


def test_a_loss_that_becomes_nan_is_an_event_once_and_again_when_it_is_finite() -> None:
    events = Events()
    log = ReportLog(events)
    for step, loss in enumerate((1.0, math.nan, math.nan, 2.0, math.inf)):
        log.add(step, {"loss": loss})
    log.close()
    assert [(event.kind, event.text) for event in events.all()] == [
        ("report", "loss is nan at step 1"),
        ("report", "loss is finite again at step 3"),
        ("report", "loss is inf at step 4"),
    ]
    assert math.isnan(log.rows()[1].values["loss"])


@pytest.mark.parametrize("name", ["", "x" * 41, "tab\t", "naïve"])
def test_a_name_that_cannot_be_shown_is_an_error_at_once(log: ReportLog, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be reported"):
        log.add(1, {name: 1.0})
    assert log.rows() == []


def test_one_name_too_many_is_an_error_that_names_it(log: ReportLog) -> None:
    log.add(1, {f"name{number}": 1.0 for number in range(REPORT_NAMES)})
    with pytest.raises(ValueError, match=r"more cannot be reported: a program may report 32 names, and has 32"):
        log.add(1, {"more": 1.0})
    log.add(2, {"name0": 2.0})


@pytest.mark.parametrize("value", ["high", None, np.zeros(2), [1.0]])
def test_what_is_no_number_is_an_error_that_names_it(log: ReportLog, value: Any) -> None:
    with pytest.raises(TypeError, match="loss cannot be reported"):
        log.add(1, {"loss": value})
    with pytest.raises(TypeError, match="step must be a whole number"):
        log.add(1.5, {})  # type: ignore[arg-type]


def test_what_libraries_report_gives_way_to_the_program(log: ReportLog) -> None:
    log.add_for_program(1, {"loss": 3.0, "text": "epoch one", "x" * 50: 1.0})
    assert steps(log) == [(1, {"loss": 3.0})]
    log.add(100, {"loss": 2.0})
    log.add_for_program(2, {"loss": 1.0})
    assert [step for step, _ in steps(log)] == [1, 100]


def test_what_libraries_report_too_much_of_is_left_out(log: ReportLog) -> None:
    log.add_for_program(1, {f"name{number}": 1.0 for number in range(100)})
    assert len(log.rows()[0].values) == REPORT_NAMES


def test_a_sink_gets_every_row_once_when_it_is_complete_and_the_last_at_the_end() -> None:
    kept = Kept()
    log = ReportLog(None, [kept])
    for step in range(3):
        log.add(step, {"loss": 1.0})
        log.add(step, {"rate": 2.0})
    log.close()
    log.close()
    assert [(row.step, row.values) for row in kept.rows] == [(step, {"loss": 1.0, "rate": 2.0}) for step in range(3)]
    assert kept.is_closed


def test_threads_report_together_and_nothing_is_lost(log: ReportLog) -> None:
    def report(name: str) -> None:
        for number in range(500):
            log.add(None, {name: float(number)})

    threads = [threading.Thread(target=report, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.count == 1500
    assert sorted(value for row in log.rows() for value in row.values.values())[-3:] == [499.0] * 3


def test_a_report_takes_less_than_a_microsecond_of_a_quiet_processor() -> None:
    """The best of many short rounds: other programs may have the processor in the others."""
    log = ReportLog()
    best = math.inf
    for _ in range(200):
        began = time.perf_counter_ns()
        for step in range(100):
            log.add(step, {"loss": 1.5, "samples": 32.0})
        best = min(best, (time.perf_counter_ns() - began) / 100)
    log.close()
    assert best < 2000, "twice and more of what a slow machine needs"
