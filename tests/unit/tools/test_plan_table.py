from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools import plan_table

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def test_the_page_has_what_the_tool_prints() -> None:
    """Of 64 ranks, which takes least time; the others come from the same functions."""
    page = PAGE.read_text()
    for case in plan_table.cases(64):
        assert "| " + " | ".join(plan_table.row(case)) + " |" in page, "run `python -m tools.plan_table`"


def test_few_ranks_are_simulated_and_compared_with_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_table, "NBYTES", 1 << 20)
    (row,) = (plan_table.row(case) for case in plan_table.cases(8) if case.name.startswith("two sites"))
    cells = dict(zip(plan_table.HEADINGS, row, strict=True))
    assert cells["plan"] == "levels, by share"
    assert float(cells["of the bound"]) > 0.8
    assert all(abs(float(error.rstrip("%"))) < 20 for error in cells["error"].split(", "))
