"""DiLoCo: `covey run -n 2 examples/diloco.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

For slow networks: every rank trains alone for many steps. Then the ranks exchange how much their parameters have
changed, rounded to one byte per parameter. Here a network learns to add numbers modulo 17; each rank has a part of the
examples.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import covey.torch

MODULUS = 17


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=16, help="inner steps between two outer steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    sums = pairs.sum(1) % MODULUS
    mine = torch.arange(rank, len(pairs), size)

    embed = nn.Embedding(MODULUS, 32)
    model = nn.Sequential(embed, nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, MODULUS))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    diloco = covey.torch.DiLoCo(model, inner, every=args.every, fragments=2, overlap=True, compress="int8")

    generator = torch.Generator().manual_seed(rank)
    rights = []
    for step in range(args.steps):
        batch = mine[torch.randperm(len(mine), generator=generator)[:64]]
        inner.zero_grad()
        nn.functional.cross_entropy(model(pairs[batch]), sums[batch]).backward()
        inner.step()
        diloco.step()
        if step % (args.steps // 8) == 0 or step == args.steps - 1:
            if step == args.steps - 1:
                diloco.finish()  # applies a change that is still being sent
            right = (model(pairs).argmax(1) == sums).float().mean()
            dist.all_reduce(right, dist.ReduceOp.AVG)
            rights.append(right.item())
            if rank == 0:
                print(f"step {step:3}   the models of {size} ranks are right in {100 * rights[-1]:5.1f} % of all sums")

    dist.destroy_process_group()
    if rights[-1] < 2 * rights[0]:
        raise SystemExit("the ranks did not learn")


if __name__ == "__main__":
    main()
