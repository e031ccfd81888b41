"""The script of ranks that run recipes one after the other, `recipe_ranks.py RECIPE...`, and look at each.

The packages that recipes need take long to import, so all of them run in the same ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from covey.runtime.counters import process


def check(names: dict[str, Any]) -> str:
    """Return what became of the names of a recipe that has run."""
    model, losses = names["model"], names["losses"]
    lowest = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    models = "one model" if torch.equal(lowest, highest) else "different models"
    fell = "a loss that fell" if losses[-1] < 0.8 * losses[0] else f"losses {losses}"
    return f"{dist.get_backend()}, {dist.get_world_size()} ranks, {models}, {fell}; {reported()}"


def reported() -> str:
    """Return what was reported last: no recipe does that itself."""
    (node,) = process.nodes
    row = node.reports.latest()
    return "nothing is reported" if row is None else f"step {row.step} is reported with {', '.join(sorted(row.values))}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for recipe in sys.argv[1:]:
        if "Trainer" in recipe:  # its callback is to save this one
            dist.group.WORLD.covey_group.request_checkpoint("anywhere", id="asked")
        print(f"{recipe}: {check(runpy.run_path(recipe))}")
        dist.barrier()
    until, saved = time.monotonic() + 500, list[str]()
    while len(saved) < 2 and time.monotonic() < until:  # the second event follows the last rank's word
        saved = [event.text for event in dist.group.WORLD.covey_group.events() if event.kind == "checkpoint"]
    print(f"checkpoints: {saved}, {sorted(os.listdir('out'))}")
    dist.destroy_process_group()
