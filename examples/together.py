"""Training together: `covey run -n 2 examples/together.py`, or on each machine of a cluster, or with `python` alone.

An ordinary loop of one machine, on all machines of a run: covey measures them and the line between them, and chooses
how they train together. Machines may be lost, and come back. Here a network learns to add numbers modulo 17.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import covey.torch

MODULUS = 17


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--exact", action="store_true", help="compute what one machine would with the whole batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    sums = pairs.sum(1) % MODULUS
    loader = DataLoader(TensorDataset(pairs, sums), batch_size=64, shuffle=True)
    embed = nn.Embedding(MODULUS, 32)
    model = nn.Sequential(embed, nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, MODULUS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    way = ""
    together = covey.torch.train_together(model, optimizer, loader, epochs=args.epochs, exact=args.exact)
    for inputs, targets in together:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        together.step()
        if together.way != way:
            way = together.way
            print(f"epoch {together.epoch:3}   {way}")

    if not together.done:
        return  # SIGTERM asked this process to leave, or the run had ended when it came back
    with together.outer_parameters(), torch.no_grad():
        right = (model(pairs).argmax(1) == sums).float().mean().item()
    print(f"rank {together.group.rank}: {together.samples} samples, right in {100 * right:.1f} % of all sums")
    if right < 0.5:
        raise SystemExit("the ranks did not learn")


if __name__ == "__main__":
    main()
