"""Elastic training: `covey run -n 3 --restarts 1 examples/elastic.py`, or on each machine of a cluster, or alone.

One rank kills itself after a while, and the others train on its samples. When it is restarted, it gets the model, the
optimizer and the position in the data from the others. Every sample is still trained on once per epoch. The example
does not use a process group of torch, because its size cannot change.
"""

import argparse
import os
import signal
import time

import torch
from torch import nn

import covey.torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    torch.set_num_threads(1)

    inputs = 4 * torch.rand(2000, 2) - 2
    targets = (inputs[:, :1] * inputs[:, 1:]).tanh()
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elastic = covey.torch.Elastic(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        sampler=covey.torch.ElasticSampler(len(inputs)),
        batch=100,  # of all ranks together
        epochs=epochs,
    )

    generation = epoch = -1
    before = nn.functional.mse_loss(model(inputs), targets).item()
    for indices in elastic:  # this rank's share of the next 100 samples
        if elastic.generation != generation:
            generation = elastic.generation
            print(f"generation {generation}: rank {elastic.rank} of {elastic.size} begins at sample {elastic.samples}")
        if elastic.epoch != epoch:
            epoch = elastic.epoch
            if elastic.rank == 0:
                print(f"epoch {epoch}   loss {nn.functional.mse_loss(model(inputs), targets).item():.4f}")
        if generation == 0 and elastic.rank == 1 and elastic.samples == 1000:
            os.kill(os.getpid(), signal.SIGKILL)  # like a power cut
        nn.functional.mse_loss(model(inputs[indices]), targets[indices]).backward()
        elastic.step()
        time.sleep(0.03)  # stands for the work of a larger model

    if not elastic.done:
        return  # SIGTERM asked this process to leave, or the run had ended when it came back
    after = nn.functional.mse_loss(model(inputs), targets).item()
    if elastic.rank == 0:
        print(f"{elastic.samples} samples, {elastic.lost} of them given out a second time; loss {after:.4f}")
    if elastic.samples != epochs * len(inputs):
        raise SystemExit(f"{elastic.samples} samples were trained on, not {epochs * len(inputs)}")
    if after > before / 2:
        raise SystemExit(f"the loss did not fall: {before} before, {after} after")


if __name__ == "__main__":
    main()
