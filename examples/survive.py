"""A training loop that continues when a process dies, and admits the process again when it is restarted.

covey run -n 3 --restarts 1 examples/survive.py
"""

import os
import signal
import time
from typing import Any

import numpy as np

import covey

STEPS = 150
truth = np.arange(1.0, 6.0)
state: dict[str, Any] = {"weights": np.zeros(5), "step": 0}  # everything that a newcomer needs

for group in covey.generations():
    try:
        group.restore(state)  # newcomers get the state of the other ranks
        print(f"generation {group.generation}: rank {group.rank} of {group.size} continues at step {state['step']}")
        rng = np.random.default_rng([group.generation, group.rank])  # every rank draws different samples
        while state["step"] < STEPS and not group.change_pending:
            if group.generation == 0 and group.rank == 1 and state["step"] == 20:
                os.kill(os.getpid(), signal.SIGKILL)  # like a power cut
            inputs = rng.normal(size=(64, 5))
            errors = inputs @ state["weights"] - (inputs @ truth + 0.1 * rng.normal(size=64))
            gradient = 2 * inputs.T @ errors / len(inputs)
            group.all_reduce(gradient, op="mean")  # after a loss: finished by the remaining ranks, from their gradients
            state["weights"] -= 0.05 * gradient
            state["step"] += 1
            time.sleep(0.02)  # stands for the work of a larger model
    except covey.GroupChangedError:
        continue  # the others continued without this process; it rejoins as a newcomer
    if state["step"] == STEPS:
        print(f"rank {group.rank} of {group.size} found {np.round(state['weights'], 1)} in {STEPS} steps")
        break
