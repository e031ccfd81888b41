"""The collectives of torch.distributed on covey do what gloo does."""

from __future__ import annotations

import pytest
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.conformance import compare


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (1, 2, 4))])
def test_every_collective_gives_what_gloo_gives(size: int) -> None:
    for report in run_torch_ranks(size, compare):
        assert report["different"] == []
        assert report["count"] > 900
