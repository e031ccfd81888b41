"""Ranks on the actors of a real Ray, and Ray Train over covey."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import finish

if TYPE_CHECKING:
    from tests.support.jobs import Job

pytestmark = pytest.mark.thorough

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import ray
import covey
import covey.ray

def total(group, scale):
    return [group.rank, float(group.all_reduce(np.full(3, scale * (group.rank + 1.0)))[0])]

def fail(group):
    if group.rank == 1:
        raise ValueError("told")
    group.barrier()

def die(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    while 1 in group.contributors:
        group.barrier()
    return list(group.contributors)

def step(config):
    import torch
    import torch.distributed as dist

    x = torch.full((3,), dist.get_rank() + config["scale"])
    dist.all_reduce(x)
    with open(f"{config['folder']}/{dist.get_rank()}", "w") as file:
        json.dump([dist.get_backend(), x[0].item()], file)

def attempt(call):
    try:
        return call()
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]

patience = 500.0  # Ray gives its processes 30 s to start, and its workers 60 s: too little on a busy machine
get_node = ray._private.services.get_node

def get_node_with_patience(*which):
    until = time.monotonic() + patience
    while True:
        try:
            return get_node(*which)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)

ray._private.services.get_node = get_node_with_patience
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(patience)
said = {}
folder = os.environ["FOLDER"]
ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=f"{folder}/ray")
try:
    said["sums"] = covey.ray.launch(total, 10, num_workers=3, start_timeout=patience)
    said["failed"] = attempt(lambda: covey.ray.launch(fail, num_workers=2, start_timeout=patience))
    said["left"] = covey.ray.launch(die, num_workers=3, on_loss="continue", start_timeout=patience)
    said["too many"] = attempt(lambda: covey.ray.launch(total, 1, num_workers=9, start_timeout=0.5))

    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        step,
        train_loop_config={"scale": 2.0, "folder": folder},
        torch_config=covey.ray.CoveyConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/trained"),
    ).fit()
    said["trained"] = [json.load(open(f"{folder}/{rank}")) for rank in range(2)]
finally:
    ray.shutdown()
print(json.dumps(said))
"""


def test_a_function_runs_as_the_ranks_of_ray_actors_and_ray_train_uses_covey(job: Job) -> None:
    patience = {"RAY_agent_register_timeout_ms": 500_000}
    said = finish(job.start(PROGRAM, FOLDER=job.folder, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0, **patience)).report
    assert said["sums"] == [[0, 60.0], [1, 60.0], [2, 60.0]]
    kind, text, note = said["failed"]
    assert (kind, text) == ("ValueError", "told")
    assert "raised in rank 1 of 2" in note
    assert said["left"] == [[0, 2], None, [0, 2]]
    assert said["too many"][0] == "DeadlineError"
    assert "start timeout" in said["too many"][1]
    assert said["trained"] == [["covey", 5.0], ["covey", 5.0]]
