"""Samples that are pushed: every few seconds, never two calls at a time, and errors are logged once."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest

import covey.metrics
from covey import ConfigError
from covey.runtime.counters import process

if TYPE_CHECKING:
    from covey.metrics import Sample

LIMIT = 250


def test_samples_come_again_and_again_and_once_more_at_the_end() -> None:
    pushed: queue.Queue[list[Sample]] = queue.Queue()
    with covey.metrics.push(pushed.put, every=0.1) as push:
        first = pushed.get(timeout=LIMIT)
        pushed.get(timeout=LIMIT)
        process.calls_made += 1
        before = next(each.value for each in first if each.name == "covey_calls_total")
    rest = [pushed.get_nowait() for _ in range(pushed.qsize())]
    assert next(each.value for each in rest[-1] if each.name == "covey_calls_total") == before + 1
    push.close()
    assert pushed.empty()


def test_a_call_that_takes_long_is_not_joined_by_another_and_nothing_is_queued() -> None:
    go, running, most, calls = threading.Event(), [0], [0], [0]
    entered = threading.Event()

    def slow(found: list[Sample]) -> None:
        running[0] += 1
        calls[0] += 1
        most[0] = max(most[0], running[0])
        entered.set()
        assert go.wait(LIMIT)
        running[0] -= 1

    push = covey.metrics.push(slow, every=0.1)
    assert entered.wait(LIMIT)
    assert not go.wait(0.5)
    assert calls == [1]
    push._closing.set()
    go.set()
    push.close()
    assert (most, calls) == ([1], [2])


def test_an_error_is_logged_once_until_a_call_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "covey")
    turns = iter([OSError("no route"), OSError("no route"), None, OSError("no route"), None])
    done = threading.Event()

    def push_away(_: list[Sample]) -> None:
        error = next(turns, "end")
        if error == "end":
            done.set()
        elif error is not None:
            raise error  # type: ignore[misc]

    with covey.metrics.push(push_away, every=0.1):
        assert done.wait(LIMIT)
    told = [record.message.partition(";")[0] for record in caplog.records]
    assert told == ["metrics cannot be pushed", "metrics are pushed again"] * 2


@pytest.mark.parametrize(("function", "every"), [(None, 1.0), (print, 0.0), (print, float("nan"))])
def test_what_cannot_be_pushed_is_refused(function: Any, every: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        covey.metrics.push(function, every)
