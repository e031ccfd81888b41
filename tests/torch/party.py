"""Processes that train together with `Elastic`, and tell what they do."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections import Counter
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from tests.support.torch_ranks import Started
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime.group.internals import engine_of
from covey.runtime.keeper.keeper import LocalRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from covey.torch.training.elastic import Elastic


class Party:
    """Processes of one run, forked from one that has imported torch, whose keeper is this process."""

    def __init__(self, size: int, program: Callable[..., Any]) -> None:
        self._run, self._program = LocalRun(size), program
        self._started: list[Started] = []
        self._ends: dict[Connection, int] = {}
        self.heard: list[tuple[int, str, Any]] = []
        """Who said what, in the order it came: everything that was told, and `returned` or `gone`."""

    def start(self, slot: int, *, restart: int = 0) -> int:
        """Start a process; return its id."""
        place = {name: str(value) for name, value in self._run.variables(slot).items()} | {
            "COVEY_RESTART": str(restart)
        }
        started = Started(_serve, slot, place, self._run.token, self._program)
        self._ends[started.end] = slot
        self._started.append(started)
        return started.process.pid

    def await_heard(self, kind: str, slot: int | None = None) -> Any:
        """Return the next thing of this kind that is heard from now on; other things are kept."""
        until = time.monotonic() + DEADLINE
        while True:
            ready = wait(list(self._ends), max(0.0, until - time.monotonic()))
            assert ready, f"no {kind!r} from {slot} in time; heard {self.heard[-20:]}"
            for end in ready:
                came = self._listen(end)
                if came[1] == kind and slot in (None, came[0]):
                    return came[2]

    def await_gone(self, *slots: int) -> None:
        """Wait until the processes of these slots have ended, in whatever order they do."""
        until = time.monotonic() + DEADLINE
        while {each for each in self._ends.values() if each in slots}:
            ready = wait(list(self._ends), max(0.0, until - time.monotonic()))
            assert ready, f"{slots} have not ended in time; heard {self.heard[-20:]}"
            for end in ready:
                self._listen(end)

    def await_all(self) -> dict[int, Any]:
        """Return what all processes returned that are left."""
        until = time.monotonic() + DEADLINE
        while self._ends:
            ready = wait(list(self._ends), max(0.0, until - time.monotonic()))
            assert ready, f"{list(self._ends.values())} did not end; heard {self.heard[-20:]}"
            for end in ready:
                self._listen(end)
        return {slot: value for slot, kind, value in self.heard if kind == "returned"}

    def _listen(self, end: Any) -> tuple[int, str, Any]:
        slot = self._ends[end]
        try:
            kind, value = end.recv()
        except EOFError:
            kind, value = "gone", None
            del self._ends[end]
            end.close()
        assert kind != "failed", f"process {slot}: {value}"
        self.heard.append((slot, kind, value))
        return self.heard[-1]

    def counts(self, epochs: int) -> dict[int, Counter[int]]:
        """How often each sample was trained on, by epoch."""
        counts: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
        for _, kind, value in self.heard:
            if kind == "trained":
                counts[value[0]].update(value[1])
        return counts

    def __enter__(self) -> Party:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._run.__exit__)
            for started in self._started:
                stack.push(started)


def _serve(there: Connection, slot: int, place: dict[str, str], token: bytes, program: Callable[..., Any]) -> None:
    here, writer = os.pipe()
    os.write(writer, token)
    os.close(writer)
    os.environ |= place | {"COVEY_TOKEN_FD": str(here)}
    try:
        there.send(("returned", program(slot, lambda kind, value=None: there.send((kind, value)))))
    except BaseException:
        there.send(("failed", traceback.format_exc()))


def await_newcomer(elastic: Elastic) -> None:
    """Wait until this rank knows of a process that waits to join."""
    wait_until(lambda: engine_of(elastic.group).knows_change)
