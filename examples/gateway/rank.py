"""A rank with covey that trains together with programs in other languages; see docs/guides/gateway.md."""

import numpy as np

import covey

STEPS, SAMPLES = 20, 64
truth = np.array([1.0, -2.0, 3.0, 0.5])

with covey.join() as group:
    numbers = np.arange(SAMPLES)[:, None] + SAMPLES * group.rank  # every rank has samples of its own
    inputs = np.sin(numbers * np.arange(1.0, 5.0))
    weights = np.zeros(4)
    for _ in range(STEPS):
        gradient = 2 * inputs.T @ (inputs @ (weights - truth)) / SAMPLES
        group.all_reduce(gradient, op="mean")
        weights -= 0.5 * gradient
    group.barrier()
    print(f"rank {group.rank} of {group.size}: {weights.tobytes().hex()}", flush=True)
