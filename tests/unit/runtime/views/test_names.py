"""How error messages name the process in a seat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from covey.base.numbers import Rank, Seat
from covey.runtime.views.generation_table import GenerationTable


def test_messages_name_a_process_by_its_rank_in_the_current_generation() -> None:
    node: Any = SimpleNamespace()
    table = GenerationTable(node, keeper_path="", floor=1, store=None)
    assert table.name_of(Seat(3)) == "rank 3", "before the first generation, whose ranks are the seats"
    later: Any = SimpleNamespace(rank_of={Seat(1): Rank(0), Seat(3): Rank(1)}.get)
    table.current = later
    assert [table.name_of(Seat(seat)) for seat in (1, 3)] == ["rank 0", "rank 1"]
    assert table.name_of(Seat(0)) == "seat 0", "it is not in this generation"
