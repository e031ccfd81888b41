"""The collectives of torch.distributed on covey do what gloo does."""

from __future__ import annotations

import pytest
from tests.torch.conformance import compare
from tests.torch.crew import run_crew


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_gloo_gives(size: int) -> None:
    for report in run_crew(size, compare):
        assert report["different"] == []
        assert report["count"] > 900
