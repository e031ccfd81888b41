"""Every test of the contract runs on one of three kinds of group: Python's executor, the compiled one, or both mixed.

Which one follows from the parameters of the test, so that every operation meets all three on every kind of lane without
running three times. `TEST_EXECUTORS=python`, `native` or `mixed` forces one on all tests.
"""

from __future__ import annotations

import os
import zlib

import pytest
from tests.support.compiled import EXECUTORS, use_executors
from tests.support.values import LANES


@pytest.fixture(autouse=True)
def executors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what runs the plans of this test's groups, and make it so."""
    chosen = os.environ.get("TEST_EXECUTORS") or EXECUTORS[_number(request.node) % len(EXECUTORS)]
    print(f"executors: {chosen}")  # shown if the test fails
    use_executors(monkeypatch, chosen)
    return chosen


def _number(test: pytest.Function) -> int:
    """Number the cases of a test: sizes that follow each other get different executors, and so do kinds of lanes."""
    callspec = getattr(test, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    number = zlib.crc32(test.function.__name__.encode())
    for name, value in parameters.items():
        if name == "lanes":
            number += LANES.index(value) if value in LANES else 0
        elif isinstance(value, int):
            number += value
        else:
            number += callspec.indices[name] if callspec is not None else 0
    return number
