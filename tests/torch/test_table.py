"""The guide's table of operations and dtypes is what two ranks find when they try."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks

from covey.arrays.torch_devices import DEVICE_KINDS
from covey.torch.backend.table import guide, table

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "pytorch.md"


def try_everything(rank: int, size: int, store: str) -> tuple[str, list[str]]:
    """Return the text for the guide, and the tables of the devices that this machine has."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    here = [kind for kind in DEVICE_KINDS if kind != "cpu" and torch.get_device_module(kind).is_available()]
    return guide(), [table(kind) for kind in here]


def test_the_guide_shows_what_every_operation_does_with_every_dtype() -> None:
    shown = re.search(
        r"<!-- python -m covey.torch.backend.table -->\n(.*?)\n<!-- end -->", GUIDE.read_text(), re.DOTALL
    )
    assert shown is not None
    for tried, tables in run_torch_ranks(2, try_everything):
        assert tried == shown[1], f"run `python -m covey.torch.backend.table` and put this into the guide:\n{tried}"
        assert all(tried.startswith(other) for other in tables)
