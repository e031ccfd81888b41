"""Ranks on the workers of a real Dask cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.jobs import finish

if TYPE_CHECKING:
    from tests.support.jobs import Job

pytestmark = pytest.mark.thorough

PROGRAM = """
import json, os, signal, time
import dask
import distributed
import numpy as np
import covey
import covey.dask

def total(group, scale):
    return [group.rank, float(group.all_reduce(np.full(3, scale * (group.rank + 1.0)))[0])]

def fail(group):
    if group.rank == 1:
        raise ValueError("told")
    group.barrier()

def loop(group):
    while True:
        group.barrier()
        time.sleep(0.01)

def die(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    while 1 in group.contributors:
        group.barrier()
    return list(group.contributors)

def attempt(call, **more):
    try:
        return call(**more)
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]

if __name__ == "__main__":
    said = {}
    # The client refreshes what it caches of its scheduler, which has no workers then, all the time.
    dask.config.set({"distributed.client.scheduler-info-interval": "1ms"})
    with distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client:
            said["sums"] = covey.dask.launch(client, total, 10, num_workers=3)
            said["failed"] = attempt(lambda: covey.dask.launch(client, fail))
            said["late"] = attempt(lambda: covey.dask.launch(client, loop, timeout=1))
            said["again"] = covey.dask.launch(client, total, 1, workers=list(client.run(os.getpid))[:2])
            said["stranger"] = attempt(lambda: covey.dask.launch(client, total, 1, workers=["tcp://192.0.2.1:1"]))
            said["left"] = covey.dask.launch(client, die, on_loss="continue")
    print(json.dumps(said))
"""


def test_a_function_runs_as_the_ranks_of_a_dask_cluster(job: Job) -> None:
    said = finish(job.start(PROGRAM)).report
    assert said["sums"] == [[0, 60.0], [1, 60.0], [2, 60.0]]
    kind, text, note = said["failed"]
    assert (kind, text) == ("ValueError", "told")
    assert "raised in rank 1 of 3" in note
    assert said["late"][0] == "DeadlineError"
    assert said["again"] == [[0, 3.0], [1, 3.0]]  # the ranks that looped have ended
    assert said["stranger"][0] == "ConfigError"
    assert said["left"] == [[0, 2], None, [0, 2]]
