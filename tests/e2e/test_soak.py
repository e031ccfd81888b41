"""Many operations of every kind in one process hold no more at the end than at the beginning."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.lab import soak


@pytest.mark.thorough
def test_three_thousand_operations_are_right_and_leave_nothing_behind() -> None:
    held = soak.Soak(3_000, seed=random.randrange(1 << 30)).run()
    assert [each.operations for each in held] == [150 * part for part in range(1, 21)]


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
