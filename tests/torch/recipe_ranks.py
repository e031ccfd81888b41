"""The script of ranks that run recipes one after the other, `recipe_ranks.py BEGINNING RECIPE...`, and look at each.

The packages that recipes need take long to import, so all of them run in the same ranks.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist


def check(names: dict[str, Any]) -> str:
    """Return what became of the names of a recipe that has run."""
    model, losses = names["model"], names["losses"]
    lowest = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    models = "one model" if torch.equal(lowest, highest) else "different models"
    fell = "a loss that fell" if losses[-1] < 0.8 * losses[0] else f"losses {losses}"
    return f"{dist.get_backend()}, {dist.get_world_size()} ranks, {models}, {fell}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    beginning, *recipes = sys.argv[1:]
    names = runpy.run_path(beginning)
    for recipe in recipes:
        print(f"{recipe}: {check(runpy.run_path(recipe, {'dist': names['dist']}))}")
        dist.barrier()
    dist.destroy_process_group()
