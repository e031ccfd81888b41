"""Members of runs that lose and gain some, on hosts of a test network: programs that say what they come to, when.

Every step is an all_reduce whose result tells exactly whose numbers are in it, and each program checks it against the
contributors that it is told. SIGUSR1 to one of them ends the whole run after a step,
SIGUSR2 makes all of them say "marked" after one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from tests.support.nodes import SOURCE, Cluster
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

    from covey.testing.netns import Host

PRELUDE = """
import ctypes, hashlib, json, logging, os, signal, sys, threading, time
import numpy as np
import covey

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
pause, count, holds = options.pop("pause", 0.1), options.pop("count", 1000), options.pop("holds", None)
talks = options.pop("talks", False)
places = 1.0 + np.arange(count) % 251
asked = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: asked.set())
marks = threading.Event()
signal.signal(signal.SIGUSR2, lambda *_: marks.set())

def say(event, **facts):
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)

def step(group):
    "Take part in one step; return the sum, and whether a member wants the run to end."
    x, is_marked, began = places * 4.0 ** group.rank, marks.is_set(), time.monotonic()
    x[0] = asked.is_set() + 1000 * is_marked
    group.all_reduce(x)
    if time.monotonic() - began > 2:
        say("slow", took=time.monotonic() - began)
    if is_marked:
        marks.clear()
    if x[0] >= 1000:
        say("marked")
    if talks:
        sent = group.send(x, dst=(group.rank + 1) % group.size, async_op=True)
        if not (group.recv(src=(group.rank - 1) % group.size) == x).all():
            say("wrong", message=True)
        sent.wait()
        if time.monotonic() - began > 2:
            say("slow", took=time.monotonic() - began, message=True)
    contributors = sorted(group.contributors)
    if not (x[1:] == places[1:] * sum(4.0 ** rank for rank in contributors)).all():
        say("wrong", contributors=contributors, values=x[1:9].tolist())
    return x, contributors, x[0] % 1000 > 0

def tell_events(group):
    say("events", kinds=[[e.kind, e.generation, list(e.ranks)] for e in group.events()])

say("joining", pid=os.getpid())
"""
STEADY = (
    PRELUDE
    + """
with covey.join(run, on_loss="continue", **options) as group:
    hosts, taken, before = group.all_gather_object(host), 0, list(range(group.size))
    say("joined", rank=group.rank, hosts=hosts)
    try:
        is_over = False
        while not is_over:
            began = time.monotonic()
            if taken == 10 and holds == host:
                ctypes.PyDLL(None).sleep(8)  # and keeps the interpreter's lock: nothing else of this process runs
                say("held", took=time.monotonic() - began)
            _, contributors, is_over = step(group)
            taken += 1
            if contributors != before:
                say("contributors", step=taken, hosts=[hosts[rank] for rank in contributors],
                    took=time.monotonic() - began)
                before = contributors
            time.sleep(pause)
    except covey.CoveyError as error:
        say("error", kind=type(error).__name__, text=str(error), step=taken)
    tell_events(group)
say("over", step=taken, hosts=[hosts[rank] for rank in before])
"""
)
"""Joins once, and goes on with the remaining members."""
ELASTIC = (
    PRELUDE
    + """
state = {"w": np.zeros(count), "step": 0}

def digest():
    return hashlib.blake2b(state["w"].tobytes(), digest_size=8).hexdigest()

is_over, gap = False, 0.0
for group in covey.generations(run, **options):
    try:
        group.restore(state)
        hosts, before = group.all_gather_object(host), list(range(group.size))
        say("generation", number=group.generation, rank=group.rank, hosts=hosts, step=state["step"], digest=digest())
        while not is_over and not group.change_pending:
            began = time.monotonic()
            x, contributors, is_over = step(group)
            gap = max(gap, time.monotonic() - began)
            state["w"][1:] += x[1:]
            state["step"] += 1
            if contributors != before:
                say("contributors", step=state["step"], hosts=[hosts[rank] for rank in contributors],
                    took=time.monotonic() - began)
                before = contributors
            time.sleep(pause)
    except covey.GroupChangedError as error:
        say("changed", text=str(error), step=state["step"])
        continue
    except covey.CoveyError as error:
        say("error", kind=type(error).__name__, text=str(error), step=state["step"])
        break
    if is_over:
        tell_events(group)
        break
