"""Tensor parallel: `covey run -n 2 examples/tensor_parallel.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

Every rank holds some columns of one matrix and the matching rows of the next. So all ranks together compute a layer
that does not fit into the memory of one of them, and send only one sum per layer. At the end, the weights must equal
those of the same model trained in a single process.
"""

import argparse
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    """The gated feed-forward layer of a transformer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


def train(model: nn.Module, steps: int) -> list[float]:
    """Train the model to reverse its input, and return the losses; the batches are the same in every call."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    whole = FeedForward(16, 96)
    shared = parallelize_module(
        deepcopy(whole), mesh, {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    )
    local = {
        name: list(parameter.to_local().shape) for name, parameter in shared.named_parameters() if "weight" in name
    }
    print(f"rank {rank} of {size} holds {local}")

    losses, expected = train(shared, steps), train(whole, steps)
    if rank == 0:
        for step in sorted({*range(0, steps, 10), steps - 1}):
            print(f"step {step:3}   loss {losses[step]:.4f}   alone {expected[step]:.4f}")
    apart = max(
        (mine.full_tensor() - other).abs().max().item()
        for mine, other in zip(shared.parameters(), whole.parameters(), strict=True)
    )
    dist.destroy_process_group()
    if apart > 1e-3:
        raise SystemExit(f"the weights differ by {apart} from those of the model that was trained alone")
    if losses[-1] > losses[0] / 2:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
