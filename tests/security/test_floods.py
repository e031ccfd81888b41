"""Floods of strangers: a running group is hardly slowed, members still come in, memory and log stay small."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.attackers import BROKEN, Insider, Victim, new_cluster, resident_bytes
from tests.support.waiting import DEADLINE

from covey.wire import door, messages

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.thorough, pytest.mark.alone]

SECONDS = 3.0
HALF_OPEN = 1000
BAD_PER_SECOND = 300
GROWTH = 30 << 20
SOURCE = Path(__file__).parents[2] / "src"
JOB = """
import json, logging, os, sys, time
import numpy as np
import covey
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of

logging.basicConfig(level=logging.INFO)
with covey.join("busy", size=2, interfaces="lo", lanes="secure", timeout=500) as group:
    card = node_of(group).card
    print(json.dumps([group.rank, card.contact.addresses[0].port]), flush=True)
    data, count, since = np.ones(4096, np.float32), 0, time.monotonic()
    while not group.all_reduce(int(group.rank == 0 and os.path.exists(sys.argv[1]))):
        group.all_reduce(data)
        data[:] = 1
        count += 1
        if time.monotonic() - since > 0.25:
            print(json.dumps(count / (time.monotonic() - since)), flush=True)
            count, since = 0, time.monotonic()
"""


class Busy:
    """One of two processes that reduce without a pause, and tell how often."""

    def __init__(self, cluster: Any, home: Path, stop: Path) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
        env |= {"COVEY_HOME": str(home), "COVEY_SECRET": cluster.secret.key.hex(), "PYTHONPATH": str(SOURCE)}
        self.errors = (home / f"{secrets.token_hex(4)}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(stop)], env=env, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.rates: list[float] = []
        self.rank, self.port = -1, 0
        self._thread = threading.Thread(target=self._read, daemon=True)

    def wait_until_running(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        self.rank, self.port = json.loads(line)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.rates.append(json.loads(line))

    def rates_for(self, seconds: float) -> list[float]:
        """Return how many reductions a second there are from now on, in quarters of a second."""
        before, count, deadline = len(self.rates) + 1, round(seconds / 0.25), time.monotonic() + DEADLINE
        while len(self.rates) < before + count:
            assert time.monotonic() < deadline, self.log()
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)
        return self.rates[before : before + count]

    def log(self) -> str:
        self.errors.flush()
        return Path(self.errors.name).read_text()

    def end(self) -> int:
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(DEADLINE)
        finally:
            if self._thread.ident is not None:
                self._thread.join(DEADLINE)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.errors.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Flood:
    """Strangers on a thread of their own: half-open connections that come back, and bad answers at a steady rate."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._ended = address, threading.Event()
        self.bad = 0
        self._idle: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flood:
        self._idle = [self._connect() for _ in range(HALF_OPEN)]
        self._thread.start()
        return self

    def _connect(self) -> socket.socket:
        sock = socket.socket()
        sock.settimeout(DEADLINE)
        with contextlib.suppress(OSError):
            sock.connect(self._address)
        return sock

    def _run(self) -> None:
        garbage = secrets.token_bytes(door.DOOR_ANSWER_BYTES)
        began = time.monotonic()
        while not self._ended.is_set():
            if self.bad < (time.monotonic() - began) * BAD_PER_SECOND:
                with self._connect() as sock, contextlib.suppress(OSError):
                    sock.sendall(garbage)
                self.bad += 1
                if self.bad % 3 == 0:  # the half-open ones do not go away
                    self._idle.pop(0).close()
                    self._idle.append(self._connect())
            else:
                self._ended.wait(0.002)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(DEADLINE)
        for sock in self._idle:
            sock.close()


@contextlib.contextmanager
def decoy() -> Iterator[tuple[str, int]]:
    """Where strangers do no harm: their own share of this host's processors has to be left out of the account."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        yield listener.getsockname()


def test_a_flood_of_strangers_hardly_slows_a_group_and_keeps_no_member_out(
    home: Path, tmp_path: Path, many_descriptors: None
) -> None:
    cluster = new_cluster("default")
    stop = tmp_path / "stop"
    pair = [Busy(cluster, home, stop) for _ in range(2)]
    try:
        for each in pair:
            each.wait_until_running()
        target = pair[0]
        prey = Victim(cluster, None, None, ("127.0.0.1", target.port))  # type: ignore[arg-type]
        calm, flooded = list[float](), list[float]()
        memory, lines = resident_bytes(target.process.pid), len(target.log().splitlines())
        # Of three busy threads on two cores, one waits: the rate of a quarter of a second is half or twice that of the
        # next one. And the machine itself is faster and slower, so what is compared lies close together.
        for _ in range(2):
            with decoy() as elsewhere, Flood(elsewhere):
                calm += target.rates_for(SECONDS)
            with Insider(prey, purpose="visitor") as member, Flood(prey.address) as flood:
                flooded += target.rates_for(SECONDS)
                began = time.monotonic()
                member.ping()
                assert time.monotonic() - began < 1.0
                assert isinstance(join_in_the_flood(prey), messages.Welcome)
            assert flood.bad > BAD_PER_SECOND * SECONDS / 2
        grown = resident_bytes(target.process.pid) - memory
        assert mean(flooded) > 0.5 * mean(calm), f"reductions a second without strangers {calm}, with them {flooded}"
        assert grown < GROWTH
        assert len(target.log().splitlines()) - lines <= 5, target.log()
    finally:
        stop.touch()
        codes = [each.end() for each in pair]
    assert codes == [0, 0]


def join_in_the_flood(prey: Victim) -> Any:
    """Try as nodes do, again and again, to be let in."""
    deadline = time.monotonic() + DEADLINE
    while True:
        try:
            with Insider(prey) as newcomer:
                newcomer.ping()
                return newcomer.greeting
        except BROKEN:
            assert time.monotonic() < deadline
