"""A coordinator and workers on several hosts: they need the secret, and no worker says where it listens."""

from __future__ import annotations

import json
import secrets
import sys

from tests.support import pipes
from tests.support.coordinators import WORKER, ask
from tests.support.jobs import SOURCE, finish
from tests.support.machines import heard
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan


def test_workers_on_other_hosts_register_and_join_with_the_secret_only() -> None:
    key = secrets.token_hex(32)
    with Lan(hosts=2) as lan:
        here, there = lan.hosts
        address = f"{here.ip4}:29300"
        env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": key}
        refused = here.popen(
            [sys.executable, "-m", "covey", "coordinator", "--listen", address], env=env | {"COVEY_SECRET": ""}
        )
        assert "the secret is empty" in finish(refused).err
        coordinator = here.popen(
            [sys.executable, "-m", "covey", "coordinator", "--listen", address, "--size", "2"], env=env
        )
        assert "with the secret of the cluster" in pipes.stdout(coordinator).readline()
        config = {"coordinator": address, "interval": 0.1, "timeout": DEADLINE}
        workers = [
            host.popen([sys.executable, "-c", WORKER, json.dumps(config | {"worker_id": name})], env=env)
            for host, name in ((there, "w0"), (here, "w1"))  # rank 0 is not where the coordinator is
        ]
        stranger = there.popen(
            [sys.executable, "-c", WORKER, json.dumps(config | {"worker_id": "w2"})],
            env=env | {"COVEY_SECRET": secrets.token_hex(32)},
        )
        for rank, worker in enumerate(workers):
            assert heard(worker)[0] == "before"
            started = heard(worker)
            assert coordinator.poll() is None, "the coordinator has ended"
            assert started == ["started", rank, 2, 1, True, True, ""]
        assert ask(workers, "step") == [[[11.0 + 2 * position for position in range(5)]]] * 2
        assert [finish(worker).code for worker in workers] == [0, 0]
        ended = finish(stranger)
        assert coordinator.poll() is None, "a stranger has ended the coordinator"
        assert ended.code == 1
        assert "AuthError" in ended.err
        assert "both must be in the same cluster, with the same secret" in ended.err
