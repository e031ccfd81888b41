"""The measurement of the store runs, and has a figure for each call of each store."""

from __future__ import annotations

import pytest
from tools.store_speed import measure


@pytest.mark.thorough
def test_both_stores_are_measured_in_turn() -> None:
    found = measure(2, calls=20)
    calls = [f"{name}, {who} asking" for who in ("one", "all") for name in ("get", "set")]
    assert {f"covey {call}" for call in calls} <= found.keys()
    assert all(0 < half <= most for half, most in found.values())
