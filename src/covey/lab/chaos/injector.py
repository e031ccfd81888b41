"""Injects planned faults into a job, one after another, and records what was done to which process and when.

The job says which processes are members, and is told what is done to them. Faults of single processes are here, those
of keepers, hosts and networks in `hosts.py`, newcomers in `command_run.py`. There is no thread: the owner
calls `turn`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from covey.lab.chaos.cutting import cut
from covey.lab.chaos.faults import FAULT_KINDS, SLOW_PULSE, between, pick, touched_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.lab.chaos.faults import PlannedFault

ENOUGH_MEMBERS_SECONDS: Final = 30.0
"""How long a fault waits until enough processes are members; between two generations none is."""


class Victim(Protocol):
    """A process of the job."""

    @property
    def pid(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def title(self) -> str:
        """What it is called in the report."""

    def signal(self, signum: int) -> object:
        """Send a signal, if the process still exists."""


class Breakable(Protocol):
    """What faults are injected into."""

    def members(self) -> Sequence[Victim]:
        """Return the processes that are at work, by rank."""

    def on_fault(self, fault: PlannedFault, target: Victim) -> None:
        """Called just before a fault touches a process."""

    def on_release(self, fault: PlannedFault, target: Victim) -> None:
        """Called just before a process that was stopped continues."""


Action: TypeAlias = "Callable[[PlannedFault, list[Victim]], str]"
"""Performs a fault, given the members that no other fault disturbs; returns what was done."""


@dataclass
class Injected:
    """A fault whose turn came."""

    fault: PlannedFault
    at: float
    """In seconds since 1970."""
    targets: tuple[Victim, ...] = ()
    text: str = ""
    """What was done; or why nothing was."""
    was_done: bool = True


class Injector:
    """Takes a job through a plan of faults."""

    def __init__(
        self,
        job: Breakable,
        faults: Sequence[PlannedFault],
        say: Callable[[str], None],
        *,
        min_alive: int = 0,
    ) -> None:
        self.injected: list[Injected] = []
        self.log: list[str] = []
        """What was said, with the time since the job was at work."""
        self.began = 0.0
        """When the job was at work, in seconds since 1970; 0 before."""
        self._job, self._say, self._min_alive = job, say, min_alive
        self._faults = list(faults)
        self._began_at = math.inf
        """The moment that faults count from, by the monotonic clock; later by what faults had to wait."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        """What is to be done later, and when: processes to continue, to stop again, to restart."""
        self._order = itertools.count()
        self._disturbed: set[int] = set()
        """Processes that are stopped, slow or asked to leave now."""
        self.targets: tuple[Victim, ...] = ()
        """The targets of the fault that is being injected."""
        self._actions = self.actions()

    def actions(self) -> dict[str, Action]:
        """Return what is done, by kind of fault."""
        return {
            **dict.fromkeys(("kill", "two", "most", "all"), self._kill),
            "stop": self._stop,
            "pause": self._stop,
            "slow": self._slow,
            "leave": self._leave,
            "cut": self._cut,
        }

    def begin(self, began: float) -> None:
        """Let the times of faults count from now, which is `began` in seconds since 1970."""
        self.began, self._began_at = began, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._faults and not self._agenda

    @property
    def next_at(self) -> float:
        """When `turn` has to be called next, by the monotonic clock."""
        due = [at for at, _, _ in self._agenda[:1]]
        return min(due + [self._began_at + fault.at for fault in self._faults[:1]], default=math.inf)

    def turn(self, now: float) -> None:
        """Do what is due. A fault waits while too few processes are members, and those after it wait, too."""
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        if self._faults and now >= self._began_at + self._faults[0].at:
            self._try(self._faults[0], now)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), what))

    def drop_faults(self) -> None:
        """Inject no more faults; what is under way ends as planned."""
        self._faults.clear()

    def calm(self, target: Victim) -> None:
        """Regard a process as undisturbed: it has ended."""
        self._disturbed.discard(target.pid)

    def say(self, text: str) -> None:
        """Tell what happened, with the time."""
        line = f"{time.time() - self.began if self.began else 0.0:7.2f} s  {text}"
        self.log.append(line)
        self._say(line)

    def kill(self, fault: PlannedFault, targets: Sequence[Victim]) -> str:
        """Kill processes; return that in words."""
        for each in targets:
            self._job.on_fault(fault, each)
            each.signal(signal.SIGKILL)
        self.targets += tuple(targets)
        return f"killed {titles(targets)}"

    # In turn

    def _try(self, fault: PlannedFault, now: float) -> None:
        members = [each for each in self._job.members() if each.pid not in self._disturbed]
        obstacle = self.obstacle(fault, len(members))
        late = now - self._began_at - fault.at
        if obstacle and late < ENOUGH_MEMBERS_SECONDS:
            return
        del self._faults[0]
        self._began_at += late  # the pauses between faults stay as they were drawn
        done = Injected(fault, time.time())
        self.injected.append(done)
        self.targets = ()
        done.text, done.was_done = obstacle or self._actions[fault.kind](fault, members), not obstacle
        done.targets = self.targets
        self.say(f"{fault.kind}: {done.text}" if done.was_done else f"no {fault.kind}: {done.text}")

    def obstacle(self, fault: PlannedFault, count: int) -> str:
        """Return why a fault is not possible with so many undisturbed members; empty if it is."""
        if count < FAULT_KINDS[fault.kind].least:
            return f"only {count} processes are at work"
        if count - touched_by(fault.kind, count) < self._min_alive:
            return "too few others are at work"
        return ""

    # What is done to processes

    def _aim(self, fault: PlannedFault, members: list[Victim]) -> Victim:
        (target,) = self.targets = tuple(pick(members, fault.target))
        self._job.on_fault(fault, target)
        return target

    def _kill(self, fault: PlannedFault, members: list[Victim]) -> str:
        return self.kill(fault, pick(members, fault.target, touched_by(fault.kind, len(members))))

    def _leave(self, fault: PlannedFault, members: list[Victim]) -> str:
        target = self._aim(fault, members)
        self._disturbed.add(target.pid)
        target.signal(signal.SIGTERM)
        return f"asked {target.title} to leave"

    def _stop(self, fault: PlannedFault, members: list[Victim]) -> str:
        target = self._aim(fault, members)
        self._disturbed.add(target.pid)
        target.signal(signal.SIGSTOP)

        def release() -> None:
            self._disturbed.discard(target.pid)
            self._job.on_release(fault, target)
            target.signal(signal.SIGCONT)

        self.later(fault.seconds, release)
        return f"stopped {target.title} for {fault.seconds:.2f} s"

    def _slow(self, fault: PlannedFault, members: list[Victim]) -> str:
        target, pulse = self._aim(fault, members), between(SLOW_PULSE, fault.how)
        self._disturbed.add(target.pid)
        until = time.monotonic() + fault.seconds

        def stop() -> None:
            if time.monotonic() < until and target.pid in self._disturbed:
                target.signal(signal.SIGSTOP)
                self.later(pulse, release)
            else:
                self._disturbed.discard(target.pid)

        def release() -> None:
            target.signal(signal.SIGCONT)
            self.later(pulse, stop)

        stop()
        return f"slowed {target.title} down for {fault.seconds:.2f} s"

    def _cut(self, fault: PlannedFault, members: list[Victim]) -> str:
        target = self._aim(fault, members)
        count = 0
        for other in members:
            if other is not target:
                self._job.on_fault(fault, other)
                count += cut(target.pid, other.pid)
        return f"broke {count} connection{'' if count == 1 else 's'} of {target.title}"


def titles(targets: Sequence[Victim]) -> str:
    return ", ".join(each.title for each in targets) or "no process"
