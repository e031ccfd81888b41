"""Processes as the kernel reports them: running, stopped, or exited. A keeper vouches for its processes with this."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from covey.proto.health import LATE_TICK, REPORT_EVERY, STOPPED_SILENCE, ProcessState
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES_EVERY: Final = 0.1
LOOK_CLOSELY_EVERY: Final = 0.01
LOOK_CLOSELY_SECONDS: Final = 1.0
"""How long to look more often after a link ended: the kernel closes the files of a process before it ends it."""
REMEMBERED_SECONDS: Final = 30.0
"""How long an exited process is reported."""
PROCESSES_LIMIT: Final = messages.MAX_MEMBERS
HAS_STATES: Final = sys.platform == "linux"
"""Whether the system tells more about a process than that it exists."""


class ProcessStatus:
    """One process: the `life` by which other nodes know it, and its state."""

    def __init__(self, life: bytes, pid: int, now: float) -> None:
        self.life, self.pid = life, pid
        self._began: bytes | None = None
        """When it started, if known: tells it from a later process with the same pid."""
        self.state, self.changed_at = ProcessState.BUSY, now
        self.look(now)
        self.closely_until = -1.0

    def look(self, now: float) -> bool:
        """Ask the kernel; return whether the state has changed. An exit is final.

        If the kernel cannot be asked now, nothing changes: a process is not dead because descriptors are short.
        """
        before = self.state
        if before is not ProcessState.EXITED and (seen := _state(self.pid)) is not None:
            self.state = self._judge(*seen)
        if self.state is before:
            return False
        self.changed_at = now
        return True

    def _judge(self, letter: str, began: bytes | None) -> ProcessState:
        self._began = self._began or began
        if began is None or began != self._began or letter in ("Z", "X"):
            return ProcessState.EXITED
        return ProcessState.STOPPED if letter in ("T", "t") else ProcessState.BUSY

    def is_lost(self, now: float) -> bool:
        """Tell whether members should go on without it: it has exited, or was stopped too long."""
        is_stopped = self.state is ProcessState.STOPPED and now >= self.changed_at + STOPPED_SILENCE
        return is_stopped or self.state is ProcessState.EXITED


class ProcessTable:
    """The processes that a keeper vouches for, by life."""

    def __init__(self) -> None:
        self._processes: dict[bytes, ProcessStatus] = {}
        self._looked_at = 0.0

    def get(self, life: bytes) -> ProcessStatus | None:
        """Return the process of a life, if it is known."""
        return self._processes.get(life)

    def watch(self, card: messages.Card, now: float) -> ProcessStatus:
        """Add a process, unless it is known, and return its status."""
        if card.life not in self._processes:
            self._processes[card.life] = ProcessStatus(card.life, card.pid, now)
            over = sorted(filter(_has_exited, self._processes.values()), key=lambda process: process.changed_at)
            for process in over[: max(0, len(over) - PROCESSES_LIMIT)]:
                del self._processes[process.life]
        return self._processes[card.life]

    def watch_closely(self, process: ProcessStatus, now: float) -> None:
        """Look more often at a process whose link ended: perhaps it exits."""
        process.closely_until = now + LOOK_CLOSELY_SECONDS

    def is_full(self) -> bool:
        """Tell whether there is no room for another running process."""
        return len(self._processes) - sum(map(_has_exited, self._processes.values())) >= PROCESSES_LIMIT

    def look(self, now: float) -> bool:
        """Ask the kernel about all processes; return whether some state has changed.

        Time in which this process itself did not run does not count as time that another process was stopped.
        """
        gap, self._looked_at = now - self._looked_at, now
        if gap > PROCESSES_EVERY + LATE_TICK:
            for process in self._processes.values():
                if process.state is ProcessState.STOPPED:
                    process.changed_at = min(now, process.changed_at + gap)
        has_news = [process.look(now) for process in self._processes.values()]
        for process in list(self._processes.values()):
            if _has_exited(process) and now > process.changed_at + REMEMBERED_SECONDS:
                del self._processes[process.life]
        return any(has_news)

    def look_again_in(self, now: float) -> float:
        """Return the seconds until the next look."""
        # A process that is stopped and continued in quick turns must be seen running in between.
        is_close = any(
            (now < process.closely_until and not _has_exited(process))
            or (process.state is ProcessState.STOPPED and not process.is_lost(now))
            for process in self._processes.values()
        )
        return LOOK_CLOSELY_EVERY if is_close else PROCESSES_EVERY

    def vouch(self) -> messages.Vouch:
        """Return the state of all processes; of exited ones only the latest, if there are too many."""
        latest_first = sorted(self._processes.values(), key=lambda process: (_has_exited(process), -process.changed_at))
        return messages.Vouch(tuple((process.life, int(process.state)) for process in latest_first[:PROCESSES_LIMIT]))


class Rounds:
    """Looks at a process table periodically, and reports it. On the control loop."""

    def __init__(
        self,
        process_table: ProcessTable,
        tell: Callable[[messages.Vouch], None],
        also: Callable[[float], None] = lambda _now: None,
    ) -> None:
        """`tell` is called every REPORT_EVERY and after each change, `also` after every look."""
        self._process_table, self._tell, self._also = process_table, tell, also
        self._tell_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.is_held = False
        """Whether not to look for now. May be set on any thread."""

    def look(self) -> None:
        """Look now, and again after a pause."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closed:
            return
        now = time.monotonic()
        if self.is_held:
            self._timer = asyncio.get_running_loop().call_later(PROCESSES_EVERY, self.look)
            return
        try:
            if self._process_table.look(now) or now >= self._tell_at:
                self._tell_at = now + REPORT_EVERY
                self._tell(self._process_table.vouch())
            self._also(now)
        finally:
            self._timer = asyncio.get_running_loop().call_later(self._process_table.look_again_in(now), self.look)

    def look_closely(self, life: bytes) -> None:
        """Look more often at a process whose link ended."""
        if (process := self._process_table.get(life)) is not None:
            self._process_table.watch_closely(process, time.monotonic())
        self.look()

    def close(self) -> None:
        """Look no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()


def _has_exited(process: ProcessStatus) -> bool:
    return process.state is ProcessState.EXITED


def _state(pid: int) -> tuple[str, bytes | None] | None:
    """Return the letter for the state of a process, and when it started (None if there is no such process).

    Return None if the kernel cannot be asked now.
    """
    if pid <= 0:
        return "", None
    try:
        if not HAS_STATES:
            os.kill(pid, 0)
            return "", b""
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:
            words = (
                stat.read(4096).rpartition(b")")[2].split()
            )  # the name may hold anything, spaces and parentheses too
        return words[0].decode("ascii"), words[19]
    except (FileNotFoundError, ProcessLookupError):
        return "", None
    except PermissionError:  # a process of another user, so not the one that was known
        return "", None
    except OSError:  # out of descriptors, most likely
        return None
