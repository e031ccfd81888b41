"""Plans the faults of a job, from a seed, before the job begins. Pure.

The plan follows a model of the job, so that it is feasible: no process is killed twice without a restart in between,
and enough members are left to continue. The trial checks each fault against the real processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS: Final = {
    "kill": "a process is killed",
    "stop": "a process is stopped for a while, as under a debugger or on a laptop that sleeps",
    "slow": "a process is stopped many times for a moment",
    "leave": "a process is asked to leave (SIGTERM)",
    "join": "a process that ended is started again, or one is added",
    "cut": "all connections between two processes break",
}

SHORT_STOP: Final = (0.05, 0.25)
"""Seconds, well below the time after which a stopped process is excluded: no member may be lost."""
LONG_STOP: Final = (0.9, 1.8)
"""Seconds, well above that time: the others continue without it."""
SLOW: Final = (0.5, 1.5)
"""Seconds for which a process is slow."""
SLOW_PULSE: Final = (0.02, 0.05)
"""Seconds of each stop, and between two of them."""
EXTRA: Final = 2
"""Most processes that join beyond those that the job began with."""
BARREN: Final = 20
"""The plan ends after this many draws in a row without a feasible fault, as with one member and no newcomer."""
RETURN_SECONDS: Final = 1.5
"""Roughly how long a restarted process takes to become a member."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: what is done to which process, and when."""

    number: int
    at: float
    """Seconds after the work began."""
    kind: str
    rank: int
    """The slot of the process."""
    other: int = -1
    """The other end of a cut."""
    seconds: float = 0.0
    """How long a stop or slowness lasts."""
    pulse: float = 0.0
    """Seconds of each stop of a slow process."""

    @property
    def is_loss(self) -> bool:
        """Whether the members have to continue without the process."""
        return self.kind in ("kill", "leave") or (self.kind == "stop" and self.seconds >= LONG_STOP[0])

    def __str__(self) -> str:
        if self.kind == "cut":
            return f"cut ranks {self.rank} and {self.other}"
        length = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} rank {self.rank}{length}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chaos:
    """The settings of a plan of faults; checked when built."""

    size: int
    seed: int
    kinds: tuple[str, ...] = tuple(KINDS)
    every: float = 2.0
    """Seconds between two faults on average: each pause is drawn from half to one and a half of it."""
    count: int = 10
    duration: float | None = None
    """No fault comes later than this after the work began."""
    restarts: int = 0
    """How often a process that fails is restarted automatically."""
    min_alive: int = 1
    """Members that are undisturbed at any time."""

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"--faults knows no {kind!r}; choose from {', '.join(KINDS)}")
        if not self.kinds:
            raise ConfigError(f"--faults names none; choose from {', '.join(KINDS)}")
        if self.size < 2:
            raise ConfigError(f"chaos needs at least 2 processes, so that one is left; got -n {self.size}")
        if not 1 <= self.min_alive < self.size:
            raise ConfigError(
                f"--min-alive {self.min_alive} must be at least 1 and less than the {self.size} processes"
            )
        if not self.every > 0:
            raise ConfigError(f"--every {self.every:g} must be a number of seconds above 0")

    @property
    def most(self) -> int:
        """How many slots there may be."""
        return self.size + (EXTRA if "join" in self.kinds else 0)


def plan(chaos: Chaos) -> list[PlannedFault]:
    """Return the faults in order; the same arguments give the same faults."""
    return _Planner(chaos).faults()


class _Planner:
    """Draws faults one after another, and models their effect on the job."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        self._random = random.Random(f"covey chaos {chaos.seed}")
        self._now = 0.0
        self._slots = chaos.size
        self._back_at = {rank: 0.0 for rank in range(chaos.size)}
        """By slot: when its process is a running member, by this model. Processes that never return are missing."""
        self._restarts = dict.fromkeys(range(chaos.most), chaos.restarts)
        self._draw: dict[str, Callable[[int], PlannedFault | None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "slow": self._slow,
            "leave": self._leave,
            "join": self._join,
            "cut": self._cut,
        }

    def faults(self) -> list[PlannedFault]:
        chaos, faults = self._chaos, list[PlannedFault]()
        bag: list[str] = []
        barren = 0
        while len(faults) < chaos.count and barren < BARREN:
            self._now += chaos.every * self._random.uniform(0.5, 1.5)
            if chaos.duration is not None and self._now > chaos.duration:
                break
            fault = self._next(len(faults), bag)
            if fault is None:  # the kinds take turns; an infeasible kind stays due
                bag += self._random.sample(chaos.kinds, len(chaos.kinds))
                fault = self._next(len(faults), bag)
            if fault is not None:
                faults.append(fault)
            barren = 0 if fault is not None else barren + 1
        return faults

    def _next(self, number: int, bag: list[str]) -> PlannedFault | None:
        """Draw the first feasible fault of the kinds that are due; None if there is none."""
        for kind in list(dict.fromkeys(bag)):
            if (fault := self._draw[kind](number)) is not None:
                bag.remove(kind)
                return fault
        return None

    def _running(self) -> list[int]:
        return sorted(rank for rank, at in self._back_at.items() if at <= self._now)

    def _victim(self) -> int | None:
        """Return a member that the others can lose, if there is one."""
        running = self._running()
        return self._random.choice(running) if len(running) > self._chaos.min_alive else None

    def _kill(self, number: int) -> PlannedFault | None:
        rank = self._victim()
        if rank is None:
            return None
        del self._back_at[rank]
        if self._restarts[rank]:
            self._restarts[rank] -= 1
            self._back_at[rank] = self._now + RETURN_SECONDS
        return PlannedFault(number, self._now, "kill", rank)

    def _leave(self, number: int) -> PlannedFault | None:
        rank = self._victim()
        if rank is None:
            return None
        del self._back_at[rank]
        return PlannedFault(number, self._now, "leave", rank)

    def _stop(self, number: int) -> PlannedFault | None:
        rank = self._victim()
        if rank is None:
            return None
        is_long = self._random.random() < 0.5
        seconds = round(self._random.uniform(*(LONG_STOP if is_long else SHORT_STOP)), 3)
        self._back_at[rank] = self._now + seconds + (RETURN_SECONDS if is_long else 0.0)
        return PlannedFault(number, self._now, "stop", rank, seconds=seconds)

    def _slow(self, number: int) -> PlannedFault | None:
        rank = self._victim()
        if rank is None:
            return None
        seconds, pulse = (round(self._random.uniform(*span), 3) for span in (SLOW, SLOW_PULSE))
        self._back_at[rank] = self._now + seconds
        return PlannedFault(number, self._now, "slow", rank, seconds=seconds, pulse=pulse)

    def _join(self, number: int) -> PlannedFault | None:
        gone: Sequence[int] = [rank for rank in range(self._slots) if rank not in self._back_at]
        if gone:
            rank = self._random.choice(gone)
        elif self._slots < self._chaos.most:
            rank = self._slots
            self._slots += 1
        else:
            return None
        self._back_at[rank] = self._now + RETURN_SECONDS
        return PlannedFault(number, self._now, "join", rank)

    def _cut(self, number: int) -> PlannedFault | None:
        running = self._running()
        if len(running) < 2:
            return None
        rank, other = sorted(self._random.sample(running, 2))
        return PlannedFault(number, self._now, "cut", rank, other)
