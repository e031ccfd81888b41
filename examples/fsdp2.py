"""FSDP2 and checkpoints: `covey run -n 2 examples/fsdp2.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

Every rank holds a shard of each parameter, of its gradient and of the optimizer's state. Halfway through, the example
saves a checkpoint; at the end it loads the checkpoint and compares. A different number of ranks can load it, too: set
--folder, and start again with another -n.
"""

import argparse
import math
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import covey.torch


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inside(x))


def wave(x: torch.Tensor) -> torch.Tensor:
    """Return the target values."""
    return torch.sin(2 * math.pi * x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", help="where checkpoints stay; a temporary folder if not given")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    temporary = tempfile.TemporaryDirectory() if rank == 0 and args.folder is None else None
    chosen = [args.folder or (temporary.name if temporary else None)]
    dist.broadcast_object_list(chosen)  # all ranks save into one folder
    folder = str(chosen[0])

    model = nn.Sequential(nn.Linear(1, 64), Block(64), Block(64), nn.Linear(64, 1))
    whole = sum(parameter.numel() for parameter in model.parameters())
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank} of {size} holds {mine} of {whole} parameters")

    generator = torch.Generator().manual_seed(rank)  # every rank has different points

    def error() -> float:
        """Return the error over the same points on all ranks."""
        points = torch.linspace(-1, 1, 200).unsqueeze(1)
        with torch.no_grad():
            return nn.functional.mse_loss(model(points), wave(points)).item()

    state = {"model": model, "optimizer": optimizer}
    first = halfway = error()
    if rank == 0:
        print(f"step   0   error {first:.4f}")
    for step in range(1, args.steps + 1):
        points = 2 * torch.rand(128, 1, generator=generator) - 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points), wave(points)).backward()
        optimizer.step()
        if step == args.steps // 2:
            halfway = error()
            path = covey.torch.save(state, folder, step=step).wait()
            if rank == 0:
                print(f"step {step:3}   error {halfway:.4f}   saved in {path.name}")
    last = error()
    if rank == 0:
        print(f"step {args.steps:3}   error {last:.4f}")
    step = covey.torch.load(state, folder)
    again = error()
    if rank == 0:
        print(f"step {step:3}   error {again:.4f}   loaded")
    dist.destroy_process_group()
    if temporary:
        temporary.cleanup()
    if again != halfway:
        raise SystemExit(f"the error was {halfway} when the model was saved, and is {again} now")
    if last > first / 2:
        raise SystemExit(f"the error did not fall: {first} before, {last} after")


if __name__ == "__main__":
    main()
