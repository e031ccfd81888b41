"""Linear regression, data-parallel: each rank has its own samples, all end with the same weights.

covey run -n 4 examples/data_parallel.py
"""

import numpy as np

import covey

with covey.join() as group:
    rng = np.random.default_rng(group.rank)  # every rank draws different samples
    truth = np.arange(1.0, 6.0)
    inputs = rng.normal(size=(256, 5))
    targets = inputs @ truth + 0.01 * rng.normal(size=256)

    weights = np.zeros(5)
    for _ in range(100):
        gradient = 2 * inputs.T @ (inputs @ weights - targets) / len(inputs)
        group.sync_gradients({"weights": gradient})
        weights -= 0.1 * gradient

    spread = group.all_reduce(float(np.abs(weights - truth).max()), op="max")
    if group.rank == 0:
        print(f"{group.size} ranks found {np.round(weights, 3)}; off by at most {spread:.4f}")
