"""Many operations of every kind in one process hold no more at the end than at the beginning."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support import forked

from covey.lab import soak


@pytest.mark.thorough
def test_three_thousand_operations_are_right_and_leave_nothing_behind() -> None:
    held = soak.Soak(3_000, seed=random.randrange(1 << 30)).run()
    assert [each.operations for each in held] == [150 * part for part in range(1, 21)]


PEAKS = """
import json, sys
from covey.lab.soak import Peaks
first, others, *names = json.loads(sys.argv[1])
print(json.dumps(Peaks(first, others).run(names)))
"""
LARGE = ["all_reduce", "all_reduce, compressed", "all_to_all", "sendrecv", "send, urgent", "call, urgent", "stream"]
"""Kinds that copy what they send, each in its own way."""


@pytest.mark.alone
@pytest.mark.parametrize(
    ("first", "others", "names"), [(20, 30, LARGE), pytest.param(50, 950, [], marks=pytest.mark.thorough)]
)
def test_operations_of_a_kind_take_no_more_memory_later_than_at_first(
    first: int, others: int, names: list[str]
) -> None:
    command = [sys.executable, "-c", PEAKS, json.dumps([first, others, *names])]
    seen = json.loads(forked.run(command, capture_output=True, text=True, check=True, timeout=3600).stdout)
    assert len(seen) == len(names) or not names
    grown = {name: peaks for name, peaks in seen.items() if peaks[1] > 1.1 * peaks[0]}
    assert not grown, grown


def test_a_wrong_sum_is_an_error() -> None:
    class Wrong:
        rank, size = 0, 2

        def all_reduce(self, x: Any, **_: Any) -> Any:
            return x

    course = soak.Course(cast("Any", Wrong()))
    with pytest.raises(AssertionError, match="expected"):
        course.perform("all_reduce", 1, 5, 0)


def test_what_grows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    course = soak.Soak(100)
    for resident in (200 << 20, 201 << 20, 240 << 20):
        monkeypatch.setattr(soak, "resident_bytes", lambda resident=resident: resident)
        course._look(50)
    monkeypatch.setattr(soak, "resident_bytes", lambda: 300 << 20)
    with pytest.raises(AssertionError, match="memory grew"):
        course._look(50)
    monkeypatch.setattr(soak, "resident_bytes", lambda: 201 << 20)
    monkeypatch.setattr(soak, "threading", SimpleNamespace(active_count=lambda: 10_000))
    with pytest.raises(AssertionError, match="threads are left"):
        course._look(50)