say("over", step=state["step"], digest=digest(), gap=gap)
"""
)
"""Goes from generation to generation, with a state that every step changes."""


class Location(Protocol):
    """Where a program runs."""

    index: int


class Member:
    """A program on a host, and all that it has said."""

    def __init__(self, host: Location, process: subprocess.Popen[str]) -> None:
        self.host, self.process = host, process
        self.started_at = time.monotonic()
        self._said: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        """Lines of its standard error."""
        self._news = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, args=(process.stdout, True), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, False), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Any, is_output: bool) -> None:
        with contextlib.suppress(ValueError):  # the network has ended, and closed it
            for line in pipe:
                with self._news:
                    if is_output:
                        self._said.append(
                            json.loads(line[line.index("{") :])
                        )  # a keeper writes the rank in front of it
                    else:
                        self.warnings.append(line.rstrip())
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def all_said(self, event: str) -> list[dict[str, Any]]:
        """Return what it has said so far of one kind."""
        with self._news:
            wrong = [said for said in self._said if said["event"] == "wrong"]
            assert not wrong, wrong
            return [said for said in self._said if said["event"] == event]

    def said(self, event: str, number: int = 0, *, within: float = DEADLINE) -> dict[str, Any]:
        """Wait until it says something of a kind for the time of this number; return that."""
        until = time.monotonic() + within
        while len(found := self.all_said(event)) <= number:
            is_waiting = time.monotonic() < until and any(thread.is_alive() for thread in self._threads)
            assert is_waiting, f"no {event!r} {number} in time\n{self.story()}"
            with self._news:
                self._news.wait(0.05)
        return found[number]

    def story(self) -> str:
        """Return everything it has said."""
        with self._news:
            lines = [f"{said['at'] - self.started_at:6.2f} {said}" for said in self._said]
        return "\n".join([f"host{self.host.index}, exit code {self.process.poll()}:", *lines, *self.warnings])

    @property
    def pid(self) -> int:
        """Of the program itself, not of its keeper."""
        self.said("joining")
        return int(self.all_said("joining")[-1]["pid"])

    def signal(self, number: int) -> float:
        """Send it a signal; return when."""
        at = time.monotonic()
        os.kill(self.pid, number)
        return at

    def kill(self) -> float:
        """Kill it; return when."""
        return self.signal(signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Have the whole run end after a step."""
        os.kill(self.pid, signal.SIGUSR1)

    def join(self) -> None:
        """Wait until everything is read that it has written."""
        for thread in self._threads:
            thread.join(DEADLINE)

    def end(self, *, code: int = 0) -> dict[str, Any]:
        """Wait for a good end; return what it said last."""
        over = self.said("over")
        self.join()
        assert self.process.wait(DEADLINE) == code, self.story()
        self.all_said("wrong")
        return over


def start(cluster: Cluster, host: Host, run: str, code: str = STEADY, **options: Any) -> Member:
    """Start a program on a host. What it keeps on disk is not shared with other runs there."""
    home = host.home / run
    return Member(host, cluster.start(host, run, code=code, env={"COVEY_HOME": str(home)}, **options).process)


def start_with_keeper(cluster: Cluster, host: Host, run: str, code: str, *words: str, **options: Any) -> Member:
    """Start a program by `covey run`."""
    home = host.home / run
    home.mkdir(mode=0o700, exist_ok=True)
    script = home / "train.py"
    script.write_text(code)
    argv = [sys.executable, "-m", "covey", "run", run, *words, str(script), str(host.index), run, json.dumps(options)]
    env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": cluster.secret, "COVEY_HOME": str(home)}
    return Member(host, host.popen(argv, env=env))


def by_rank(members: Iterable[Member]) -> list[Member]:
    """Wait until members of a new run have joined; return them by rank."""
    ranks = {member.said("joined")["rank"]: member for member in members}
    ordered = [ranks[rank] for rank in sorted(ranks)]
    hosts = [member.host.index for member in ordered]
    assert all(member.said("joined")["hosts"] == hosts for member in ordered)
    return ordered


def indexes(members: Iterable[Member]) -> list[int]:
    """Return the hosts of members."""
    return [member.host.index for member in members]


def agree_on_loss(survivors: list[Member], number: int = 0) -> list[float]:
    """Wait until all of these go on with each other only; return when each did. They do from the same step on."""
    said = [member.said("contributors", number) for member in survivors]
    stories = "\n".join(member.story() for member in survivors)
    assert [each["hosts"] for each in said] == [indexes(survivors)] * len(said), stories
    assert len({each["step"] for each in said}) == 1, stories
    return [each["at"] for each in said]


def together(members: list[Member], after: int = -1) -> dict[str, Any]:
    """Wait until these are in one generation, a later one than `after`, with each other only; return what one said.

    All of them have the same state in it.
    """
    until = time.monotonic() + DEADLINE
    while True:
        said = [[each for each in member.all_said("generation") if each["number"] > after] for member in members]
        numbers = set.intersection(*({each["number"] for each in facts} for facts in said))
        if numbers:
            same = [next(each for each in facts if each["number"] == max(numbers)) for facts in said]
            states = {(each["step"], each["digest"]) for each in same}
            assert len(states) == 1, "\n".join(member.story() for member in members)
            if all(sorted(each["hosts"]) == sorted(indexes(members)) for each in same):
                return same[0]
        assert time.monotonic() < until, "\n".join(member.story() for member in members)
        time.sleep(0.02)


def check_same_end(members: list[Member]) -> None:
    """Wait until these end; assert that they do so with the same state, after the same step."""
    ends = [member.end() for member in members]
    assert len({(over["step"], over["digest"]) for over in ends}) == 1, ends
