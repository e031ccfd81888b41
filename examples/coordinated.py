"""Workers that a coordinator gives ranks to, and that meet again after a loss.

covey coordinator --listen 127.0.0.1:29300 --size 2
python examples/coordinated.py 127.0.0.1:29300 north
python examples/coordinated.py 127.0.0.1:29300 south
"""

import sys
import time
from typing import Any

import numpy as np

import covey

STEPS = 50
truth = np.arange(1.0, 6.0)
state: dict[str, Any] = {"weights": np.zeros(5), "step": 0}
address, worker_id = sys.argv[1:]
node = covey.WorkerNode(covey.WorkerNodeConfig(coordinator=address, worker_id=worker_id, run="example"))

while state["step"] < STEPS:
    try:
        with node:  # registers, gets a rank, joins
            print(f"{worker_id} is rank {node.rank} of {node.size} in round {node.round}", flush=True)
            steps = node.group.all_gather_object(state["step"])  # a worker that was started again is at 0
            state = node.group.broadcast_object(state, root=steps.index(max(steps)))
            rng = np.random.default_rng([node.round, node.rank])  # every rank draws different samples
            while state["step"] < STEPS:
                inputs = rng.normal(size=(64, 5))
                errors = inputs @ state["weights"] - inputs @ truth
                gradient = 2 * inputs.T @ errors / len(inputs)
                node.group.all_reduce(gradient, op="mean")
                state["weights"] = state["weights"] - 0.2 * gradient
                state["step"] += 1
                time.sleep(0.01)  # stands for the work of a larger model
    except covey.PeerLostError as error:
        print(f"{worker_id}: {error}; waiting for the next round", flush=True)

assert np.allclose(state["weights"], truth, atol=0.01), state
print(f"{worker_id} found {np.round(state['weights'], 1)} in {STEPS} steps")
