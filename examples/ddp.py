"""DistributedDataParallel: `covey run -n 2 examples/ddp.py`, or `torchrun --nproc-per-node 2`, or `python` alone.

A small network learns on which of two spirals a point is. Every rank trains on different points, and DDP keeps the
models equal. Only one word is specific to covey: the name of the backend.
"""

import argparse
import math
import platform

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(points: int) -> TensorDataset:
    """Return points of two spirals that wind around each other, and which one each is on."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(points) % 2
    along = torch.rand(points, generator=generator).sqrt()
    angle = 2.5 * math.pi * along + math.pi * label
    place = torch.stack([along * angle.cos(), along * angle.sin()], dim=1)
    return TensorDataset(place + 0.01 * torch.randn(points, 2, generator=generator), label)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)

    dist.init_process_group("covey", init_method="covey://")
    rank, size = dist.get_rank(), dist.get_world_size()
    names: list[str] = [""] * size
    dist.all_gather_object(names, platform.node())
    if rank == 0:
        print(f"ranks: {size}, on {', '.join(sorted(set(names)))}")

    data = spirals(1024)
    sampler = DistributedSampler(data, rank=rank, num_replicas=size)
    loader = DataLoader(data, batch_size=max(1, 64 // size), sampler=sampler)
    net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(3)  # of losses, of right guesses, of points
        for points, labels in loader:
            guesses = model(points)
            loss = nn.functional.cross_entropy(guesses, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (guesses.argmax(1) == labels).sum()
            sums += torch.tensor([loss.item() * len(labels), right, len(labels)])
        dist.all_reduce(sums)
        mean_loss, share_right, _ = (sums / sums[2]).tolist()
        losses.append(mean_loss)
        if rank == 0:
            print(f"epoch {epoch:2}   loss {mean_loss:.3f}   right {100 * share_right:5.1f} %")

    lowest = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    if not torch.equal(lowest, highest):
        raise SystemExit("the ranks have different models")
    if losses[-1] > losses[0]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
