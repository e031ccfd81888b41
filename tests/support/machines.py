"""People at machines of a cluster: each has a configuration folder of its own, and all of them share this host."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.support import forked, pipes
from tests.support.jobs import LAUNCHERS, SOURCE, finish
from tests.support.waiting import DEADLINE

from covey.net.keys import clusters, trust
from covey.net.keys import owner as owner_key
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import node_name, own_machine
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE = """
import json, os, sys
import covey
options = json.loads(sys.argv[2])
print(json.dumps("joining"), flush=True)
with covey.join(sys.argv[1], **options) as group:
    print(json.dumps([group.rank, group.size]), flush=True)
    for line in sys.stdin:
        print(json.dumps(group.all_reduce(10 ** group.rank)), flush=True)
"""
"""Joins a run, tells its place, and takes part in an all_reduce for each line it reads."""


def first_port() -> int:
    """Return the first port of our nodes: tests that run at the same time must not dial ours where theirs were."""
    return 47800 + 40 * int("0" + os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"))


class Machine:
    """A person with a configuration folder. Nothing leaves loopback."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab, self.home = lab, lab.folder / name
        self.folder = lab.folder
        """Where commands are typed."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
        self.env = kept | {
            "COVEY_HOME": str(self.home),
            "COVEY_INTERFACES": "lo",
            "COVEY_PORT": str(first_port()),
            "TMPDIR": str(lab.temp),
            "XDG_RUNTIME_DIR": str(lab.temp),
            "PYTHONPATH": str(SOURCE),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        }

    def enroll(self, cluster: str, key: bytes, owner: bytes = b"") -> None:
        """Put this machine into a cluster, as `covey enroll` does."""
        with patch.dict(os.environ, COVEY_HOME=str(self.home)):
            clusters.save(Cluster(ClusterSecret(cluster, key), owner=owner))

    def trust(self, cluster: str, *machines: Machine) -> None:
        """Let this machine send files to others without a question, as after a first send."""
        found = [machine.identity() for machine in machines]
        with patch.dict(os.environ, COVEY_HOME=str(self.home)):
            names = {each: node_name(socket.gethostname(), each) for each in found}
            trust.remember(clusters.load(cluster), names, has_had_files=True)

    def identity(self) -> bytes:
        """Return the id of this machine."""
        with patch.dict(os.environ, COVEY_HOME=str(self.home)):
            return own_machine()

    def own(self, cluster: str) -> bytes:
        """Make an owner key for a cluster on this machine, as `covey init` does; return its public half."""
        with patch.dict(os.environ, COVEY_HOME=str(self.home)):
            return owner_key.make(cluster)

    def key(self, cluster: str) -> bytes:
        """Return the key that this machine has saved for a cluster."""
        return bytes.fromhex(json.loads((self.home / "clusters" / f"{cluster}.json").read_text())["key"])

    def covey(self, *words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return forked.run(
            [sys.executable, "-m", "covey", *words],
            env=self.env | env,
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        """Start a program with Python; the lab ends it, whatever happens."""
        process = forked.Popen(
            [sys.executable, *argv],
            env=self.env | env,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=forked.interruptible,
        )
        self.lab.processes.append(process)
        return process

    def node(self, run: str, *, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a node that joins a run."""
        return self.start("-c", NODE, run, json.dumps(options), **(env or {}))


class Lab:
    """Machines that share a temporary folder, which has a short path."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temp = folder, folder / "t"
        self.temp.mkdir(mode=0o1777)
        self.processes: list[subprocess.Popen[str]] = []

    def machine(self, name: str = "one", cluster: str = "", key: bytes = b"") -> Machine:
        """Return a machine, in a cluster if one is named."""
        machine = Machine(self, name)
        if cluster:
            machine.enroll(cluster, key or secrets.token_bytes(32))
        return machine

    def owned(self, cluster: str, key: bytes, *names: str) -> list[Machine]:
        """Return machines of a cluster whose owner key is on the first one."""
        machines = [self.machine(name) for name in names]
        owner = machines[0].own(cluster)
        for machine in machines:
            machine.enroll(cluster, key, owner)
        return machines

    def left_behind(self) -> list[str]:
        """Return what is in the temporary folder, but for the door of this user's host rendezvous."""
        door = Path(f"covey-{os.getuid()}") / "door"
        paths = {path.relative_to(self.temp) for path in self.temp.rglob("*")}
        return sorted(map(str, paths - {door, door.parent}))


@contextlib.contextmanager
def new_lab() -> Iterator[Lab]:
    """A lab whose processes, with all that they started, are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        lab = Lab(Path(name))
        try:
            yield lab
        finally:
            for process in lab.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    pipes.stdin(process).close()
                for pipe in (pipes.stdout(process), pipes.stderr(process)):
                    pipe.close()
                process.wait(DEADLINE)


def heard(process: subprocess.Popen[str]) -> Any:
    """Return the next line that a program prints, as JSON."""
    line = pipes.stdout(process).readline()
    assert line, pipes.stderr(process).read()
    return json.loads(line)


def wait_until_joined(nodes: list[subprocess.Popen[str]]) -> list[int]:
    """Return the ranks of nodes once they are in their run."""
    for node in nodes:
        assert heard(node) == "joining"
    positions = [heard(node) for node in nodes]
    assert sorted(positions) == [[rank, len(nodes)] for rank in range(len(nodes))]
    return [rank for rank, _ in positions]


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for the end of a program that gets no more input; return its exit code, output and errors."""
    ended = finish(process, DEADLINE)
    return ended.code, ended.out, ended.err
