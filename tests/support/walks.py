"""The walk: a run of four ranks on two machines, and what happens to it: views are to say what, to whom and why.

Each thing that happens is caused by a method of `Walk`, which returns the words that a view then shows. A third machine
joins later.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.support.jobs import SOURCE
from tests.support.screens import at_a_terminal
from tests.support.waiting import wait_until

from covey.net.keys import clusters
from covey.net.keys import owner as owner_key
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import id_text, own_machine
from covey.testing.netns import Lan
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.screens import InTerminal

    from covey.testing.netns import Host

RUN = "train"
CLUSTER = "home"
NORTH, SOUTH, ATTIC = range(3)
NAMES = ("north", "south", "attic")
RATE = "200mbit"
SLOW_RATE = "2mbit"
WELL = "4 ranks on 2 machines at work."

PROGRAM = """
import math, os, sys, time
from pathlib import Path
import numpy as np
import covey

folder, state = Path(sys.argv[1]), {"step": 0}
mine = lambda word: (folder / f"{word}.{os.getpid()}").exists()
for group in covey.generations(min_size=2, patience=30):
    try:
        group.restore(state)
        print("ready", os.getpid(), group.rank, flush=True)
        while not group.change_pending:
            time.sleep(0.15 if mine("slow") else 0.05)
            while mine("hold"):
                time.sleep(0.01)
            group.all_reduce(np.full(100_000, group.rank + state["step"], np.float32))
            state["step"] += 1
            loss = 2 + 2 * math.exp(-state["step"] / 150) + 0.03 * math.sin(state["step"])
            group.report(step=state["step"], loss=loss, samples=32)
            if state["step"] % 20 == 0:
                print(f"step {state['step']} loss {loss:.3f}", flush=True)
    except covey.GroupChangedError:
        continue
"""


class Started:
    """A command on a machine, and what it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        for pipe in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def _read(self, pipe: Any) -> None:
        with contextlib.suppress(ValueError):  # the network has ended, and closed it
            for line in pipe:
                self.lines.append(line.rstrip())

    def said(self, words: str, count: int = 1) -> list[str]:
        """Return the lines with these words as soon as there are so many."""

        def found() -> list[str]:
            return [line for line in self.lines if words in line]

        wait_until(lambda: len(found()) >= count or self.process.poll() is not None, lambda: "\n".join(self.lines))
        assert len(found()) >= count, "\n".join(self.lines)
        return found()


