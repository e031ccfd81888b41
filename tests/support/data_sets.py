"""Machines that push data sets: agents in the process of a test, each with a folder of its own, and a desk."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.support.agents import CONFIG
from tests.support.waiting import DEADLINE, wait_until

from covey.agent import data_store
from covey.agent.agent import Permission, serving
from covey.agent.callers import calling
from covey.agent.data_folder import read_data
from covey.agent.push import DataWanted, push
from covey.net.keys import clusters
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, own_machine
from covey.runtime.progress_bar import ProgressBar
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.agent.agent import ResidentAgent
    from covey.agent.callers import AgentCaller, Terminal
    from covey.agent.data_folder import DataFolder
    from covey.agent.data_line import Holding
    from covey.agent.data_sets import DataManifest
    from covey.agent.push import Pushed


def content(seed: int, size: int) -> bytes:
    """Bytes that differ for each seed, and everywhere."""
    return random.Random(seed).randbytes(size)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class DataTown:
    """Some machines with agents, and a desk from which data sets are pushed."""

    def __init__(self, folder: Path, ending: contextlib.ExitStack) -> None:
        self.folder, self._ending = folder, ending
        self.cluster = Cluster(ClusterSecret("lab", secrets.token_bytes(32)))
        self.machines: dict[str, bytes] = {}
        self.agents: dict[str, ResidentAgent] = {}
        with self.at("desk") as desk:
            self.desk = desk

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[bytes]:
        """Be at a machine, whose id is yielded, during the `with` block."""
        with patch.dict(os.environ, COVEY_HOME=str(self.folder / name)):
            clusters.save(self.cluster)
            ensure_identity()
            yield own_machine()

    def agent(self, name: str, *allowed: bytes) -> ResidentAgent:
        """Start an agent that the desk may use, and machines that are named."""
        with self.at(name) as machine:
            permission = Permission(machine, frozenset({self.desk, *allowed}), here=name)
            agent = self._ending.enter_context(serving(self.cluster, CONFIG, permission))
        self.machines[name], self.agents[name] = machine, agent
        return agent

    @contextlib.contextmanager
    def terminal(self, name: str = "desk") -> Iterator[tuple[Terminal, dict[str, AgentCaller]]]:
        """A terminal at a machine, and the agents that it finds, once these are linked with each other, too."""
        with self.at(name), calling(self.cluster, CONFIG) as terminal:
            wait_until(lambda: len(terminal.agents({})) == len(self.machines))
            for one in self.agents.values():
                wait_until(lambda one=one: len(one.mesh.met) == len(self.agents) - 1)  # type: ignore[misc]
            by_id = {each.machine: each for each in terminal.agents({})}
            yield terminal, {name: by_id[machine] for name, machine in self.machines.items()}

    def read(self, path: Path, name: str = "set") -> DataFolder:
        with self.at("desk"):
            return read_data(path, (), data_store.digests_file(name), lambda _count: None)

    def push(self, held: Any, *names: str, called: str = "set", holders: tuple[str, ...] = ()) -> list[Pushed]:
        """Push a data set from the desk to machines."""
        with self.terminal() as (terminal, agents):
            targets, having = [agents[name] for name in names], [agents[name] for name in holders]
            return push(terminal, wanted(held, called), targets, having, ProgressBar("", 0, wanted=False))

    def path(self, name: str, called: str = "set") -> Path:
        """Return what `covey.data` returns on a machine. No lock outlives the test."""
        with self.at(name):
            return data_store.data(called)

    def store(self, name: str) -> Path:
        """Return the folder of data sets of a machine."""
        return self.folder / name / "data"


def wanted(held: Any, called: str = "set") -> DataWanted:
    manifest = held.manifest
    return DataWanted(called, manifest.digest, manifest.size, len(manifest.encoded), held)


class Halting:
    """A data set of which only so many pieces are given, until `go_on` is set: then all."""

    def __init__(self, held: Holding, pieces: int) -> None:
        self._held, self._left = held, pieces
        self._lock = threading.Lock()
        self.halted, self.go_on = threading.Event(), threading.Event()
        self.given = 0

    @property
    def manifest(self) -> DataManifest:
        return self._held.manifest

    def has(self) -> list[bool] | None:
        return self._held.has()

    def read(self, chunk: int, offset: int, size: int) -> bytes:
        with self._lock:
            self._left -= 1
            is_over = self._left < 0
        if is_over and not self.go_on.is_set():
            self.halted.set()
            assert self.go_on.wait(DEADLINE)
        data = self._held.read(chunk, offset, size)
        with self._lock:
            self.given += len(data)
        return data


class Lying:
    """A data set of which some bytes of a chunk are others than the list says."""

    def __init__(self, held: Holding, chunk: int) -> None:
        self._held, self._chunk = held, chunk

    @property
    def manifest(self) -> DataManifest:
        return self._held.manifest

    def has(self) -> list[bool] | None:
        return None

    def read(self, chunk: int, offset: int, size: int) -> bytes:
        data = self._held.read(chunk, offset, size)
        return data if chunk != self._chunk else bytes(len(data))
