"""Processes as the kernel sees them: each one runs, is stopped, or has ended. Keepers know, and vouch for theirs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from covey.proto.health import INTERVAL, LATE, STOPPED_SILENCE, Vouch
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_EVERY: Final = 0.1
LOOK_CLOSELY_EVERY: Final = 0.01
LOOK_CLOSELY_SECONDS: Final = 1.0
"""How long to look more often after a link ended: the kernel closes what a process had open before it calls it dead."""
REMEMBERED_SECONDS: Final = 30.0
"""How long it is told that a process has exited."""
WARDS_LIMIT: Final = messages.MAX_MEMBERS
HAS_STATES: Final = sys.platform == "linux"
"""Whether the system tells more of a process than that it exists."""


class ProcessStatus:
    """One process: the `life` that others know it by, and how it is."""

    def __init__(self, life: bytes, pid: int, now: float) -> None:
        self.life, self.pid = life, pid
        self._began: bytes | None = None
        """When it began, as far as that is known: tells it from a later process that got its number."""
        self.state, self.changed_at = Vouch.BUSY, now
        self.look(now)
        self.closely_until = -1.0

    def look(self, now: float) -> bool:
        """Ask the kernel; return whether something has changed. What has exited stays so.

        While the kernel cannot be asked, nothing changes: a process is not taken to be dead for want of a descriptor.
        """
        before = self.state
        if before is not Vouch.EXITED and (seen := _state(self.pid)) is not None:
            self.state = self._judge(*seen)
        if self.state is before:
            return False
        self.changed_at = now
        return True

    def _judge(self, letter: str, began: bytes | None) -> Vouch:
        self._began = self._began or began
        if began is None or began != self._began or letter in ("Z", "X"):
            return Vouch.EXITED
        return Vouch.STOPPED if letter in ("T", "t") else Vouch.BUSY

    def is_lost(self, now: float) -> bool:
        """Tell whether to go on without it: it has exited, or was stopped too long."""
        is_stopped = self.state is Vouch.STOPPED and now >= self.changed_at + STOPPED_SILENCE
        return is_stopped or self.state is Vouch.EXITED


class ProcessTable:
    """All processes that a keeper speaks for, by their lives."""

    def __init__(self) -> None:
        self._process_table: dict[bytes, ProcessStatus] = {}
        self._looked_at = 0.0

    def get(self, life: bytes) -> ProcessStatus | None:
        """Return the process of a life, if it is known."""
        return self._process_table.get(life)

    def watch(self, card: messages.Card, now: float) -> ProcessStatus:
        """Begin to look after a process, unless that is done already."""
        if card.life not in self._process_table:
            self._process_table[card.life] = ProcessStatus(card.life, card.pid, now)
            over = sorted(filter(_has_exited, self._process_table.values()), key=lambda ward: ward.changed_at)
            for ward in over[: max(0, len(over) - WARDS_LIMIT)]:
                del self._process_table[ward.life]
        return self._process_table[card.life]

    def watch_closely(self, ward: ProcessStatus, now: float) -> None:
        """Its link has ended: perhaps it is about to."""
        ward.closely_until = now + LOOK_CLOSELY_SECONDS

    def is_full(self) -> bool:
        """Tell whether there are so many that one more could not be vouched for."""
        return len(self._process_table) - sum(map(_has_exited, self._process_table.values())) >= WARDS_LIMIT

    def look(self, now: float) -> bool:
        """Ask the kernel about all; return whether something has changed.

        Time in which no look came, because this process stood still, does not count as time that a process was stopped.
        """
        gap, self._looked_at = now - self._looked_at, now
        if gap > LOOK_EVERY + LATE:
            for ward in self._process_table.values():
                if ward.state is Vouch.STOPPED:
                    ward.changed_at = min(now, ward.changed_at + gap)
        has_news = [ward.look(now) for ward in self._process_table.values()]
        for ward in list(self._process_table.values()):
            if _has_exited(ward) and now > ward.changed_at + REMEMBERED_SECONDS:
                del self._process_table[ward.life]
        return any(has_news)

    def look_again_in(self, now: float) -> float:
        """Return the seconds until the next look."""
        # One that is stopped and continued all the time must be seen to run in between.
        is_close = any(
            (now < ward.closely_until and not _has_exited(ward))
            or (ward.state is Vouch.STOPPED and not ward.is_lost(now))
            for ward in self._process_table.values()
        )
        return LOOK_CLOSELY_EVERY if is_close else LOOK_EVERY

    def vouch(self) -> messages.Vouch:
        """Return how they all are: the living, and of those who exited the latest."""
        latest_first = sorted(self._process_table.values(), key=lambda ward: (_has_exited(ward), -ward.changed_at))
        return messages.Vouch(tuple((ward.life, int(ward.state)) for ward in latest_first[:WARDS_LIMIT]))


class Rounds:
    """Looks after wards again and again, and has it told how they are. On the control loop."""

    def __init__(
        self,
        process_table: ProcessTable,
        tell: Callable[[messages.Vouch], None],
        also: Callable[[float], None] = lambda _now: None,
    ) -> None:
        """`tell` is called every INTERVAL and when something changed, `also` after every look."""
        self._process_table, self._tell, self._also = process_table, tell, also
        self._tell_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.is_held = False
        """Whether not to look for now. May be set on any thread."""

    def look(self) -> None:
        """Look now; the next looks come by themselves."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closed:
            return
        now = time.monotonic()
        if self.is_held:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY, self.look)
            return
        try:
            if self._process_table.look(now) or now >= self._tell_at:
                self._tell_at = now + INTERVAL
                self._tell(self._process_table.vouch())
            self._also(now)
        finally:
            self._timer = asyncio.get_running_loop().call_later(self._process_table.look_again_in(now), self.look)

    def look_closely(self, life: bytes) -> None:
        """The link with a process has ended: perhaps it is about to, too."""
        if (ward := self._process_table.get(life)) is not None:
            self._process_table.watch_closely(ward, time.monotonic())
        self.look()

    def close(self) -> None:
        """Look no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()


def _has_exited(ward: ProcessStatus) -> bool:
    return ward.state is Vouch.EXITED


def _state(pid: int) -> tuple[str, bytes | None] | None:
    """Return the letter that stands for the state of a process, and when it began, which is None if there is none.

    Returns None if the kernel cannot be asked now.
    """
    if pid <= 0:
        return "", None
    try:
        if not HAS_STATES:
            os.kill(pid, 0)
            return "", b""
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:
            words = stat.read(4096).rpartition(b")")[2].split()  # names may hold anything, blanks and brackets too
        return words[0].decode("ascii"), words[19]
    except (FileNotFoundError, ProcessLookupError):
        return "", None
    except PermissionError:  # another user's, and so not ours
        return "", None
    except OSError:  # out of descriptors, most likely
        return None
