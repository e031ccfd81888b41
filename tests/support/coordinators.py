"""Coordinators and workers as processes of a lab's machines."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.support import pipes
from tests.support.machines import heard
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.support.machines import Machine

WORKER = """
import json, os, sys, time
import numpy as np
import covey

node = covey.WorkerNode(covey.WorkerNodeConfig(**json.loads(sys.argv[1])))

def say(*words):
    print(json.dumps(words), flush=True)

def told():
    return [node.rank, node.size, node.round, node.ready, node.registered]

say("before", *told(), bool(node.problem))
node.start()
say("started", *told(), node.problem)
for line in sys.stdin:
    order = line.strip()
    if order == "step":
        try:
            array = np.arange(5.0) + 10.0 ** node.rank
            node.strategy.all_reduce_gradients({"array": array}, op="sum")
            say(array.tolist())
        except covey.PeerLostError as error:
            say("lost", error.rank, node.ready)
    elif order == "save":
        while (checkpoint := node.group.checkpoint_pending) is None:
            node.group.all_reduce(1.0)
            time.sleep(0.005)
        node.group.end_checkpoint("no room" if checkpoint.path == "full" and node.rank == 1 else "")
        say(checkpoint.path, checkpoint.since, node.group.sequence)
    elif order == "fork":
        child = os.fork()
        if not child:
            node.close()  # as at the end of a program
            os._exit(0)
        os.waitpid(child, 0)
        say(*told())
    elif order == "tell":
        say(*told(), node.problem)
    elif order == "register":
        node.group.node.register("who", lambda: [node.rank, node.round])
        say("registered")
    elif order == "call":
        say(*(node.group.node.call(rank, "who") for rank in range(node.size)))
    elif order == "again":
        node.close()
        node.start()
        say("started", *told(), node.problem)
node.close()
node.close()
say("after", *told())
"""
"""A worker that does what it reads, a word a line, and prints what came of it as JSON."""


COORDINATOR = """
import sys
from covey.cli.main import main
from covey.coordinator import tls_front
tls_front.TLS_FRONT_SECONDS = 500.0  # a machine that stands still ends no handshake
sys.argv = ["covey", "coordinator", *sys.argv[1:]]
main()
"""
"""The command `covey coordinator`, with patience."""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def coordinate(machine: Machine, *options: str, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """Start a coordinator; return its process, and its address once it listens."""
    process = machine.start("-c", COORDINATOR, "--listen", f"127.0.0.1:{port}", *options)
    line = pipes.stdout(process).readline()
    found = re.search(r"listens at (127\.0\.0\.1:\d+)", line)
    assert found, pipes.stderr(process).read()
    return process, found[1]


def work(machine: Machine, address: str, worker: str, **config: Any) -> subprocess.Popen[str]:
    """Start a worker, which sends heartbeats often."""
    given = {"coordinator": address, "worker_id": worker, "interval": 0.1, "timeout": DEADLINE} | config
    return machine.start("-c", WORKER, json.dumps(given))


def ask(workers: list[subprocess.Popen[str]], order: str) -> list[Any]:
    """Give an order to all workers, and return what each says."""
    for worker in workers:
        pipes.stdin(worker).write(f"{order}\n")
        pipes.stdin(worker).flush()
    return [heard(worker) for worker in workers]


def status(machine: Machine, address: str, *options: str) -> list[Any]:
    """Return what `covey coordinator status` prints."""
    shown = machine.covey("coordinator", "status", address, "--json", *options)
    assert shown.returncode == 0, shown.stderr
    return list(json.loads(shown.stdout))


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition that costs a process is true."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
