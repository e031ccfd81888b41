"""Pipelining, 1F1B: `covey run -n 2 examples/pipeline.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

A model too large for one machine is cut into stages, one a rank. Batches go through in small parts, so that all
stages have something to do: each does one forward, one backward, in turn. Only activations and their gradients
travel.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, BATCH, PARTS, LAYERS = 32, 64, 8, 3


class Layer(nn.Module):
    """A little change to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.change(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps
    torch.manual_seed(0)  # all ranks make the same model, and keep their part of it
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == size - 1

    model = [Layer() for _ in range(LAYERS * size)]
    part = nn.Sequential(*model[LAYERS * rank : LAYERS * (rank + 1)])
    print(f"rank {rank} of {size} has layers {LAYERS * rank} to {LAYERS * (rank + 1) - 1} of {len(model)}")
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=PARTS, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)

    generator = torch.Generator().manual_seed(1)  # the first rank has the inputs, the last the answers
    history = []
    for step in range(steps):
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        answers = inputs.roll(1, dims=1).abs()
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([inputs] if is_first else []), target=answers if is_last else None, losses=losses)
        optimizer.step()
        if is_last:
            history.append(torch.stack(losses).mean().item())
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:3}   loss {history[-1]:.3f}")

    dist.destroy_process_group()
    if is_last and history[-1] > history[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