class Walk:
    """The run and its machines."""

    def __init__(self, lan: Lan, folder: Path) -> None:
        self.lan, self._folder = lan, folder
        self._pids: dict[int, tuple[int, int]] = {}
        """By rank of the first generation: machine and process."""
        self.key = secrets.token_bytes(32)
        self.owner = self._as(NORTH, lambda: owner_key.make(CLUSTER))
        for machine in (NORTH, SOUTH, ATTIC):
            self.enroll(machine)

    def host(self, machine: int) -> Host:
        return self.lan.hosts[machine]

    def _as(self, machine: int, do: Any) -> Any:
        with patch.dict(os.environ, COVEY_HOME=str(self.host(machine).home)):
            return do()

    def enroll(self, machine: int) -> None:
        """Put a machine into the cluster, as `covey enroll` does."""
        self._as(machine, lambda: clusters.save(Cluster(ClusterSecret(CLUSTER, self.key), owner=self.owner)))

    def id_of(self, machine: int) -> str:
        """Return the id of a machine as views show it."""
        return str(self._as(machine, lambda: id_text(own_machine())))

    def covey(self, machine: int, *words: str, **env: str) -> Started:
        """Start a command on a machine."""
        argv = [sys.executable, "-m", "covey", *words]
        return Started(self.host(machine).popen(argv, env={"PYTHONPATH": str(SOURCE), **env}))

    def run(self, machine: int, processes: int, *options: str, **env: str) -> Started:
        """Start the program on a machine by hand."""
        script = self._folder / "walk.py"
        script.write_text(PROGRAM)
        words = ["run", RUN, "-n", str(processes), "--on-loss", "continue", *options, str(script), str(self._folder)]
        return self.covey(machine, *words, **env)

    def top(self, columns: int = 80, rows: int = 24) -> contextlib.AbstractContextManager[InTerminal]:
        """Return `covey top` at a terminal of the first machine."""
        host = self.host(NORTH)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
        own = {"COVEY_HOME": str(host.home), "TMPDIR": str(host.temp), "XDG_RUNTIME_DIR": str(host.temp)}
        command = host.command([sys.executable, "-m", "covey", "top", RUN])
        return at_a_terminal(command, clean | own | {"PYTHONPATH": str(SOURCE)}, columns, rows)

    def begin(self) -> None:
        """Start four ranks on two machines, and wait until they work together."""
        started = [(machine, self.run(machine, 2)) for machine in (NORTH, SOUTH)]
        for machine, command in started:
            for line in command.said("ready", 2):
                pid, rank = map(int, line.partition("ready")[2].split())
                self._pids[rank] = machine, pid
        assert sorted(self._pids) == [0, 1, 2, 3]

    def _rank(self, machine: int, number: int) -> int:
        """Return one of the two ranks that began on a machine."""
        return sorted(rank for rank, (its, _) in self._pids.items() if its == machine)[number]

    def _named(self, rank: int) -> str:
        return f"Rank {rank} ({NAMES[self._pids[rank][0]]})"

    def _mark(self, word: str, rank: int) -> Path:
        return self._folder / f"{word}.{self._pids[rank][1]}"

    # What happens

    def course(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Let one thing after the other happen; yield what, and the words that a view shows then."""
        for happen in (self.slow_rank, self.slow_link, self.late_rank, self.kill, self.join, self.stop):
            yield happen.__name__, happen()
            self.mend()

    def mend(self) -> None:
        """Let ranks and links be as fast as they were."""
        for path in (*self._folder.glob("slow.*"), *self._folder.glob("hold.*")):
            path.unlink()
        self.lan.shape(self.host(SOUTH), RATE)

    def slow_rank(self) -> tuple[str, ...]:
        """Let a rank compute for longer than the others."""
        rank = self._rank(SOUTH, 0)
        self._mark("slow", rank).touch()
        return (f"{self._named(rank)} is slower than the others, which wait for it",)

    def late_rank(self) -> tuple[str, ...]:
        """Let a rank not come to the next operation."""
        rank = self._rank(SOUTH, 1)
        self._mark("hold", rank).touch()
        return (f"{self._named(rank)} is 1 operation behind; 3 ranks have waited",)

    def slow_link(self) -> tuple[str, ...]:
        """Let the link of a machine carry a hundredth."""
        self.lan.shape(self.host(SOUTH), SLOW_RATE)
        return "The link from ", " has become slow: it carries ", "the ranks wait for it"

    def kill(self) -> tuple[str, ...]:
        """Kill a rank on the other machine."""
        rank = self._rank(SOUTH, 1)
        os.kill(self._pids[rank][1], signal.SIGKILL)
        return f"{self._named(rank)} was lost ", "its process has exited", "with 3 ranks"

    def join(self) -> tuple[str, ...]:
        """Let a third machine join; return when it is in the run."""
        self.run(ATTIC, 1).said("ready")
        return "(attic) joined ", "the run continues with 4 ranks"

    def stop(self) -> tuple[str, ...]:
        """Stop a rank on this machine."""
        os.kill(self._pids[self._rank(NORTH, 1)][1], signal.SIGSTOP)
        return "(north) was lost ", "its process is stopped (SIGSTOP", "with 3 ranks"


def sentence_of(screen: str) -> str:
    """Return what `covey top` says below its header, as one line."""
    return " ".join(line.partition("│")[0].strip() for line in screen.splitlines()[1:4])


@contextlib.contextmanager
def walking(folder: Path) -> Iterator[Walk]:
    """Give the machines; everything there is gone at the end."""
    with Lan(hosts=len(NAMES), names=NAMES, rate=RATE, prefix="covey-walk") as lan:
        yield Walk(lan, folder)
